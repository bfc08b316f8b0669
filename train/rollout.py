"""What feature-conditioned heads share in training: who is supervised by what, the unrolled forward, loss and metrics.

Grids are [steps, batch * seq]. Row t of step k starts from the state at t and is trained on the law after row t+1+k.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..heads.base import Attend, DraftHead, DraftRows
from ..heads.target_tensors import TargetTensors
from . import alignment
from .batch import TrainBatch
from .losses import LossRows, LossSettings, RowLosses, soft_linear_loss


class Supervision(NamedTuple):
    """Everything ids and masks decide."""

    valid: Tensor  # bool
    tops: Tensor  # int64 draft ids of the target's top token at the soft label's row; -1 outside the draft vocabulary
    labels: Tensor  # int64 draft ids the loss asks for; -1 outside
    weights: Tensor  # bool; valid and draftable

    def rows(self) -> "SupervisedRows":
        """The rows of all steps, step by step; one transfer decides them all."""
        steps, rows = self.weights.nonzero(as_tuple=True)
        return SupervisedRows(steps, rows, rows.split(steps.bincount(minlength=len(self.weights)).tolist()))

    def counts(self) -> Tensor:
        """Supervised rows per step [steps] float32."""
        return self.weights.sum(dim=1, dtype=torch.float32)


class SupervisedRows(NamedTuple):
    """The rows a loss is taken over, ordered by step."""

    steps: Tensor  # [num_rows] int64
    rows: Tensor  # [num_rows] int64, in batch * seq
    per_step: Sequence[Tensor]  # `rows` of each step


class SoftLabels(NamedTuple):
    """The target's states whose laws the rows are trained on; rows of one law share it."""

    normed: Tensor  # [num_labels, target_hidden]; the final norm applied
    index: Tensor  # [num_rows] int64 into `normed`


def supervise(head: DraftHead, batch: TrainBatch, num_steps: int, settings: LossSettings) -> Supervision:
    """The grids of `num_steps` draft steps; `ce` asks for the text's tokens, other losses for the target's law."""
    draft_to_target, vocab_size = head.draft_to_target(), head.config.vocab_size

    def draft_ids(per_step: list[Tensor]) -> Tensor:
        return alignment.to_draft_ids(torch.stack(per_step).flatten(1), draft_to_target, vocab_size)

    valid = alignment.valid_rows(batch, num_steps).flatten(1)
    tops = draft_ids([alignment.label_tops(batch, k) for k in range(num_steps)])
    labels = tops
    if settings.loss == "ce":
        labels = draft_ids([alignment.label_tokens(batch, k) for k in range(num_steps)])
    return Supervision(valid, tops, labels, valid & (labels >= 0))


def soft_labels(target: TargetTensors, batch: TrainBatch, found: SupervisedRows, dtype: torch.dtype) -> SoftLabels:
    """The final norm, once, over each state that is a label; raises ValueError where shards lack id L."""
    if batch.final_states is None:
        raise ValueError(
            "this head needs the target's last state for its soft labels, found shards without id L; extract again"
        )
    label_rows, index = alignment.soft_label_rows(found.rows, found.steps).unique(return_inverse=True)
    return SoftLabels(target.norm(batch.final_states.flatten(0, 1)[label_rows].to(dtype)), index)


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
        output = head(DraftRows(embeds, states, batch.positions + step), attend)
        states = output.feedback
        kept.append(output.logits_states.flatten(0, 1)[rows])
    return torch.cat(kept)


def law_loss(
    head: DraftHead,
    target: TargetTensors,
    supervision: Supervision,
    found: SupervisedRows,
    labels: SoftLabels,
    states: Tensor,
    term_weights: Tensor,
    settings: LossSettings,
) -> RowLosses:
    """The loss of the head's laws at `states` [num_rows, hidden]; a row of step k weighs `term_weights[k]`."""
    rows = LossRows(
        states=states,
        weights=term_weights[found.steps],
        terms=found.steps,
        targets=labels.index,
        labels=supervision.labels[found.steps, found.rows],
    )
    return soft_linear_loss(rows, head.output_weight(target), target, labels.normed, head.draft_to_target(), settings)


def step_metrics(
    supervision: Supervision, found: SupervisedRows, losses: RowLosses
) -> dict[str, tuple[Tensor, Tensor]]:
    """Per step k: `loss_k`, `entropy_k`, `alpha_k` over supervised rows, `agree_k`, `accept_k` over valid ones."""
    agree = torch.zeros_like(supervision.valid)
    agree[found.steps, found.rows] = losses.top_ids == supervision.tops[found.steps, found.rows]
    valid, supervised = supervision.valid.sum(dim=1, dtype=torch.float32), supervision.counts()
    accepted = agree.cumprod(dim=0).bool() & supervision.valid

    def per_step(values: Tensor) -> Tensor:
        return torch.zeros_like(supervised).index_add_(0, found.steps, values.detach().float())

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
