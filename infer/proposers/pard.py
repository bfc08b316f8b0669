"""PARD drafting: the newest token and k - 1 mask tokens run beside the observed rows, and every one gives a draft.

Mask j stands at the position of draft j and sees the masks before it, as in training; k may exceed what was trained.
Drafts are independent given the text, each from a law that no other draft changes.
"""

from ...heads.pard import Pard
from .base import Drafts, DraftStep
from .draft_model import DraftModelProposer
from .drafting import draw_all, no_drafts, top_prob


class PardProposer(DraftModelProposer):
    """All drafts of a step from one forward."""

    head: Pard

    @property
    def num_appended(self) -> int:
        return max(self.num_draft_tokens, 1)

    @property
    def placeholder(self) -> int:
        return self.head.mask_token_id

    def propose(self, step: DraftStep) -> Drafts:
        assert self._pending is not None
        room = self.room(step)
        if not self.num_draft_tokens:
            return no_drafts(step, room)
        logits = self.head.logits(self._pending[step.slots], self.target)
        tokens, laws = draw_all(logits, step, 0, self.num_draft_tokens, None, self.probabilistic)
        confidence = top_prob(laws) if step.wants_confidence else None
        return Drafts(tokens, room, laws if self.probabilistic else None, None, confidence)
