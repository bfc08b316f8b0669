"""A draft model learns what the target says next: ordinary language modelling on the target's text and laws.

Row t is token x_t and is trained on the law of x_{t+1}, which the target gave after row t. It counts where both tokens
are supervised: in decoding the newest token is always one the target wrote.

    L = sum over rows of loss / number of rows
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...heads.base import DraftHead
from ...heads.draft_model import DraftModelConfig, TokenRows
from ...heads.target_tensors import TargetTensors
from ..attention import AttentionSettings, UnrolledAttend, choose_backend
from ..batch import TrainBatch
from ..losses import LossSettings
from .base import LossOutput, Objective
from .rollout import SupervisedRows, law_loss, soft_labels
from .supervision import Supervision, step_metrics, supervise

AHEAD = 0
"""A row is the newest token itself."""


@dataclass(frozen=True, kw_only=True)
class DraftModelSettings(LossSettings, AttentionSettings):
    """A recipe's `objective` section."""

    def __post_init__(self) -> None:
        LossSettings.__post_init__(self)
        AttentionSettings.__post_init__(self)


class DraftModelObjective(Objective):
    """Needs `final_states` (raw, id L): the target's law, for the loss or, with `ce`, to measure against."""

    settings: DraftModelSettings

    def __init__(self, config: DraftModelConfig, settings: DraftModelSettings) -> None:
        self.config, self.settings = config, settings

    @property
    def num_terms(self) -> int:
        return 1

    def count(self, head: DraftHead, batch: TrainBatch) -> Tensor:
        return self.supervise(head, batch).weights.sum(dim=1, dtype=torch.float32)

    def __call__(self, head: DraftHead, target: TargetTensors, batch: TrainBatch) -> LossOutput:
        """The loss, one mean over the rows of all terms, and the metrics of `step_metrics`.

        Raises ValueError without `final_states`. A batch without supervised rows gives 0, and zero gradients for every
        trainable parameter.
        """
        supervision = self.supervise(head, batch)
        found = SupervisedRows.of(supervision)
        states = self.unroll(head, target, batch, found.per_step)
        labels = soft_labels(target, batch, found, states.dtype, AHEAD)
        weights = (1 / batch.denominators.sum().to(states.device)).expand(self.num_terms)
        losses = law_loss(head, target, supervision, found, labels, states, weights, self.settings)
        return LossOutput(losses.total, step_metrics(supervision, losses, found.steps, found.rows))

    def supervise(self, head: DraftHead, batch: TrainBatch) -> Supervision:
        """Which rows count at which step."""
        return supervise(head, batch, self.num_terms, self.settings.loss, AHEAD)

    def unroll(self, head: DraftHead, target: TargetTensors, batch: TrainBatch, per_step: Sequence[Tensor]) -> Tensor:
        """The states [num_rows, hidden] that give the logits of each step's supervised rows, step by step."""
        attend = UnrolledAttend(batch.document_ids, choose_backend(self.settings.attention, batch.token_ids.device))
        states = head(TokenRows(head.embed(batch.token_ids, target), batch.positions), attend)
        return states.flatten(0, 1)[torch.cat(list(per_step))]
