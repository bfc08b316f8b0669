"""Conditional drop (arXiv 2504.18583): later draft steps of a parallel head train on nested, shrinking sets of rows.

A row of step d attends to the same row's earlier steps, so what is kept at one step was kept at all before it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .batch import TrainBatch
from .draws import rank_in_documents

DROP_STREAM = 102


@dataclass(frozen=True, kw_only=True)
class DropSettings:
    """How many rows are kept from one step to the next, and of all."""

    retention: float = 0.7
    min_retention: float = 0.2

    def __post_init__(self) -> None:
        for name in ("retention", "min_retention"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"objective.{name} must lie between 0 and 1, found {getattr(self, name)}")

    def kept(self, valid: Tensor, batch: TrainBatch) -> Tensor:
        """Which of the rows `valid` [steps, batch * seq] bool train; the same shape."""
        steps = valid.view(-1, *batch.token_ids.shape)
        return drop_rows(steps, batch, self.retention, self.min_retention).flatten(1)


def drop_rows(valid: Tensor, batch: TrainBatch, retention: float, min_retention: float) -> Tensor:
    """Which of the rows `valid` [steps, batch, seq] bool, nested themselves, are kept; the same shape.

    Of a document's n rows at step 0, step d keeps int(n * max(retention^d, min_retention)), of these the valid ones.
    The draw is a function of document, epoch and position, whatever the batch.
    """
    ranks, sizes = rank_in_documents(valid[0], batch, DROP_STREAM)
    shares = [max(retention**step, min_retention) for step in range(len(valid))]
    # in float64 the product is the one that Python rounds down
    shares = torch.tensor(shares, dtype=torch.float64, device=valid.device).view(-1, 1, 1)
    return valid & (ranks < (sizes.double() * shares).long())
