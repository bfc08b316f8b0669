"""The loss of heads that give every draft step parameters of its own; tokens are the text's own at every step.

L = sum_k decay^(k+1) * (sum over rows of w(t,k) * loss(t,k)) / denominators[k]
w(t,k) = valid(t,k) * [the label can be drafted]       the label: the target's top token, or x_{t+2+k} for `ce`
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...heads.base import DraftHead
from ...heads.per_step import PerStepConfig, PerStepHead
from ...heads.target_tensors import TargetTensors
from .. import alignment
from ..batch import TrainBatch
from ..losses import LossKind, LossRows, LossSettings, RowLosses, soft_linear_loss
from .base import LossOutput
from .rollout import SupervisedRows
from .supervision import SupervisedObjective, Supervision, step_metrics, supervise


@dataclass(frozen=True, kw_only=True)
class PerStepSettings(LossSettings):
    """A recipe's `objective` section."""

    loss: LossKind = "ce"
    head_decay: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.head_decay <= 1:
            raise ValueError(f"objective.head_decay must lie in (0, 1], found {self.head_decay}")


class PerStepObjective(SupervisedObjective):
    """Needs `final_states` (raw, id L): what the heads are conditioned on, and the source of soft labels."""

    def __init__(self, config: PerStepConfig, settings: PerStepSettings) -> None:
        self.config, self.settings = config, settings

    @property
    def num_terms(self) -> int:
        return self.config.num_heads

    def __call__(self, head: DraftHead, target: TargetTensors, batch: TrainBatch) -> LossOutput:
        """The loss, and the metrics of `step_metrics`.

        Raises ValueError without `final_states`. A batch without supervised rows gives 0, and zero gradients for every
        trainable parameter.
        """
        assert isinstance(head, PerStepHead)
        if batch.final_states is None:
            raise ValueError(
                f"{type(head).__name__} needs the target's last state, found shards without id L; extract again"
            )
        supervision = self.supervise(head, batch)
        # a row that counts at any step counts at the first
        rows = supervision.valid[0].nonzero().squeeze(1)
        found = SupervisedRows.of(supervision)
        final = batch.final_states.flatten(0, 1)
        losses: list[RowLosses] = []
        for step, states in enumerate(self.unroll(head, target, batch, rows)):
            mine = found.per_step[step]
            label_rows = alignment.soft_label_rows(mine, torch.full_like(mine, step))
            weight = self.settings.head_decay ** (step + 1) / batch.denominators[step].to(states.device)
            losses.append(
                soft_linear_loss(
                    LossRows(
                        states=states[torch.searchsorted(rows, mine)],
                        weights=weight.expand(len(mine)),
                        terms=torch.zeros_like(mine),
                        targets=torch.arange(len(mine), device=mine.device),
                        labels=supervision.labels[step, mine],
                    ),
                    head.output_weight(target, step),
                    target,
                    target.norm(final[label_rows].to(states.dtype)),
                    head.draft_to_target(),
                    self.settings,
                )
            )
        total = torch.stack([part.total for part in losses]).sum()
        joined = RowLosses(
            total=total,
            losses=torch.cat([part.losses for part in losses]),
            entropies=torch.cat([part.entropies for part in losses]),
            alphas=torch.cat([part.alphas for part in losses]),
            top_ids=torch.cat([part.top_ids for part in losses]),
        )
        return LossOutput(total, step_metrics(supervision, joined, found.steps, found.rows))

    def unroll(self, head: PerStepHead, target: TargetTensors, batch: TrainBatch, rows: Tensor) -> Iterator[Tensor]:
        """The logits states [num_rows, hidden] of each step, for `rows` [num_rows] int64 of the flattened batch."""
        assert batch.final_states is not None
        states = target.norm(batch.final_states.flatten(0, 1)[rows].to(next(head.parameters()).dtype))
        for step in range(self.num_terms):
            output = head(states, alignment.input_tokens(batch, step).flatten()[rows], step)
            states = output.feedback
            yield output.logits_states

    def supervise(self, head: DraftHead, batch: TrainBatch) -> Supervision:
        return supervise(head, batch, self.num_terms, self.settings.loss)
