"""PARD drafting: the newest token and k - 1 mask tokens run beside the observed rows, and each gives a draft.

Mask j stands at the position of draft j - 1 and sees the masks before it, as in training; k may exceed what was
trained. Drafts do not depend on each other: the law of a chain is the product of its tokens' laws.
"""

from torch import Tensor

from ...heads.pard import Pard
from .base import DraftStep
from .draft_model import DraftModelProposer


class PardProposer(DraftModelProposer):
    """All drafts of a step out of one forward."""

    head: Pard

    @property
    def num_appended(self) -> int:
        return max(self.num_draft_tokens, 1)

    @property
    def placeholder(self) -> int:
        return self.head.mask_token_id

    def _draft(self, step: DraftStep, room: Tensor, count: int) -> tuple[list[Tensor], list[Tensor]]:
        assert self._pending is not None
        return self._draw_all(self._pending[step.slots, :count], step)
