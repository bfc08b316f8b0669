"""What heads share that are trained on the target's laws, several draft steps of each row in one loss.

Row t of step k starts from the state at t and is trained on the law after row t+1+k. Rows are of batch * seq.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ...heads.base import Attend, DraftHead, DraftRows
from ...heads.target_tensors import TargetTensors
from .. import alignment
from ..batch import TrainBatch
from ..losses import LossRows, LossSettings, RowLosses, soft_linear_loss
from .base import LossOutput
from .supervision import SupervisedObjective, Supervision, step_metrics, supervise


class SupervisedRows(NamedTuple):
    """The rows a loss is taken over, step by step."""

    steps: Tensor  # [num_rows] int64
    rows: Tensor  # [num_rows] int64
    per_step: Sequence[Tensor]  # `rows` of each step

    @classmethod
    def of(cls, supervision: Supervision) -> "SupervisedRows":
        """The rows of all steps; one transfer decides them."""
        steps, rows = supervision.weights.nonzero(as_tuple=True)
        return cls(steps, rows, rows.split(steps.bincount(minlength=len(supervision.weights)).tolist()))


class SoftLabels(NamedTuple):
    """The target's states whose laws the rows are trained on; rows of one law share it."""

    normed: Tensor  # [num_labels, target_hidden]; the final norm applied
    of_row: Tensor  # [num_rows] int64 into `normed`


def soft_labels(
    target: TargetTensors, batch: TrainBatch, found: SupervisedRows, dtype: torch.dtype, ahead: int = 1
) -> SoftLabels:
    """The final norm, once, over each state that is a label; raises ValueError where shards lack id L."""
    if batch.final_states is None:
        raise ValueError(
            "this head needs the target's last state for its soft labels, found shards without id L; extract again"
        )
    label_rows, of_row = alignment.soft_label_rows(found.rows, found.steps, ahead).unique(return_inverse=True)
    return SoftLabels(target.norm(batch.final_states.flatten(0, 1)[label_rows].to(dtype)), of_row)


def unroll(
    head: DraftHead,
    target: TargetTensors,
    batch: TrainBatch,
    states: Tensor,
    attend: Attend,
    per_step: Sequence[Tensor],
) -> Tensor:
    """The logits states [num_rows, hidden] of each step's rows, where every step is conditioned on the one before it.

    `states` [batch, seq, hidden] condition step 0; the tokens are the text's own. Gradients flow through all steps.
    """
    kept = []
    for step, rows in enumerate(per_step):
        embeds = head.embed(alignment.input_tokens(batch, step), target).to(states.dtype)
        output = head(DraftRows(embeds, states, batch.positions + step, step), attend)
        states = output.feedback
        kept.append(output.logits_states.flatten(0, 1)[rows])
    return torch.cat(kept)


class ScoredLaws(NamedTuple):
    """The head's laws at all supervised rows, and their loss."""

    supervision: Supervision
    found: SupervisedRows
    states: Tensor  # [num_rows, hidden]; what gives the logits
    labels: SoftLabels
    losses: RowLosses

    def metrics(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Those of `step_metrics`."""
        return step_metrics(self.supervision, self.losses, self.found.steps, self.found.rows)


class LawObjective(SupervisedObjective):
    """The loss of the head's laws at all supervised rows.

    Needs `final_states` (raw, id L): the target's laws, for the loss or, with `ce`, to measure against.
    """

    ahead: ClassVar[int] = 1
    """Whether a row's first input is the token after it; 0 where it is the row's own."""

    settings: LossSettings

    def __call__(self, head: DraftHead, target: TargetTensors, batch: TrainBatch) -> LossOutput:
        """The loss, and the metrics of `step_metrics`.

        Raises ValueError without `final_states`. A batch without supervised rows gives 0, and zero gradients for every
        trainable parameter.
        """
        laws = self.score(head, target, batch)
        return LossOutput(laws.losses.total, laws.metrics())

    def score(self, head: DraftHead, target: TargetTensors, batch: TrainBatch) -> ScoredLaws:
        """The laws of a micro-batch and their loss; raises ValueError without `final_states`."""
        supervision = self.supervise(head, batch)
        found = SupervisedRows.of(supervision)
        states = self.unroll(head, target, batch, found.per_step)
        labels = soft_labels(target, batch, found, states.dtype, self.ahead)
        rows = LossRows(
            states=states,
            weights=self.term_weights(batch.denominators.to(states.device))[found.steps],
            terms=found.steps,
            targets=labels.of_row,
            labels=supervision.labels[found.steps, found.rows],
        )
        losses = soft_linear_loss(
            rows, head.output_weight(target), target, labels.normed, head.draft_to_target(), self.settings
        )
        return ScoredLaws(supervision, found, states, labels, losses)

    def supervise(self, head: DraftHead, batch: TrainBatch) -> Supervision:
        return supervise(head, batch, self.num_terms, self.settings.loss, self.ahead)

    @abstractmethod
    def term_weights(self, denominators: Tensor) -> Tensor:
        """What a row of each term weighs [num_terms], given `denominators` [num_terms]."""

    @abstractmethod
    def unroll(self, head: DraftHead, target: TargetTensors, batch: TrainBatch, per_step: Sequence[Tensor]) -> Tensor:
        """The states [num_rows, hidden] that give the logits of each step's supervised rows, step by step."""
