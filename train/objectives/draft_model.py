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
from .rollout import LawObjective


@dataclass(frozen=True, kw_only=True)
class DraftModelSettings(LossSettings, AttentionSettings):
    """A recipe's `objective` section."""

    def __post_init__(self) -> None:
        LossSettings.__post_init__(self)
        AttentionSettings.__post_init__(self)


class DraftModelObjective(LawObjective):
    """One mean over the rows of all terms; a row is the newest token itself."""

    ahead = 0
    settings: DraftModelSettings

    def __init__(self, config: DraftModelConfig, settings: DraftModelSettings) -> None:
        self.config, self.settings = config, settings

    @property
    def num_terms(self) -> int:
        return 1

    def term_weights(self, denominators: Tensor) -> Tensor:
        return (1 / denominators.sum()).expand(self.num_terms)

    def unroll(self, head: DraftHead, target: TargetTensors, batch: TrainBatch, per_step: Sequence[Tensor]) -> Tensor:
        attend = UnrolledAttend(batch.document_ids, choose_backend(self.settings.attention, batch.token_ids.device))
        states = head(TokenRows(head.embed(batch.token_ids, target), batch.positions), attend)
        return states.flatten(0, 1)[torch.cat(list(per_step))]
