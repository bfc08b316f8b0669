"""What all proposers share that draw their drafts from the logits of a head."""

from torch import Tensor

from ...heads.base import DraftHead
from ...heads.target_tensors import TargetTensors
from ..fused_heads import fuse_head
from .base import DeviceProposer, Drafts, DraftStep, Released
from .drafting import DraftSampling, chain, draw, draw_all


class HeadProposer(DeviceProposer):
    """Greedy drafts are point masses, probabilistic ones carry their law."""

    def __init__(
        self, head: DraftHead, target: TargetTensors, num_draft_tokens: int, draft_sampling: DraftSampling = "greedy"
    ) -> None:
        self.head, self.target = head.eval(), target
        fuse_head(head)
        self.num_draft_tokens = num_draft_tokens
        self.probabilistic = draft_sampling == "probabilistic"
        self.token_map = head.draft_to_target()

    def release(self, request: Released) -> None:
        """Nothing is kept by request: a table row is written again before it is read for another one."""

    def _draw(self, logits: Tensor, step: DraftStep, k: int | None = None) -> tuple[Tensor, Tensor]:
        """Draft k of logits [batch, draft_vocab]; of [batch, count, draft_vocab] all drafts from the first on."""
        drawing = draw_all if k is None else draw
        return drawing(logits, step, k or 0, self.num_draft_tokens, self.token_map, self.probabilistic)

    def _chain(self, step: DraftStep, tokens: list[Tensor], laws: list[Tensor], room: Tensor) -> Drafts:
        """The drafts of the tokens and laws of each draft, as `_draw` gave them, `room` [batch] of each request."""
        return chain(step, tokens, laws, room, self.token_map, self.probabilistic)
