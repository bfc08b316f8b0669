"""PARD (arXiv 2504.18583): a draft model learns to write several tokens ahead, each mask token the next position's.

Step b of row s is a mask token at position s + b. It sees the document up to x_s and the row's own masks of steps 1 to
b, and is trained on the law of x_{s+1+b}; step 0 is the real token, ordinary language modelling. It counts where every
token from x_s to the label is supervised. Later steps train on fewer rows (conditional drop): a share of each
document's rows that shrinks by `retention` a step down to `min_retention`, every step's a part of the one before it,
drawn anew each epoch.

    L = sum over rows of all steps of loss / number of such rows
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...heads.base import DraftHead
from ...heads.draft_model import TokenRows
from ...heads.pard import Pard, PardConfig
from ...heads.target_tensors import TargetTensors
from ..attention import ParallelAttend, choose_backend
from ..batch import TrainBatch
from ..conditional_drop import DropSettings
from ..draft_line import draft_line
from ..losses import LossKind
from .draft_model import DraftModelObjective, DraftModelSettings
from .supervision import Supervision


@dataclass(frozen=True, kw_only=True)
class PardSettings(DraftModelSettings, DropSettings):
    """A recipe's `objective` section."""

    loss: LossKind = "ce"
    steps: int = 8

    def __post_init__(self) -> None:
        DraftModelSettings.__post_init__(self)
        if self.steps < 1:
            raise ValueError(f"objective.steps must be 1 or more, found {self.steps}")
        DropSettings.__post_init__(self)


class PardObjective(DraftModelObjective):
    """Drops rows while the head is in training mode only."""

    settings: PardSettings

    def __init__(self, config: PardConfig, settings: PardSettings) -> None:
        super().__init__(config, settings)

    @property
    def num_terms(self) -> int:
        return self.settings.steps

    def supervise(self, head: DraftHead, batch: TrainBatch) -> Supervision:
        whole = super().supervise(head, batch)
        return whole.among(self.settings.kept(whole.valid, batch)) if head.training else whole

    def unroll(self, head: DraftHead, target: TargetTensors, batch: TrainBatch, per_step: Sequence[Tensor]) -> Tensor:
        assert isinstance(head, Pard)
        backend = choose_backend(self.settings.attention, batch.token_ids.device)
        line = draft_line(per_step, batch.token_ids.numel(), pad=backend == "flex")
        positions, masks = batch.positions.flatten(), torch.full_like(line.steps, head.mask_token_id)
        token_ids = torch.cat([batch.token_ids.flatten(), masks])
        rows = TokenRows(head.embed(token_ids, target), torch.cat([positions, positions[line.from_rows] + line.steps]))
        attend = ParallelAttend(batch.document_ids, line.from_rows, line.steps, self.num_terms - 1, backend)
        return head(rows, attend)[line.places]
