"""Medusa and MLP speculator for tests: every shape they come in, and a drafter written from the papers' formulas."""

import math

import torch
from torch import Tensor

from spectrain.heads.medusa import MedusaConfig
from spectrain.heads.mlp_speculator import MLPSpeculatorConfig
from spectrain.heads.per_step import PerStepConfig, PerStepHead
from spectrain.heads.target_tensors import TargetTensors
from spectrain.tests.train.formulas import normed
from spectrain.tests.train.toys import tiny_config
from spectrain.train.objectives.medusa import MedusaObjective, MedusaSettings
from spectrain.train.objectives.mlp_speculator import MLPSpeculatorObjective
from spectrain.train.objectives.per_step import PerStepObjective, PerStepSettings

STYLES: dict[str, tuple[type[PerStepConfig], dict[str, object]]] = {
    "medusa": (MedusaConfig, {}),
    "medusa, two blocks": (MedusaConfig, {"num_layers": 2}),
    "medusa, no bias": (MedusaConfig, {"fc_bias": False}),
    "medusa, no block": (MedusaConfig, {"num_layers": 0}),
    "medusa, shared lm_head": (MedusaConfig, {"lm_head": "shared"}),
    "medusa, scaled": (MedusaConfig, {"logit_scale": 0.5}),
    "medusa, token map": (MedusaConfig, {"draft_vocab_size": 11}),
    "medusa, shared lm_head and token map": (MedusaConfig, {"lm_head": "shared", "draft_vocab_size": 11}),
    "mlp": (MLPSpeculatorConfig, {}),
    "mlp, wider inside": (MLPSpeculatorConfig, {"inner_dim": 24}),
    "mlp, tied": (MLPSpeculatorConfig, {"tie_weights": True}),
    "mlp, scaled input": (MLPSpeculatorConfig, {"scale_input": True}),
    "mlp, tied and scaled": (MLPSpeculatorConfig, {"tie_weights": True, "scale_input": True, "inner_dim": 24}),
    "mlp, token map": (MLPSpeculatorConfig, {"draft_vocab_size": 11}),
}


def make_config(style: str, vocab: int = 16, hidden: int = 16, heads: int = 3, **settings: object) -> PerStepConfig:
    kind, changes = STYLES[style]
    return kind.derive(tiny_config(vocab=vocab, hidden=hidden).target, {"num_heads": heads, **changes, **settings})


def make_objective(config: PerStepConfig, **settings: object) -> PerStepObjective:
    if isinstance(config, MedusaConfig):
        return MedusaObjective(config, MedusaSettings(**settings))
    assert isinstance(config, MLPSpeculatorConfig)
    return MLPSpeculatorObjective(config, PerStepSettings(**settings))


class ReferenceDrafter:
    """One row's drafts: feed it the newest token, read the logits, feed it the next."""

    def __init__(self, head: PerStepHead, target: TargetTensors, final: Tensor) -> None:
        self.c, self.w = head.config, head.state_dict()
        self.h = normed(target, final)
        self.state, self.step = self.h, 0

    def logits(self, token: int) -> Tensor:
        made = self._medusa() if isinstance(self.c, MedusaConfig) else self._mlp(token)
        self.step += 1
        return made

    def _medusa(self) -> Tensor:
        c, i = self.c, self.step
        assert isinstance(c, MedusaConfig)
        r = self.h
        for j in range(c.num_layers):
            a = self.w[f"blocks.{i}.layers.{j}.weight"] @ r
            if c.fc_bias:
                a = a + self.w[f"blocks.{i}.layers.{j}.bias"]
            r = r + a / (1 + (-a).exp())
        return c.logit_scale * (self.w[f"lm_heads.{0 if c.lm_head == 'shared' else i}.weight"] @ r)

    def _mlp(self, token: int) -> Tensor:
        c, i = self.c, self.step
        assert isinstance(c, MLPSpeculatorConfig)
        same = 0 if c.tie_weights else i
        if i == 0 and c.scale_input:
            self.state = self.h / (self.h.pow(2).mean() + 1e-6).sqrt() / 2**0.5
        w_s = 0.5 ** (0.5 / c.num_heads)
        w_e = ((1 - w_s**2) * c.inner_dim / 2) ** 0.5
        proj = self.w[f"speculator.proj.{min(i, 1) if c.tie_weights else i}.weight"]
        x = proj @ self.state + w_e / w_s * self.w[f"speculator.emb.{same}.weight"][token]
        x = x / (x.pow(2).mean() + 1e-6).sqrt()
        x = x * self.w[f"speculator.ln.{same}.weight"] + self.w[f"speculator.ln.{same}.bias"]
        self.state = x * (1 + torch.erf(x / math.sqrt(2))) / 2
        return self.w[f"speculator.head.{same}.weight"] @ self.state


@torch.no_grad()
def teacher_forced(head: PerStepHead, target: TargetTensors, token_ids: Tensor, final: Tensor) -> dict:
    """(t, k) -> draft logits of one document, wherever the token x_{t+1+k} exists."""
    found = {}
    for t in range(len(token_ids)):
        drafter = ReferenceDrafter(head, target, final[t])
        for k in range(min(head.config.num_heads, len(token_ids) - 1 - t)):
            found[t, k] = drafter.logits(int(token_ids[t + 1 + k]))
    return found


@torch.no_grad()
def accepted_drafts(head: PerStepHead, target: TargetTensors, token_ids: Tensor, final: Tensor, row: int) -> int:
    """Greedy drafts from `row` that equal the text, up to the first miss; the text is the target's own output."""
    drafter, token = ReferenceDrafter(head, target, final[row]), int(token_ids[row + 1])
    ids = head.draft_to_target()
    for k in range(head.config.num_heads):
        best = int(drafter.logits(token).argmax())
        token = best if ids is None else int(ids[best])
        if token != int(token_ids[row + 2 + k]):
            return k
    return head.config.num_heads
