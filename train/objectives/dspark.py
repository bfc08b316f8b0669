"""DSpark (arXiv 2607.05147): DFlash's blocks, every slot biased by the text's own token before it.

    L = S(0.1 ce + 0.9 |p - q|_1) + confidence_weight * S(BCE(c, 1 - |p - q|_1 / 2))

where S is DFlash's weighted sum over drafts and c the confidence head's logit. Its label, the chance that the draft is
accepted, carries no gradient.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...heads.base import DraftHead
from ...heads.dspark import DSparkConfig, DSparkHead
from ...heads.target_tensors import TargetTensors
from .. import alignment
from ..batch import TrainBatch
from ..losses import LossKind
from .base import LossOutput
from .dflash import DFlashObjective, DFlashSettings, DraftLogits, ScoredDrafts
from .rollout import SupervisedRows


@dataclass(frozen=True, kw_only=True)
class DSparkSettings(DFlashSettings):
    """A recipe's `objective` section."""

    loss: LossKind = "ce_tv"
    slot_decay: float = 4.0
    confidence_weight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.confidence_weight >= 0:
            raise ValueError(f"objective.confidence_weight must be 0 or more, found {self.confidence_weight}")


class DSparkObjective(DFlashObjective):
    """Adds the metric `confidence_k`: the confidence head's cross-entropy at draft k."""

    settings: DSparkSettings

    def __init__(self, config: DSparkConfig, settings: DSparkSettings) -> None:
        super().__init__(config, settings)

    def draft_logits(
        self, head: DraftHead, target: TargetTensors, batch: TrainBatch, found: SupervisedRows, states: Tensor
    ) -> DraftLogits:
        assert isinstance(head, DSparkHead)
        rows = head.embed_previous(self._previous(batch, found)).to(states.dtype)
        return DraftLogits(
            torch.cat([states, rows], dim=1), head.markov_head.markov_w2.weight, head.output_weight(target)
        )

    def finish(self, head: DraftHead, batch: TrainBatch, drafts: ScoredDrafts, output: LossOutput) -> LossOutput:
        assert isinstance(head, DSparkHead)
        if not head.config.confidence_head:
            return output
        logits = head.confidence(drafts.states, self._previous(batch, drafts.found))
        alphas = drafts.losses.alphas.detach().clamp(0, 1)
        errors = nn.functional.binary_cross_entropy_with_logits(logits, alphas, reduction="none")
        sums = errors.new_zeros(self.num_terms).index_add(0, drafts.found.steps, errors.detach())
        metrics = {f"confidence_{k}": (sums[k], output.metrics[f"loss_{k}"][1]) for k in range(self.num_terms)}
        total = output.loss + self.settings.confidence_weight * (drafts.weights * errors).sum()
        return LossOutput(total, {**output.metrics, **metrics})

    def _previous(self, batch: TrainBatch, found: SupervisedRows) -> Tensor:
        """The text's token before each draft [num_rows] int64: the anchor before the first."""
        tokens = torch.stack([alignment.input_tokens(batch, k).flatten() for k in range(self.num_terms)])
        return tokens[found.steps, found.rows]
