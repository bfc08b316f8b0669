"""DSpark (arXiv 2607.05147): a DFlash block whose slots are drafted in turn, each biased by the token before it.

The bias is of low rank, W2 W1[previous], so neighbours agree where marginals of a block would contradict each other. A
second small head foretells each draft's chance of acceptance.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .base import Elsewhere, HeadError, TargetFacts
from .dflash import DFlashConfig, DFlashHead
from .layers import Linear
from .target_tensors import TargetTensors


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(DFlashConfig):
    """A DFlash head's shape, the rank of the pair bias, and whether acceptance is foretold.

    `num_candidates` is how many tokens of a slot are weighed when drafting; None: all of them, as in training.
    """

    network = "spectrain.heads.dspark:DSparkHead"
    objective = "spectrain.train.objectives.dspark:DSparkObjective"
    proposer = "spectrain.infer.proposers.dspark:DSparkProposer"

    markov_rank: int
    confidence_head: bool
    num_candidates: int | None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.markov_rank < 1:
            raise HeadError(f"head.markov_rank must be 1 or more, found {self.markov_rank}")
        if self.num_candidates is not None and not 1 <= self.num_candidates <= self.vocab_size:
            raise HeadError(
                f"head.num_candidates must lie between 1 and the target's {self.vocab_size} tokens, found "
                f"{self.num_candidates}; change it, or set it to null for all of them"
            )

    @classmethod
    def implied(cls, target: TargetFacts) -> dict[str, Any]:
        changes = {"block_size": 7, "sample_from_anchor": True}
        own = {"markov_rank": 256, "confidence_head": True, "num_candidates": None}
        return {**super().implied(target), **changes, **own}

    def serving_config(self) -> dict[str, Any]:
        """DFlash's, with the keys of the two heads; nothing but a DSpark loader accepts the architecture's name."""
        return {
            **super().serving_config(),
            "architectures": ["DSparkDraftModel"],
            "markov_rank": self.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": self.confidence_head,
            "confidence_head_with_markov": True,
        }

    def elsewhere(self) -> Elsewhere:
        return Elsewhere("method dspark, from 0.33, not tried", "algorithm DSPARK, not tried")


class MarkovHead(nn.Module):
    """The pair bias' two factors."""

    def __init__(self, vocab: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = Linear(rank, vocab)
        self.markov_w2 = Linear(rank, vocab)


class ConfidenceHead(nn.Module):
    """A logit of acceptance from a slot's state and its previous token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = Linear(width, 1, bias=True)


class DSparkHead(DFlashHead):
    """The DSpark network; tensor names are those of the checkpoint."""

    config: DSparkConfig

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.markov_head = MarkovHead(config.vocab_size, config.markov_rank)
        if config.confidence_head:
            self.confidence_head = ConfidenceHead(config.hidden_size + config.markov_rank)

    def embed_previous(self, token_ids: Tensor) -> Tensor:
        """Rows [..., rank] of W1 for the tokens before each slot."""
        return nn.functional.embedding(token_ids, self.markov_head.markov_w1.weight)

    def pair_bias(self, previous: Tensor, candidates: Tensor | None = None) -> Tensor:
        """What is added to the logits of a slot behind the tokens `previous` [...] int64.

        Over the vocabulary [..., vocab], or over `candidates` [..., num_candidates] int64; float32.
        """
        rows, weight = self.embed_previous(previous), self.markov_head.markov_w2.weight
        if candidates is None:
            return nn.functional.linear(rows, weight).float()
        return torch.einsum("...r,...cr->...c", rows, nn.functional.embedding(candidates, weight)).float()

    def confidence(self, states: Tensor, previous: Tensor) -> Tensor:
        """Logits [...] float32 of the chance that the draft at states [..., hidden] is accepted."""
        features = torch.cat([states, self.embed_previous(previous).to(states.dtype)], dim=-1)
        return self.confidence_head.proj(features).squeeze(-1).float()

    def initialise(self, target: TargetTensors, generator: torch.Generator) -> None:
        """As DFlash; the pair bias starts at zero."""
        super().initialise(target, generator)
        with torch.no_grad():
            self.markov_head.markov_w2.weight.zero_()
