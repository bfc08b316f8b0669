"""EAGLE-3's training-time test (arXiv 2503.01840): the head is unrolled on its own feedback, every step supervised.

Tokens are the text's own at every step; gradients flow through all steps. There is no feature loss.

    L = sum_k decay^k * (sum over rows of w(t,k) * loss(t,k)) / denominators[k]
    w(t,k) = valid(t,k) * [the label can be drafted]       the label: the target's top token, or x_{t+2+k} for `ce`
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...heads.base import DraftHead
from ...heads.eagle3 import Eagle3Config
from ...heads.target_tensors import TargetTensors
from ..attention import AttentionSettings, UnrolledAttend, choose_backend
from ..batch import TrainBatch
from ..losses import LossSettings
from .base import LossOutput, Objective
from .rollout import SupervisedRows, law_loss, soft_labels, unroll
from .supervision import Supervision, step_metrics, supervise


@dataclass(frozen=True, kw_only=True)
class Eagle3Settings(LossSettings, AttentionSettings):
    """A recipe's `objective` section."""

    steps: int = 7
    step_decay: float = 0.8

    def __post_init__(self) -> None:
        LossSettings.__post_init__(self)
        AttentionSettings.__post_init__(self)
        if self.steps < 1:
            raise ValueError(f"objective.steps must be 1 or more, found {self.steps}")
        if not 0 < self.step_decay <= 1:
            raise ValueError(f"objective.step_decay must lie in (0, 1], found {self.step_decay}")


class Eagle3Objective(Objective):
    """Needs `final_states` (raw, id L) for the soft labels. The fed-back state is whatever the head calls feedback."""

    settings: Eagle3Settings

    def __init__(self, config: Eagle3Config, settings: Eagle3Settings) -> None:
        self.config, self.settings = config, settings

    @property
    def num_terms(self) -> int:
        return self.settings.steps

    def count(self, head: DraftHead, batch: TrainBatch) -> Tensor:
        return self.supervise(head, batch).weights.sum(dim=1, dtype=torch.float32)

    def __call__(self, head: DraftHead, target: TargetTensors, batch: TrainBatch) -> LossOutput:
        """The loss, and the metrics of `step_metrics`.

        Raises ValueError without `final_states`. A batch without supervised rows gives 0, and zero gradients for every
        trainable parameter.
        """
        supervision = self.supervise(head, batch)
        found = SupervisedRows.of(supervision)
        states = self.unroll(head, target, batch, found.per_step)
        labels = soft_labels(target, batch, found, states.dtype)
        decay = self.settings.step_decay ** torch.arange(self.num_terms, device=states.device)
        weights = decay / batch.denominators.to(states.device)
        losses = law_loss(head, target, supervision, found, labels, states, weights, self.settings)
        return LossOutput(losses.total, step_metrics(supervision, losses, found.steps, found.rows))

    def supervise(self, head: DraftHead, batch: TrainBatch) -> Supervision:
        """Which rows count at which step."""
        return supervise(head, batch, self.num_terms, self.settings.loss)

    def unroll(self, head: DraftHead, target: TargetTensors, batch: TrainBatch, per_step: Sequence[Tensor]) -> Tensor:
        """The logits states [num_rows, hidden] of each step's supervised rows, step by step."""
        attend = UnrolledAttend(batch.document_ids, choose_backend(self.settings.attention, batch.token_ids.device))
        states = head.combine(batch.aux_states.to(next(head.parameters()).dtype), target)
        return unroll(head, target, batch, states, attend, per_step)
