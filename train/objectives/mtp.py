"""Fine-tuning of multi-token-prediction layers: each is fed the one before it, hard labels by default.

As EAGLE-3's training-time test, with weights that add up to one:

    L = sum_k w_k * (sum over valid rows of loss(t,k)) / denominators[k],   w_k = decay^k / sum_j decay^j

decay 0.6 and three steps give 0.51, 0.31 and 0.18.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...heads.base import DraftHead, HeadError
from ...heads.mtp import MtpConfig, MtpHead
from ...heads.mtp_layouts import LAYOUTS
from ...heads.target_tensors import TargetTensors
from ..batch import TrainBatch
from ..losses import LossKind
from .eagle3 import Eagle3Objective, Eagle3Settings


@dataclass(frozen=True, kw_only=True)
class MtpSettings(Eagle3Settings):
    """A recipe's `objective` section."""

    loss: LossKind = "ce"
    steps: int = 3
    step_decay: float = 0.6


class MtpObjective(Eagle3Objective):
    """A mean a step, later ones worth less, all together one."""

    def __init__(self, config: MtpConfig, settings: MtpSettings) -> None:
        if LAYOUTS[config.layout].head is not None:
            raise HeadError(
                f"MTP layers like {config.layout}'s, each with an output matrix of its own, cannot be trained; train a "
                f"fresh one by `fit --recipe mtp` without --model"
            )
        self.config, self.settings = config, settings

    def unroll(self, head: DraftHead, target: TargetTensors, batch: TrainBatch, per_step: Sequence[Tensor]) -> Tensor:
        """Raises HeadError for layers whose attention has a window or sinks."""
        if isinstance(head, MtpHead) and head.limited:
            raise HeadError(
                f"MTP layers like {self.config.layout}'s, with a window or attention sinks, cannot be trained; train a "
                f"fresh one by `fit --recipe mtp` without --model"
            )
        return super().unroll(head, target, batch, per_step)

    def term_weights(self, denominators: Tensor) -> Tensor:
        decay = self.settings.step_decay ** torch.arange(self.num_terms, device=denominators.device)
        return decay / decay.sum() / denominators
