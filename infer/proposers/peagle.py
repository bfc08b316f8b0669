"""P-EAGLE drafting: the target's rows run through the head as they come; then all later drafts come out of one pass."""

import torch
from torch import Tensor

from ...heads.peagle import PEagleHead
from ...heads.target_tensors import TargetTensors
from ..planes import Planes
from .base import DraftStep
from .feature import DraftSampling, FeatureProposer


class PEagleProposer(FeatureProposer):
    """Draft k comes from the k-th mask row behind the newest row, draft 0 from that row itself.

    Drafts do not depend on each other: the law of a chain is the product of its tokens' laws.
    """

    head: PEagleHead

    def __init__(
        self, head: PEagleHead, target: TargetTensors, num_draft_tokens: int, draft_sampling: DraftSampling = "greedy"
    ) -> None:
        super().__init__(head, target, num_draft_tokens, draft_sampling)
        self._mask_state: Tensor | None = None

    @torch.no_grad()
    def bind(self, planes: Planes, num_rows: int) -> None:
        super().bind(planes, num_rows)
        self._mask_state = self.head.mask_state(self.target)

    def _draft(self, step: DraftStep, room: Tensor, count: int) -> tuple[list[Tensor], list[Tensor]]:
        assert self._pending is not None and self._mask_state is not None
        states = self._pending.logits_states[step.slots][:, None]
        if count > 1:
            batch, masks = len(room), count - 1
            ids = torch.full((batch, masks), self.head.config.mask_token_id, device=room.device)
            rows = self._draft_rows(step, ids, 1, room)
            embeds = self.head.mask_embed(self.target).expand(batch * masks, -1)
            output = self._forward(embeds, self._mask_state.expand(batch * masks, -1), rows)
            states = torch.cat([states, output.logits_states.unflatten(0, (batch, masks))], dim=1)
        drawn = [self._draw(self.head.logits(states[:, k], self.target), step, k) for k in range(count)]
        return [token for token, _ in drawn], [law for _, law in drawn]
