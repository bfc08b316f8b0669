"""What ids and masks decide for heads with one loss term a draft step, and the metrics all of them report."""

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from ...heads.base import DraftHead
from .. import alignment
from ..batch import TrainBatch
from ..losses import HARD_LABELS, LossKind, RowLosses
from .base import Objective


class Supervision(NamedTuple):
    """Everything ids and masks decide; grids are [steps, batch * seq]."""

    valid: Tensor  # bool
    tops: Tensor  # int64 draft ids of the target's top token at the soft label's row; -1 outside the draft vocabulary
    labels: Tensor  # int64 draft ids the loss asks for; -1 outside
    weights: Tensor  # bool; valid and draftable

    def among(self, rows: Tensor) -> "Supervision":
        """What is left of it where only `rows` [steps or 1, batch * seq] bool count."""
        return self._replace(valid=self.valid & rows, weights=self.weights & rows)


class SupervisedObjective(Objective):
    """An objective whose rows are decided by ids and masks, the same before the forward and in it."""

    def count(self, head: DraftHead, batch: TrainBatch) -> Tensor:
        return self.supervise(head, batch).weights.sum(dim=1, dtype=torch.float32)

    @abstractmethod
    def supervise(self, head: DraftHead, batch: TrainBatch) -> Supervision:
        """Which rows count at which step."""


def supervise(head: DraftHead, batch: TrainBatch, num_steps: int, loss: LossKind, ahead: int = 1) -> Supervision:
    """The rows of every step; the label is the text's token for `ce`, the target's top token for the other losses."""
    draft_to_target, vocab_size = head.draft_to_target(), head.config.vocab_size

    def draft_ids(per_step: list[Tensor]) -> Tensor:
        return alignment.to_draft_ids(torch.stack(per_step).flatten(1), draft_to_target, vocab_size)

    valid = alignment.valid_rows(batch, num_steps, ahead).flatten(1)
    tops = draft_ids([alignment.label_tops(batch, k, ahead) for k in range(num_steps)])
    labels = tops
    if loss in HARD_LABELS:
        labels = draft_ids([alignment.label_tokens(batch, k, ahead) for k in range(num_steps)])
    return Supervision(valid, tops, labels, valid & (labels >= 0))


def step_metrics(
    supervision: Supervision, losses: RowLosses, steps: Tensor, rows: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Per step k: `loss_k`, `entropy_k`, `alpha_k` over supervised rows, `agree_k`, `accept_k` over valid ones.

    `losses` of supervised rows `rows` at `steps`, both [num_rows] int64.
    """
    agree = torch.zeros_like(supervision.valid)
    agree[steps, rows] = losses.top_ids == supervision.tops[steps, rows]
    valid, supervised = (grid.sum(dim=1, dtype=torch.float32) for grid in (supervision.valid, supervision.weights))
    accepted = agree.cumprod(dim=0)

    def per_step(values: Tensor) -> Tensor:
        return torch.zeros_like(supervised).index_add_(0, steps, values.detach().float())

    grids = {
        "loss": (per_step(losses.losses), supervised),
        "entropy": (per_step(losses.entropies), supervised),
        "alpha": (per_step(losses.alphas), supervised),
        "agree": (agree.sum(dim=1, dtype=torch.float32), valid),
        "accept": (accepted.sum(dim=1, dtype=torch.float32), valid),
    }
    return {
        f"{name}_{step}": (numerators[step], denominators[step])
        for name, (numerators, denominators) in grids.items()
        for step in range(len(supervised))
    }
