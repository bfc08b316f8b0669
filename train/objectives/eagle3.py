"""EAGLE-3's training-time test (arXiv 2503.01840): the head is unrolled on its own feedback, every step supervised.

Tokens are the text's own at every step; gradients flow through all steps. There is no feature loss.

    L = sum_k decay^k * (sum over rows of w(t,k) * loss(t,k)) / denominators[k]
    w(t,k) = valid(t,k) * [the label can be drafted]       the label: the target's top token, or x_{t+2+k} for `ce`
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...heads.base import DraftHead, DraftRows
from ...heads.eagle3 import Eagle3Config
from ...heads.target_tensors import TargetTensors
from .. import alignment
from ..attention import UnrolledAttend, choose_backend
from ..batch import TrainBatch
from ..losses import LossRows, LossSettings, soft_linear_loss
from .base import LossOutput, Objective
from .supervision import Supervision, step_metrics, supervise


@dataclass(frozen=True, kw_only=True)
class Eagle3Settings(LossSettings):
    """A recipe's `objective` section."""

    steps: int = 7
    step_decay: float = 0.8
    attention: Literal["auto", "dense", "flex"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps < 1:
            raise ValueError(f"objective.steps must be 1 or more, found {self.steps}")
        if not 0 < self.step_decay <= 1:
            raise ValueError(f"objective.step_decay must lie in (0, 1], found {self.step_decay}")
        if self.attention not in ("auto", "dense", "flex"):
            raise ValueError(f"objective.attention must be auto, dense or flex, found {self.attention!r}")


class Eagle3Objective(Objective):
    """Needs `final_states` (raw, id L) for the soft labels. The fed-back state is whatever the head calls feedback."""

    def __init__(self, config: Eagle3Config, settings: Eagle3Settings) -> None:
        self.config, self.settings = config, settings

    @property
    def num_terms(self) -> int:
        return self.settings.steps

    def count(self, head: DraftHead, batch: TrainBatch) -> Tensor:
        return self._supervise(head, batch).weights.sum(dim=1, dtype=torch.float32)

    def __call__(self, head: DraftHead, target: TargetTensors, batch: TrainBatch) -> LossOutput:
        """The loss; metrics per step k: `loss_k`, `entropy_k`, `alpha_k` over supervised rows, `agree_k`, `accept_k`
        over valid ones.

        Raises ValueError without `final_states`. A batch without supervised rows gives 0, and zero gradients for every
        trainable parameter.
        """
        if batch.final_states is None:
            raise ValueError(
                "eagle3 needs the target's last state for its soft labels, found shards without id L; extract again"
            )
        supervision = self._supervise(head, batch)
        # one transfer decides the rows of all steps
        steps, rows = supervision.weights.nonzero(as_tuple=True)
        states = self.unroll(head, target, batch, rows.split(steps.bincount(minlength=self.num_terms).tolist()))
        label_rows, targets = alignment.soft_label_rows(rows, steps).unique(return_inverse=True)
        decay = self.settings.step_decay ** torch.arange(self.num_terms, device=steps.device)
        losses = soft_linear_loss(
            LossRows(
                states=states,
                weights=(decay / batch.denominators.to(steps.device))[steps],
                terms=steps,
                targets=targets,
                labels=supervision.labels[steps, rows],
            ),
            head.output_weight(target),
            target,
            target.norm(batch.final_states.flatten(0, 1)[label_rows].to(states.dtype)),
            head.draft_to_target(),
            self.settings,
        )
        return LossOutput(losses.total, step_metrics(supervision, losses, steps, rows))

    def _supervise(self, head: DraftHead, batch: TrainBatch) -> Supervision:
        return supervise(head, batch, self.num_terms, self.settings.loss)

    def unroll(self, head: DraftHead, target: TargetTensors, batch: TrainBatch, rows: tuple[Tensor, ...]) -> Tensor:
        """The logits states [sum of rows, hidden] of each step's supervised rows, step by step."""
        device = batch.token_ids.device
        attend = UnrolledAttend(batch.document_ids, choose_backend(self.settings.attention, device))
        dtype = next(head.parameters()).dtype
        states = head.combine(batch.aux_states.to(dtype))
        kept = []
        for step in range(self.num_terms):
            embeds = head.embed(alignment.input_tokens(batch, step), target).to(dtype)
            output = head(DraftRows(embeds, states, batch.positions + step), attend)
            states = output.feedback
            kept.append(output.logits_states.flatten(0, 1)[rows[step]])
        return torch.cat(kept)
