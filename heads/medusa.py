"""Medusa (arXiv 2401.10774): residual blocks and an output matrix a draft step, all reading the same target state.

    r_i = h, then num_layers times  r_i = r_i + SiLU(W r_i + b);   logits_i = logit_scale * lm_head_i r_i

Head i predicts x_{t+2+i}; x_{t+1} belongs to the target. The tensors are named as vLLM names them, which loads these
heads up to 0.32 and drafts a chain of top tokens with them; later versions have no Medusa.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .base import DraftOutput, Elsewhere, HeadError, No, TargetFacts
from .layers import Linear
from .per_step import PerStepConfig, PerStepHead
from .target_tensors import TargetTensors


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(PerStepConfig):
    """Shape of a set of Medusa heads."""

    network = "spectrain.heads.medusa:MedusaHead"
    objective = "spectrain.train.objectives.medusa:MedusaObjective"
    proposer = "spectrain.infer.proposers.medusa:MedusaProposer"

    num_layers: int  # residual blocks a head
    fc_bias: bool  # of the blocks
    lm_head: Literal["own", "shared"]  # shared: one for all heads, the target's own, not trained
    logit_scale: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_layers < (1 if self.lm_head == "shared" else 0):
            least = "1 where all heads share one output matrix" if self.lm_head == "shared" else "0"
            raise HeadError(f"head.num_layers must be at least {least}, found {self.num_layers}")
        if self.lm_head not in ("own", "shared"):
            raise HeadError(f"head.lm_head must be own or shared, found {self.lm_head!r}")

    @classmethod
    def defaults(cls, target: TargetFacts) -> dict[str, Any]:
        return {"num_heads": 5, "num_layers": 1, "fc_bias": True, "lm_head": "own", "logit_scale": 1.0}

    def serving_config(self) -> dict[str, Any]:
        """vLLM 0.32's keys.

        With a reduced vocabulary the architecture is one that vLLM refuses: its loader fails on `token_map` in its own
        check of filled parameters, or in an assertion without words where the heads have matrices of their own.
        """
        return {
            "architectures": [f"Medusa{'TokenMap' if isinstance(self.elsewhere().vllm, No) else ''}Model"],
            "model_type": "medusa",
            "hidden_size": self.target.hidden_size,
            "vocab_size": self.vocab_size,
            "truncated_vocab_size": self.draft_vocab_size if self.is_reduced else None,
            "num_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
            "medusa_fc_bias": self.fc_bias,
            "original_lm_head": self.lm_head == "shared",
            "logit_scale": self.logit_scale,
        }

    def elsewhere(self) -> Elsewhere:
        vllm = No("its loader fails on token_map") if self.is_reduced else "method medusa, up to 0.32"
        return Elsewhere(vllm, No("it has no Medusa"))


class ResidualBlocks(nn.Module):
    """The blocks of one head."""

    def __init__(self, hidden: int, num_layers: int, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Linear(hidden, hidden, bias) for _ in range(num_layers))

    def forward(self, states: Tensor) -> Tensor:
        for layer in self.layers:
            states = states + nn.functional.silu(layer(states))
        return states


class MedusaHead(PerStepHead):
    """All Medusa heads of one target; tensor names are those of the checkpoint."""

    config: MedusaConfig

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        hidden, shared = config.target.hidden_size, config.lm_head == "shared"
        self.blocks = nn.ModuleList(
            ResidualBlocks(hidden, config.num_layers, config.fc_bias) for _ in range(config.num_heads)
        )
        self.lm_heads = nn.ModuleList(
            Linear(hidden, config.draft_vocab_size) for _ in range(1 if shared else config.num_heads)
        )
        self.lm_heads.requires_grad_(not shared)

    def forward(self, states: Tensor, token_ids: Tensor, step: int) -> DraftOutput:
        """The state of head `step`; no head looks at a token, and every head reads the target's state."""
        scale, own = self.config.logit_scale, self.blocks[step](states)
        return DraftOutput(own if scale == 1.0 else own * scale, states)

    def output_weight(self, target: TargetTensors, step: int = 0) -> Tensor:
        return self.lm_heads[0 if self.config.lm_head == "shared" else step].get_parameter("weight")

    def initialise(self, target: TargetTensors, generator: torch.Generator) -> None:
        """Every head starts as the target's own output layer: blocks of zeros, and copies of its matrix.

        With a reduced vocabulary call `set_draft_vocab` first. Nothing is random.
        """
        ids = self.draft_to_target()
        with torch.no_grad():
            for parameter in self.blocks.parameters():
                parameter.zero_()
            for weight in self.lm_heads.parameters():
                weight.copy_(target.lm_head if ids is None else target.lm_head[ids])
