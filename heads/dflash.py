"""DFlash (arXiv 2602.06036): a block of tokens drafted in one forward, conditioned on the target's states.

A block is the newest token, the anchor, and mask tokens behind it. Every layer sees, beside the block's own rows, keys
and values made of the states before the anchor. These context rows ask nothing themselves, so they are no rows of the
forward: `context` gives them once, and whoever attends keeps them (the engine in its planes, the trainer beside its
batch). Embeddings and output head are the target's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn

from .base import (
    Attend,
    Elsewhere,
    HeadError,
    No,
    TargetFacts,
    check_mask_token,
    check_whole_vocabulary,
    chosen_mask_token,
)
from .decoder import DecoderConfig, DecoderHead, DecoderLayer
from .layers import Linear, RMSNorm, RotaryEmbedding, initialise_
from .target_tensors import TargetTensors


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(DecoderConfig):
    """Shape of a DFlash head and what its slots mean.

    Slot s of a block with anchor x_a drafts x_{a+s} (slot 0 nothing), or x_{a+s+1} with `sample_from_anchor`: a head
    served otherwise than it was trained is off by one. `sliding_window` counts rows back from each row, that row
    included. `mask_token_id` is None until `fit` has chosen one.
    """

    network = "spectrain.heads.dflash:DFlashHead"
    objective = "spectrain.train.objectives.dflash:DFlashObjective"
    proposer = "spectrain.infer.proposers.dflash:DFlashProposer"
    requires_final_state = True

    block_size: int
    mask_token_id: int | None
    sample_from_anchor: bool
    causal: bool
    sliding_window: int | None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.layer_ids:
            raise HeadError("the head needs at least one aux layer, found none; set head.layer_ids")
        check_whole_vocabulary(self, "DFlash")
        if self.num_drafts < 1:
            raise HeadError(f"head.block_size must leave room for a draft beside the anchor, found {self.block_size}")
        check_mask_token(self.mask_token_id, self.vocab_size)
        if self.sliding_window is not None and self.sliding_window < self.block_size:
            raise HeadError(
                f"head.sliding_window must hold a block of {self.block_size}, found {self.sliding_window}; raise it, "
                f"or set it to null"
            )

    @property
    def first_draft_slot(self) -> int:
        """The first slot of a block that drafts."""
        return 0 if self.sample_from_anchor else 1

    @property
    def num_drafts(self) -> int:
        """Tokens a trained block drafts."""
        return self.block_size - self.first_draft_slot

    @classmethod
    def derive(cls, target: TargetFacts, settings: Mapping[str, Any]) -> Self:
        if settings.get("layer_ids") is None:
            settings = {**settings, "layer_ids": spread_layer_ids(target.num_layers)}
        return super().derive(target, settings)

    @classmethod
    def implied(cls, target: TargetFacts) -> dict[str, Any]:
        return {
            **super().implied(target),
            "num_layers": 5,
            "block_size": 16,
            "mask_token_id": None,
            "sample_from_anchor": False,
            "causal": False,
            "sliding_window": None,
        }

    def serving_config(self) -> dict[str, Any]:
        """As vLLM reads it. Causality is always spelled out: left to `layer_types`, a window would make blocks causal.

        vLLM ignores `sample_from_anchor` and would accept nothing, and it counts layers by their output, so that
        embeddings have no number: such heads carry a name it refuses.
        """
        window = {"use_swa": True, "swa_window_size": self.sliding_window} if self.sliding_window else {}
        return {
            "architectures": [f"{'Spectrain' if isinstance(self.elsewhere().vllm, No) else ''}DFlashDraftModel"],
            "model_type": "qwen3",
            **super().serving_config(),
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.target.hidden_size,
            "num_target_layers": self.target.num_layers,
            "block_size": self.block_size,
            "is_causal": self.causal,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": [i - 1 for i in self.layer_ids],
                "causal": self.causal,
                "sample_from_anchor": self.sample_from_anchor,
                **window,
            },
        }

    def elsewhere(self) -> Elsewhere:
        if self.sample_from_anchor:
            return Elsewhere(No("it ignores sample_from_anchor"), No("not tried with sample_from_anchor"))
        if 0 in self.layer_ids:
            return Elsewhere(No("it has no number for embeddings"), No("it has no number for embeddings"))
        return Elsewhere("method dflash", "algorithm DFLASH, not tried")


class BlockRows(NamedTuple):
    """One call's input: the rows of any number of blocks."""

    token_embeds: Tensor  # [..., hidden]
    positions: Tensor  # [...] int64


class DFlashHead(DecoderHead):
    """The DFlash network; tensor names are those of the checkpoint."""

    config: DFlashConfig

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config, self.mask_token_id = config, chosen_mask_token(config.mask_token_id)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = Linear(len(config.layer_ids) * config.target.hidden_size, hidden)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.layers = nn.ModuleList(DecoderLayer(config, i, qk_norm=True) for i in range(config.num_layers))
        self.norm = RMSNorm(hidden, eps)
        self.rotary = RotaryEmbedding(config.head_dim, config.rope_parameters, config.max_position_embeddings)

    def forward(self, rows: BlockRows, attend: Attend) -> Tensor:
        """The logits states [..., hidden] of each row; `attend` adds the context's keys and values."""
        cos, sin = self.rotary(rows.positions)
        states = rows.token_embeds
        for layer in self.layers:
            states = layer(states, cos, sin, attend)
        return self.norm(states)

    def context(self, aux_states: Tensor, positions: Tensor, target: TargetTensors) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [..., kv_heads, head_dim] of each layer for context rows.

        aux_states [..., num_layer_ids, target_hidden]; positions [...] int64, those of the states' own tokens.
        """
        cos, sin = self.rotary(positions)
        combined = self.combine(aux_states, target)
        return [cast(DecoderLayer, layer).self_attn.keys_values(combined, cos, sin) for layer in self.layers]

    def block_ids(self, anchors: Tensor, size: int) -> Tensor:
        """The ids [..., size] int64 of blocks that begin with the anchors [...] int64."""
        masks = torch.full_like(anchors[..., None], self.mask_token_id)
        return torch.cat([anchors[..., None], masks.expand(*anchors.shape, size - 1)], dim=-1)

    def combine(self, aux_states: Tensor, target: TargetTensors) -> Tensor:
        return self.hidden_norm(self.fc(aux_states.flatten(-2)))

    def output_weight(self, target: TargetTensors) -> Tensor:
        return target.lm_head

    def initialise(self, target: TargetTensors, generator: torch.Generator) -> None:
        """Random layers before the target's own final norm, which is what its output head expects."""
        initialise_(self, generator)
        if target.norm.kind == "rms" and target.norm.weight is not None:
            with torch.no_grad():
                self.norm.weight.copy_(target.norm.weight)


def spread_layer_ids(num_layers: int) -> tuple[int, ...]:
    """The outputs of layers 1 to L-3 at five even steps, as ids of the layer after; fewer for shallow targets."""
    last = max(num_layers - 3, 1)
    outputs = {round(1 + i * (last - 1) / 4) for i in range(5)}
    return tuple(sorted(output + 1 for output in outputs))
