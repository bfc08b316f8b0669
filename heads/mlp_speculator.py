"""The MLP speculator (arXiv 2404.19124): a chain of small layers, each fed the state before it and the newest token.

    z_i = emb_i(x_{t+1+i});   s_i = GELU(ln_i(proj_i s_{i-1} + (w_e / w_s) z_i));   logits_i = head_i s_i
    w_s = 0.5^(0.5 / n),  w_e = sqrt((1 - w_s^2) D / 2);   s_{-1} = h_t, with `scale_input` ln0(h_t) / sqrt(2)

n is the number of heads, D the inner width; ln is an RMS norm with scale and shift, ln0 one without either. To the norm
w_e / w_s beside the embedding is the same as w_s beside the state and w_e beside the embedding.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from .base import DraftOutput, Elsewhere, HeadError, No, TargetFacts
from .layers import Linear, RMSNorm, nan_parameter
from .per_step import PerStepConfig, PerStepHead
from .target_tensors import TargetTensors

EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class MLPSpeculatorConfig(PerStepConfig):
    """Shape of an MLP speculator."""

    network = "spectrain.heads.mlp_speculator:MLPSpeculatorHead"
    objective = "spectrain.train.objectives.mlp_speculator:MLPSpeculatorObjective"
    proposer = "spectrain.infer.proposers.mlp_speculator:MLPSpeculatorProposer"

    emb_dim: int  # of the target's states
    inner_dim: int
    tie_weights: bool  # one embedding, norm and output matrix for all heads, one projection for all but the first
    scale_input: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.emb_dim != self.target.hidden_size:
            raise HeadError(
                f"the first projection reads the target's states, so head.emb_dim must be {self.target.hidden_size}, "
                f"found {self.emb_dim}; leave it null"
            )
        if self.inner_dim < 1:
            raise HeadError(f"head.inner_dim must be 1 or more, found {self.inner_dim}")
        if self.tie_weights and self.num_heads == 1:
            raise HeadError("head.tie_weights ties several heads, found head.num_heads = 1; set one of them")

    @classmethod
    def defaults(cls, target: TargetFacts) -> dict[str, Any]:
        width = target.hidden_size
        return {"num_heads": 3, "emb_dim": width, "inner_dim": width, "tie_weights": False, "scale_input": False}

    @classmethod
    def derive(cls, target: TargetFacts, settings: Mapping[str, Any]) -> Self:
        # 0 is how the published configs ask for the target's width
        return super().derive(target, {**settings, "inner_dim": settings.get("inner_dim") or None})

    def serving_config(self) -> dict[str, Any]:
        """The keys of the published accelerators.

        No vLLM whose engine is V1 runs them: they are for TGI and for our engine. A reduced vocabulary is ours alone,
        and its architecture is one that others refuse.
        """
        return {
            "architectures": ["MLPSpeculatorTokenMapModel" if self.is_reduced else "MLPSpeculatorPreTrainedModel"],
            "model_type": "mlp_speculator",
            "vocab_size": self.vocab_size,
            "truncated_vocab_size": self.draft_vocab_size if self.is_reduced else None,
            "emb_dim": self.emb_dim,
            "inner_dim": self.inner_dim,
            "n_predict": self.num_heads,
            "top_k_tokens_per_head": [1] * self.num_heads,
            "n_candidates": 1,
            "tie_weights": self.tie_weights,
            "scale_input": self.scale_input,
        }

    def elsewhere(self) -> Elsewhere:
        return Elsewhere(No("its V1 engine runs none"), No("it has none"))

    @property
    def embedding_weight(self) -> float:
        """w_e / w_s."""
        state = 0.5 ** (0.5 / self.num_heads)
        return math.sqrt((1 - state**2) * self.inner_dim / 2) / state


class ShiftedRMSNorm(RMSNorm):
    """RMSNorm with a shift after the scale."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        self.bias = nan_parameter(size)

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x.float()) + self.bias.float()).to(x.dtype)


class Embedding(nn.Module):
    """A table of rows that starts as NaN."""

    def __init__(self, vocab: int, size: int) -> None:
        super().__init__()
        self.weight = nan_parameter(vocab, size)

    def forward(self, token_ids: Tensor) -> Tensor:
        return nn.functional.embedding(token_ids, self.weight)


class Speculator(nn.Module):
    """The modules, a list a kind; tied kinds have one entry, and tied projections two."""

    def __init__(self, config: MLPSpeculatorConfig) -> None:
        super().__init__()
        width = config.inner_dim
        each = 1 if config.tie_weights else config.num_heads
        inputs = [config.emb_dim, *[width] * (config.num_heads - 1)][: 2 if config.tie_weights else None]
        self.emb = nn.ModuleList(Embedding(config.vocab_size, width) for _ in range(each))
        self.proj = nn.ModuleList(Linear(size, width) for size in inputs)
        self.ln = nn.ModuleList(ShiftedRMSNorm(width, EPS) for _ in range(each))
        self.head = nn.ModuleList(Linear(width, config.draft_vocab_size) for _ in range(each))


class MLPSpeculatorHead(PerStepHead):
    """The MLP speculator; tensor names are those of the published accelerators."""

    config: MLPSpeculatorConfig

    def __init__(self, config: MLPSpeculatorConfig) -> None:
        super().__init__(config)
        self.speculator = Speculator(config)

    def forward(self, states: Tensor, token_ids: Tensor, step: int) -> DraftOutput:
        parts = self.speculator
        if step == 0 and self.config.scale_input:
            wide = states.float()
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
            states = (wide / math.sqrt(2)).to(states.dtype)
        states = self._of(parts.proj, step)(states)
        states = states + self._of(parts.emb, step)(token_ids).to(states.dtype) * self.config.embedding_weight
        states = nn.functional.gelu(self._of(parts.ln, step)(states))
        return DraftOutput(states, states)

    def output_weight(self, target: TargetTensors, step: int = 0) -> Tensor:
        return self._of(self.speculator.head, step).get_parameter("weight")

    def initialise(self, target: TargetTensors, generator: torch.Generator) -> None:
        """Matrices and embeddings N(0, 1/D), norms 1 and 0; nothing is taken from the target.

        With a reduced vocabulary call `set_draft_vocab` first.
        """
        std = self.config.inner_dim**-0.5
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() > 1:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
                else:
                    parameter.fill_(1.0 if name.endswith("weight") else 0.0)

    def _of(self, modules: nn.ModuleList, step: int) -> nn.Module:
        """The module of a step; tied ones are the last entry for every step beyond it."""
        return modules[min(step, len(modules) - 1)]
