"""The steps of a draft chain: the row each computes, how its token is drawn, and how all become one record."""

from typing import Literal

import torch
from torch import Tensor

from ...heads.decoder import DecoderHead
from ...kernels.dispatch import argmax, sample
from ...kernels.records import Stream
from ..batch import PackedBatch
from ..planes import PlaneSpec
from .base import Drafts, DraftStep

DraftSampling = Literal["greedy", "probabilistic"]


def layer_planes(head: DecoderHead) -> tuple[PlaneSpec, ...]:
    """A plane for the keys and values of each layer of a head."""
    return tuple(PlaneSpec(f"draft.{i}", *shape, head.dtype) for i, shape in enumerate(head.key_shapes()))


def drafts_within(step: DraftStep, num_positions: int, most: int) -> Tensor:
    """How many drafts [batch] int64 of at most `most` have room and end within `num_positions` tokens.

    Past the positions that a head was made for it drafts nothing rather than something arbitrary.
    """
    return torch.minimum(step.room, (num_positions - step.seq_lens).clamp(min=0)).clamp(max=most)


class ChainRows:
    """The rows of a draft chain, one a request and draft, placed all at once: row k stands at `first` + k.

    first [batch] int64: positions of row 0 in each request's own blocks; room [batch] int64: a request with room for k
    drafts or fewer has no row k, and what is computed for it goes to the padding block.
    """

    def __init__(self, step: DraftStep, first: Tensor, room: Tensor, count: int, block_size: int) -> None:
        row = torch.arange(count, device=first.device)[:, None]
        live = room > row
        self._positions = torch.where(live, first + row, 0).clamp(min=0)  # a text of one token has no row before
        block = step.block_tables.gather(1, (self._positions // block_size).T).T.long()
        self._slots = torch.where(live, block * block_size + self._positions % block_size, 0)
        self._seq_lens = (self._positions + 1).to(torch.int32)
        self._requests = torch.arange(len(first) + 1, device=first.device)
        self._cu_seqlens = self._requests.to(torch.int32)
        self._block_tables, self._block_size = step.block_tables, block_size

    def at(self, k: int, token_ids: Tensor) -> PackedBatch:
        """Row k of each request, which holds `token_ids` [batch] int64."""
        return PackedBatch(
            token_ids=token_ids,
            positions=self._positions[k],
            slot_mapping=self._slots[k],
            cu_seqlens=self._cu_seqlens,
            seq_lens=self._seq_lens[k],
            block_tables=self._block_tables,
            logits_rows=self._requests[:-1],
            max_query_len=1,
            max_seq_len=int(self._block_tables.shape[1]) * self._block_size,
        )


def draw(
    logits: Tensor, step: DraftStep, k: int, num_draft_tokens: int, token_map: Tensor | None, probabilistic: bool
) -> tuple[Tensor, Tensor]:
    """Draft k of each request from logits [batch, draft_vocab]: target ids [batch] int64, and the law they come from.

    The law [batch, draft_vocab] means nothing where drafts are not probabilistic.
    """
    tokens, laws = draw_all(logits[:, None], step, k, num_draft_tokens, token_map, probabilistic)
    return tokens[:, 0], laws[:, 0]


def draw_all(
    logits: Tensor, step: DraftStep, first: int, num_draft_tokens: int, token_map: Tensor | None, probabilistic: bool
) -> tuple[Tensor, Tensor]:
    """Drafts first, first + 1, ... of each request, each by itself: target ids [batch, n] int64 and laws as `draw`'s.

    logits [batch, n, draft_vocab].
    """
    if not probabilistic:
        drafts, laws = argmax(logits.flatten(0, 1)).view(logits.shape[:2]), logits
    else:
        temperature = step.temperature[:, None].expand(logits.shape[:2])
        laws = (logits / torch.where(temperature > 0, temperature, 1.0)[..., None]).log_softmax(-1)
        # a position may be drafted again after its first draft was dropped unseen; fresh noise for each keeps what the
        # dropped one told about later positions from meeting its token again
        draws = step.seq_lens[:, None] * num_draft_tokens + first + torch.arange(logits.shape[1], device=logits.device)
        seeds, rows = step.seeds[:, None].expand(draws.shape), laws.flatten(0, 1)
        drafts = sample(rows, temperature.flatten(), seeds.flatten(), draws.flatten(), Stream.DRAFT).view(draws.shape)
    return (drafts if token_map is None else token_map[drafts]), laws


def chain(
    step: DraftStep,
    tokens: list[Tensor],
    laws: list[Tensor],
    lengths: Tensor,
    token_map: Tensor | None,
    probabilistic: bool,
) -> Drafts:
    """Drafts of the tokens [batch] and laws [batch, draft_vocab] of each step, as `draw` gave them."""
    if not tokens:
        return no_drafts(step, lengths, token_map)
    confidence = torch.stack([top_prob(law) for law in laws], dim=1) if step.wants_confidence else None
    stacked = torch.stack(laws, dim=1) if probabilistic else None
    return Drafts(torch.stack(tokens, dim=1), lengths, stacked, token_map, confidence)


def no_drafts(step: DraftStep, lengths: Tensor, token_map: Tensor | None = None) -> Drafts:
    """Drafts of no token for anyone."""
    return Drafts(step.last_token_ids[:, None][:, :0], lengths, None, token_map)


def top_prob(logits: Tensor) -> Tensor:
    """The largest probability [...] float32 of the laws that logits or log-probabilities [..., vocab] stand for."""
    logits = logits.float()
    return (logits.amax(-1) - logits.logsumexp(-1)).exp()
