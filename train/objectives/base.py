"""What an objective is: a head, the target's tensors and a batch in; one loss whose gradient is a plain sum out."""

from abc import ABC, abstractmethod
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
    def count(self, batch: TrainBatch) -> Tensor:
        """Valid rows per term [num_terms] float32, from ids and masks alone, before any forward."""

    @abstractmethod
    def __call__(self, head: DraftHead, target: TargetTensors, batch: TrainBatch) -> LossOutput:
        """The loss of one micro-batch, each term divided by `batch.denominators`."""
