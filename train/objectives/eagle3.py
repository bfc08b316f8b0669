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
from .rollout import LawObjective, unroll


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


class Eagle3Objective(LawObjective):
    """A mean a step, later ones worth less. The fed-back state is whatever the head calls feedback."""

    settings: Eagle3Settings

    def __init__(self, config: Eagle3Config, settings: Eagle3Settings) -> None:
        self.config, self.settings = config, settings

    @property
    def num_terms(self) -> int:
        return self.settings.steps

    def term_weights(self, denominators: Tensor) -> Tensor:
        decay = self.settings.step_decay ** torch.arange(self.num_terms, device=denominators.device)
        return decay / denominators

    def unroll(self, head: DraftHead, target: TargetTensors, batch: TrainBatch, per_step: Sequence[Tensor]) -> Tensor:
        attend = UnrolledAttend(batch.document_ids, choose_backend(self.settings.attention, batch.token_ids.device))
        states = head.combine(batch.aux_states.to(next(head.parameters()).dtype), target)
        return unroll(head, target, batch, states, attend, per_step)
