"""DFlash drafting: keys and values of the target's rows as they come, and one forward of a block to draft.

The planes hold the context: what a slot keeps depends on the state of its own position alone. A block's rows are
written behind it, from the newest token's slot on, and the next observation overwrites them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ...heads.dflash import BlockRows, DFlashHead
from ...heads.target_tensors import TargetTensors
from ...kernels.dispatch import store_kv
from ..batch import PackedBatch
from .base import Drafts, DraftStep, ObservedRows, Requirements
from .drafting import DraftSampling, drafts_within, no_drafts, top_prob
from .layered import LayeredProposer


class BlockDrafts(NamedTuple):
    """The drafts of each block, whoever has room for them."""

    token_ids: Tensor  # [batch, n] int64
    laws: Tensor | None  # [batch, n, vocab] float32 log-probabilities; None: point masses
    confidence: Tensor | None  # [batch, n] float32


class DFlashProposer(LayeredProposer):
    """Drafts the slots of a block, each by itself.

    A block whose rows see each other is run as large as it was trained, however few drafts are asked for, and larger
    only where more are.
    """

    head: DFlashHead

    def __init__(
        self, head: DFlashHead, target: TargetTensors, num_draft_tokens: int, draft_sampling: DraftSampling = "greedy"
    ) -> None:
        super().__init__(head, target, num_draft_tokens, draft_sampling)
        config = head.config
        asked = num_draft_tokens + config.first_draft_slot
        self.block_size = asked if config.causal else max(asked, config.block_size)
        self.requirements = Requirements(
            layer_ids=config.layer_ids,
            planes=self.layer_planes,
            lookahead=self.block_size - 1,
            fixed_lookahead=True,
            draft_laws=self.probabilistic,
        )

    def observe(self, rows: ObservedRows) -> None:
        assert rows.states is not None
        context = self.head.context(rows.states.to(self.head.dtype), rows.batch.positions, self.target)
        for spec, (k, v) in zip(self.layer_planes, context, strict=True):
            plane = self.planes[spec.name]
            store_kv(k, v, plane.k, plane.v, rows.batch.slot_mapping)

    def propose(self, step: DraftStep) -> Drafts:
        config = self.head.config
        last = config.max_position_embeddings + 1 - config.first_draft_slot
        room = drafts_within(step, last, self.num_draft_tokens)
        if not room.is_cuda and not room.any():
            return no_drafts(step, room)
        states = self._run_blocks(step, room > 0)[:, config.first_draft_slot :][:, : self.num_draft_tokens]
        tokens, laws, confidence = self._draft(states, step)
        return Drafts(tokens, room, laws, None, confidence)

    def _run_blocks(self, step: DraftStep, live: Tensor) -> Tensor:
        """Logits states [batch, block, hidden]; the blocks of requests that are not live mean nothing."""
        config, batch = self.head.config, self._block_rows(step, live)
        attend = self._attend(batch, window=config.sliding_window or 0, causal=config.causal)
        embeds = self.head.embed(batch.token_ids, self.target).to(self.head.dtype)
        return self.head(BlockRows(embeds, batch.positions), attend).unflatten(0, (-1, self.block_size))

    def _block_rows(self, step: DraftStep, live: Tensor) -> PackedBatch:
        """A block a request, from its newest token on; blocks that are not live go to the padding block."""
        page, size, columns = self.planes.block_size, self.block_size, step.block_tables.shape[1]
        first = torch.where(live, step.seq_lens - 1, 0)
        positions = first[:, None] + torch.arange(size, device=live.device)
        pages = step.block_tables.gather(1, (positions // page).clamp(max=columns - 1)).long()
        starts = torch.arange(live.shape[0] + 1, device=live.device) * size
        return PackedBatch(
            token_ids=self.head.block_ids(step.last_token_ids, size).flatten(),
            positions=positions.flatten(),
            slot_mapping=torch.where(live[:, None], pages * page + positions % page, 0).flatten(),
            cu_seqlens=starts.int(),
            seq_lens=(first + size).int(),
            block_tables=step.block_tables,
            logits_rows=starts[:0],
            max_query_len=size,
            max_seq_len=columns * page,
        )

    def _draft(self, states: Tensor, step: DraftStep) -> BlockDrafts:
        """Drafts of the slots' logits states [batch, n, hidden]."""
        tokens, laws = self._draw(self.head.logits(states, self.target), step)
        confidence = top_prob(laws) if step.wants_confidence else None
        return BlockDrafts(tokens, laws if self.probabilistic else None, confidence)
