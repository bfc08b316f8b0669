"""EAGLE (arXiv 2401.15077): one forward over the target's states, trained on the next state and on its law.

    L = (1 / denominators[0]) * sum over valid rows t of
            feature_weight * SmoothL1(f_t, h_{t+1})                     mean over the width, beta 1
          + law_weight * loss(q_t, p_{t+1})                             q_t, p_{t+1}: the laws of f_t and h_{t+1}

h are the target's states after its final norm. In training each is given uniform noise of half-width
`noise * 512 / tokens of its document`; labels never are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from ...heads.base import DraftHead
from ...heads.eagle import EagleConfig
from ...heads.target_tensors import TargetTensors
from ...kernels.noise import noise_keys, uniforms
from .. import alignment
from ..attention import AttentionSettings, UnrolledAttend, choose_backend
from ..batch import TrainBatch
from ..losses import LossSettings
from .base import LossOutput
from .rollout import LawObjective, unroll

NOISE_LENGTH = 512
NOISE_STREAM = 101


@dataclass(frozen=True, kw_only=True)
class EagleSettings(LossSettings, AttentionSettings):
    """A recipe's `objective` section."""

    feature_weight: float = 1.0
    law_weight: float = 0.1
    noise: float = 0.1

    def __post_init__(self) -> None:
        LossSettings.__post_init__(self)
        AttentionSettings.__post_init__(self)
        for name in ("feature_weight", "law_weight", "noise"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"objective.{name} must be 0 or more, found {getattr(self, name)}")


class EagleObjective(LawObjective):
    """Adds the loss of the states themselves; `final_states` (raw, id L) are the labels of both losses."""

    settings: EagleSettings

    def __init__(self, config: EagleConfig, settings: EagleSettings) -> None:
        self.config, self.settings = config, settings

    @property
    def num_terms(self) -> int:
        return 1

    def term_weights(self, denominators: Tensor) -> Tensor:
        return self.settings.law_weight * (1 / denominators)

    def __call__(self, head: DraftHead, target: TargetTensors, batch: TrainBatch) -> LossOutput:
        """The loss, the metrics of `step_metrics` (of the law alone) and `feature_0`.

        Raises ValueError without `final_states`. A batch without supervised rows gives 0, and zero gradients for every
        trainable parameter.
        """
        laws = self.score(head, target, batch)
        states, labels = laws.states.float(), laws.labels.normed[laws.labels.of_row].float()
        features = smooth_l1_loss(states, labels, reduction="none").mean(dim=-1)
        # an empty batch has a denominator of zero and no row to divide
        share = 1 / batch.denominators.to(features.device)
        total = laws.losses.total + self.settings.feature_weight * (features * share[laws.found.steps]).sum()
        rows = laws.supervision.weights.sum(dtype=torch.float32)
        metrics = {**laws.metrics(), "feature_0": (features.detach().sum(), rows)}
        return LossOutput(total, metrics)

    def unroll(self, head: DraftHead, target: TargetTensors, batch: TrainBatch, per_step: Sequence[Tensor]) -> Tensor:
        """The states f_t [num_rows, hidden] of the supervised rows."""
        attend = UnrolledAttend(batch.document_ids, choose_backend(self.settings.attention, batch.token_ids.device))
        states = head.combine(batch.aux_states.to(next(head.parameters()).dtype), target)
        if head.training and self.settings.noise:
            states = states + self._noise(batch, states.shape[-1]).to(states.dtype)
        return unroll(head, target, batch, states, attend, per_step)

    def _noise(self, batch: TrainBatch, hidden: int) -> Tensor:
        """[batch, seq, hidden] float32; a function of document, epoch and position, whatever the batch."""
        assert batch.document_seeds is not None, "what is drawn needs batch.document_seeds"
        keys = noise_keys(batch.document_seeds, batch.positions, NOISE_STREAM)
        lengths = alignment.document_lengths(batch)
        widths = self.settings.noise * NOISE_LENGTH / lengths.clamp(min=1)
        draws = uniforms(keys[..., None], torch.arange(hidden, device=keys.device))
        return (2 * draws - 1) * widths[..., None]
