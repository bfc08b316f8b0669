"""P-EAGLE drafting: mask rows run beside the target's rows as they come, so that all drafts come out of one forward.

Mask d stands d positions behind a request's last row and sees the masks before it, as in training. Drafts do not depend
on each other: the law of a chain is the product of its tokens' laws.
"""

import torch
from torch import Tensor

from ...heads.peagle import PEagleHead
from ...heads.target_tensors import TargetTensors
from ..planes import Planes
from .appended import append_rows
from .base import DraftStep, ObservedRows
from .drafting import DraftSampling
from .feature import FeatureProposer


class PEagleProposer(FeatureProposer):
    """Draft 0 comes from the last row the target computed, draft d from mask d behind it."""

    head: PEagleHead

    def __init__(
        self, head: PEagleHead, target: TargetTensors, num_draft_tokens: int, draft_sampling: DraftSampling = "greedy"
    ) -> None:
        super().__init__(head, target, num_draft_tokens, draft_sampling)
        with torch.no_grad():
            self._mask_state, self._mask_embed = head.mask_state(target), head.mask_embed(target)
        self._pending: Tensor | None = None  # [num_rows, num_draft_tokens, hidden]; logits states of the next drafts

    def bind(self, planes: Planes, num_rows: int) -> None:
        super().bind(planes, num_rows)
        self._pending = self._empty_state(num_rows, self.num_draft_tokens)

    def observe(self, rows: ObservedRows) -> None:
        assert rows.states is not None and self._pending is not None
        both = append_rows(rows, max(self.num_draft_tokens - 1, 0), self.planes.block_size, self.head.mask_token_id)
        embeds = self.head.embed(rows.next_token_ids, self.target)
        states = self.head.combine(rows.states.to(embeds.dtype), self.target)
        masks = both.appended[:, None]
        embeds = torch.where(masks, self._mask_embed, embeds[both.source])
        states = torch.where(masks, self._mask_state, states[both.source])
        output = self._forward(embeds, states, both.batch)
        drafts = both.first[:, None] - 1 + torch.arange(self.num_draft_tokens, device=masks.device)
        self._pending[rows.slots] = output.logits_states[drafts]

    def _draft(self, step: DraftStep, room: Tensor, count: int) -> tuple[list[Tensor], list[Tensor]]:
        assert self._pending is not None
        return self._draw_all(self._pending[step.slots, :count], step)
