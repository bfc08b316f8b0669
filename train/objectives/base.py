"""What an objective is: a head, the target's tensors and a batch in; one loss whose gradient is a plain sum out."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from ...heads.base import DraftHead
from ...heads.target_tensors import TargetTensors
from ..batch import TrainBatch


class LossOutput(NamedTuple):
    """`loss` is this micro-batch's share of the step's loss: shares add up over micro-batches and ranks."""

    loss: Tensor  # [] float32
    metrics: dict[
        str, tuple[Tensor, Tensor]
    ]  # name -> (numerator, denominator), both summed over ranks before dividing


class Objective(ABC):
    """The loss of one method. It holds no parameters; alignment is its first line."""

    @property
    @abstractmethod
    def num_terms(self) -> int:
        """Number of separately normalised loss terms (draft steps, heads or slots)."""

    @abstractmethod
    def count(self, head: DraftHead, batch: TrainBatch) -> Tensor:
        """Supervised rows per term [num_terms] float32, before any forward.

        Read from ids, masks and the head's draft vocabulary alone; no states are looked at.
        """

    @abstractmethod
    def __call__(self, head: DraftHead, target: TargetTensors, batch: TrainBatch) -> LossOutput:
        """The loss of one micro-batch, each term divided by `batch.denominators`."""


def predicted_acceptance_length(metrics: Mapping[str, tuple[Tensor, Tensor]]) -> float:
    """1 + the sum of the shares `accept_{k}`: tokens emitted per target forward when drafts are the head's top tokens.

    `accept_{k}` counts the rows where all of steps 0..k agree with the target's top token; a step without rows adds 0.
    """
    length, step = 1.0, 0
    while (share := metrics.get(f"accept_{step}")) is not None:
        agreed, rows = share
        length += float(agreed) / max(float(rows), 1.0)
        step += 1
    return length
