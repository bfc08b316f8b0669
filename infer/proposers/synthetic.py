"""Free drafts: token ids computed from seed and position, without a head, a state or a look at the text.

The load under which an engine's own speed shows: with synthetic verification they are kept at any asked rate, with any
other they are hardly ever right.
"""

import torch
from torch import Tensor

from ..planes import Planes
from .base import DeviceProposer, Drafts, DraftStep, ObservedRows, Released, Requirements

_MULTIPLIER = 0x5851F42D4C957F2D  # of Knuth's 64-bit linear congruential generator
_INCREMENT = 0x14057B7EF767814F


class SyntheticProposer(DeviceProposer):
    """Drafts that cost nothing. The same seed and position give the same id, whatever else is in the batch."""

    requirements = Requirements(observes=False)

    def __init__(self, num_draft_tokens: int, vocab_size: int) -> None:
        self.num_draft_tokens, self.vocab_size = num_draft_tokens, vocab_size

    def bind(self, planes: Planes, num_rows: int) -> None:
        pass

    def observe(self, rows: ObservedRows) -> None:
        pass

    def propose(self, step: DraftStep) -> Drafts:
        offsets = torch.arange(self.num_draft_tokens, device=step.seq_lens.device)
        return Drafts(self._ids(step.seeds[:, None], step.seq_lens[:, None] + offsets), step.room, None)

    def release(self, request: Released) -> None:
        pass

    def _ids(self, seeds: Tensor, positions: Tensor) -> Tensor:
        """Ids of positions [batch, k] int64 under seeds [batch, 1] int64; the products wrap around."""
        return (((seeds + positions * _INCREMENT) * _MULTIPLIER) >> 33) % self.vocab_size
