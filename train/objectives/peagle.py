"""P-EAGLE (arXiv 2602.01469): EAGLE-3's steps, all in one forward, because later ones know no more than the first.

Row t of step d > 0 embeds the mask token, is conditioned on the learned stand-in for aux states and stands at position
t + d. It sees true rows up to t and its own earlier steps: what the drafter sees. Alignment, labels and loss are
EAGLE-3's. Later steps train on fewer rows (conditional drop): a share of each document's rows that shrinks by
`retention` a step down to `min_retention`, every step's a part of the one before it, drawn anew each epoch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...heads.base import DraftHead, DraftRows
from ...heads.peagle import PEagleConfig, PEagleHead
from ...heads.target_tensors import TargetTensors
from .. import alignment
from ..attention import ParallelAttend, choose_backend
from ..batch import TrainBatch
from ..conditional_drop import DropSettings
from ..draft_line import draft_line
from .eagle3 import Eagle3Objective, Eagle3Settings
from .supervision import Supervision


@dataclass(frozen=True, kw_only=True)
class PEagleSettings(Eagle3Settings, DropSettings):
    """A recipe's `objective` section."""

    steps: int = 8
    step_decay: float = 1.0

    def __post_init__(self) -> None:
        Eagle3Settings.__post_init__(self)
        DropSettings.__post_init__(self)


class PEagleObjective(Eagle3Objective):
    """Drops rows while the head is in training mode only."""

    settings: PEagleSettings

    def __init__(self, config: PEagleConfig, settings: PEagleSettings) -> None:
        super().__init__(config, settings)

    def supervise(self, head: DraftHead, batch: TrainBatch) -> Supervision:
        whole = super().supervise(head, batch)
        return whole.among(self.settings.kept(whole.valid, batch)) if head.training else whole

    def unroll(self, head: DraftHead, target: TargetTensors, batch: TrainBatch, per_step: Sequence[Tensor]) -> Tensor:
        assert isinstance(head, PEagleHead)
        backend = choose_backend(self.settings.attention, batch.token_ids.device)
        line = draft_line(per_step, batch.token_ids.numel(), pad=backend == "flex")
        states = head.combine(batch.aux_states.to(head.dtype), target).flatten(0, 1)
        embeds = head.embed(alignment.input_tokens(batch, 0), target).flatten(0, 1).to(states.dtype)
        count, positions = len(line.steps), batch.positions.flatten()
        rows = DraftRows(
            torch.cat([embeds, head.mask_embed(target).to(states.dtype).expand(count, -1)]),
            torch.cat([states, head.mask_state(target).to(states.dtype).expand(count, -1)]),
            torch.cat([positions, positions[line.from_rows] + line.steps]),
        )
        attend = ParallelAttend(batch.document_ids, line.from_rows, line.steps, self.num_terms - 1, backend)
        return head(rows, attend).logits_states[line.places]
