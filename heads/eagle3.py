"""EAGLE-3 (arXiv 2503.01840) and EAGLE-3.1 (arXiv 2605.09992): one network, in the tensor names vLLM loads.

The first layer attends over the concatenation of the normed token embedding and the normed state; further layers are
ordinary decoder layers. `norm_output` and `fc_norm` make it EAGLE-3.1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from .base import (
    Attend,
    DraftOutput,
    DraftRows,
    Elsewhere,
    HeadError,
    No,
    TargetFacts,
    check_draft_vocab,
    default_aux_layer_ids,
)
from .decoder import DecoderConfig, DecoderHead, DecoderLayer, LayerParts
from .layers import Linear, RMSNorm, RotaryEmbedding, initialise_, nan_parameter
from .target_tensors import TargetTensors

SGLANG_GUESSES = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite")
"""Targets for which SGLang 0.5 adds one to the captured ids where the first is 1, and else takes them as they stand."""


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(DecoderConfig):
    """Shape and alignment flags of an EAGLE-3 head."""

    network = "spectrain.heads.eagle3:Eagle3Head"
    objective = "spectrain.train.objectives.eagle3:Eagle3Objective"
    proposer = "spectrain.infer.proposers.eagle3:Eagle3Proposer"
    requires_final_state = True

    layer_style: Literal["llama", "qwen3"]  # qwen3: q and k are normed per head
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.layer_ids:
            raise HeadError("the head needs at least one aux layer, found none; set head.layer_ids")
        if self.layer_style not in ("llama", "qwen3"):
            raise HeadError(f"head.layer_style must be llama or qwen3, found {self.layer_style!r}")

    @classmethod
    def derive(cls, target: TargetFacts, settings: Mapping[str, Any]) -> Self:
        if settings.get("layer_ids") is None:
            settings = {**settings, "layer_ids": default_aux_layer_ids(target.num_layers)}
        return super().derive(target, settings)

    @classmethod
    def implied(cls, target: TargetFacts) -> dict[str, Any]:
        return {
            **super().implied(target),
            "layer_style": "llama",
            "norm_before_residual": False,
            "norm_before_fc": False,
            "fc_norm": False,
            "norm_output": False,
        }

    def elsewhere(self) -> Elsewhere:
        why_not = self._not_in_sglang()
        return Elsewhere("method eagle3", "algorithm EAGLE3" if why_not is None else No(why_not))

    def _not_in_sglang(self) -> str | None:
        """Why SGLang's EAGLE-3 is another network than this, of which it would say nothing; None: it is the same."""
        if self.layer_style != "llama":
            return "it has Llama's layers only"
        if self.num_layers > 1:
            return "it norms the input of further layers by another tensor"
        if self.norm_before_residual:
            return "it adds the state before its norm"
        if not all(0 < i < self.target.num_layers for i in self.layer_ids):
            return "it captures states between two layers only"
        if self.target.model_type in SGLANG_GUESSES and self.layer_ids[0] != 2:
            return "it guesses from the first id how this family's layers are numbered"
        return None

    def serving_config(self) -> dict[str, Any]:
        """What vLLM and SGLang read. vLLM takes the ids of the top level, SGLang those of `eagle_config`, and adds one.

        Words there in place of ids stop SGLang where it would serve another network.
        """
        qwen3, sglang = self.layer_style == "qwen3", self.elsewhere().sglang
        return {
            "architectures": ["Eagle3Qwen3ForCausalLM" if qwen3 else "LlamaForCausalLMEagle3"],
            "model_type": "qwen3" if qwen3 else "llama",
            **super().serving_config(),
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.target.hidden_size,
            "num_aux_hidden_states": len(self.layer_ids),
            "eagle_aux_hidden_state_layer_ids": list(self.layer_ids),
            "norm_before_residual": self.norm_before_residual,
            "norm_before_fc": self.norm_before_fc,
            "fc_norm": self.fc_norm,
            "norm_output": self.norm_output,
            "eagle_config": {
                "use_aux_hidden_state": True,
                "norm_before_fc": self.norm_before_fc,
                "eagle_aux_hidden_state_layer_ids": (
                    f"SGLang: {sglang}" if isinstance(sglang, No) else [i - 1 for i in self.layer_ids]
                ),
            },
        }


class FirstLayer(LayerParts):
    """The layer that attends with the normed token embedding beside the normed state; its input is both, in a line."""

    def __init__(self, config: Eagle3Config) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        super().__init__(config, 0, 2 * hidden, qk_norm=config.layer_style == "qwen3")
        self.norm_before_residual = config.norm_before_residual
        self.hidden_norm, self.input_layernorm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)

    def forward(self, embeds: Tensor, states: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        normed = self.hidden_norm(states)
        x = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        return self.mix(normed if self.norm_before_residual else states, x, cos, sin, attend)


class OutputHead(nn.Module):
    """The draft vocabulary's output matrix; a module only so that its tensor is called `lm_head.weight`."""

    def __init__(self, draft_vocab: int, hidden: int) -> None:
        super().__init__()
        self.weight = nan_parameter(draft_vocab, hidden)


class Eagle3Head(DecoderHead):
    """The EAGLE-3 network; tensor names are those of the checkpoint."""

    config: Eagle3Config
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        hidden, wide = config.hidden_size, len(config.layer_ids) * config.target.hidden_size
        if config.norm_before_fc:
            self.input_norm = RMSNorm(wide, config.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                RMSNorm(config.target.hidden_size, config.rms_norm_eps) for _ in config.layer_ids
            )
        self.fc = Linear(wide, hidden)
        qk_norm = config.layer_style == "qwen3"
        further = [DecoderLayer(config, i, qk_norm=qk_norm) for i in range(1, config.num_layers)]
        self.layers = nn.ModuleList([FirstLayer(config), *further])
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = OutputHead(config.draft_vocab_size, hidden)
        self.rotary = RotaryEmbedding(config.head_dim, config.rope_parameters, config.max_position_embeddings)
        if config.draft_vocab_size < config.vocab_size:
            # -1 marks a map nobody has set; `set_draft_vocab` or a load fills it
            self.register_buffer("d2t", torch.full((config.draft_vocab_size,), -1, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))

    def forward(self, rows: DraftRows, attend: Attend) -> DraftOutput:
        """One step over rows of any leading shape."""
        cos, sin = self.rotary(rows.positions)
        first, *further = self.layers
        states = first(rows.token_embeds, rows.states, cos, sin, attend)
        for layer in further:
            states = layer(states, cos, sin, attend)
        normed = self.norm(states)
        return DraftOutput(normed, normed if self.config.norm_output else states)

    def combine(self, aux_states: Tensor, target: TargetTensors) -> Tensor:
        if self.config.fc_norm:
            aux_states = torch.stack([norm(aux_states[..., i, :]) for i, norm in enumerate(self.fc_norm)], dim=-2)
        flat = aux_states.flatten(-2)
        return self.fc(self.input_norm(flat) if self.config.norm_before_fc else flat)

    def output_weight(self, target: TargetTensors) -> Tensor:
        return self.lm_head.weight

    def draft_to_target(self) -> Tensor | None:
        if self.config.draft_vocab_size == self.config.vocab_size:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def assert_filled(self) -> None:
        """Raises HeadError also where `d2t` is no map, or another one than `t2d`."""
        super().assert_filled()
        ids = self.draft_to_target()
        if ids is not None:
            check_draft_vocab(ids, self.config)
            if not torch.equal(self.t2d.nonzero()[:, 0], ids):
                raise HeadError("d2t and t2d must name the same target ids, found two sets; copy the head folder again")

    def initialise(self, target: TargetTensors, generator: torch.Generator) -> None:
        """Random layers between the target's own ends.

        fc passes the highest layer's state through, the final norm and the output head are the target's (the head cut
        to the draft vocabulary): training starts from features that already lie in the head's space. With a reduced
        vocabulary call `set_draft_vocab` first.
        """
        initialise_(self, generator)
        with torch.no_grad():
            ids = self.draft_to_target()
            self.lm_head.weight.copy_(target.lm_head if ids is None else target.lm_head[ids])
            self.fc.weight.zero_()
            self.fc.weight[:, -self.config.hidden_size :].fill_diagonal_(1.0)
            if target.norm.kind == "rms" and target.norm.weight is not None:
                self.norm.weight.copy_(target.norm.weight)

    def set_draft_vocab(self, token_ids: Tensor) -> None:
        """Stores the target ids [draft_vocab] int64 that can be drafted, ascending, as `d2t` offsets and `t2d`."""
        check_draft_vocab(token_ids, self.config)
        self.d2t.copy_(token_ids - torch.arange(len(token_ids)))
        self.t2d.zero_()
        self.t2d[token_ids] = True
