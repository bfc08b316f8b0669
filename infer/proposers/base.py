"""What a proposer is: it sees every row the target computes, once and in order, and drafts what may come next."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ..batch import PackedBatch
from ..planes import Planes, PlaneSpec


@dataclass(frozen=True)
class Requirements:
    """What the engine must provide."""

    layer_ids: tuple[int, ...] = ()  # hidden states captured at these ids, ascending; id L is the raw last state
    planes: tuple[PlaneSpec, ...] = ()  # over the requests' own block tables
    next_token: bool = False  # whether row t of its planes depends on token t + 1: prefix-cache keys then include it
    lookahead: int = 0  # slots beyond the last token that `propose` writes to
    draft_laws: bool = False  # whether drafts carry the law they were drawn from
    observes: bool = True  # False: rows need not be gathered for it


class ObservedRows(NamedTuple):
    """Rows the target has computed and that are final: prompt rows, accepted drafts, and the row before each.

    Rejected rows never appear. Rows found in the prefix cache are not computed, so a request's first observation may
    start at a later position: what a proposer knows of earlier rows is in its planes, written by whoever computed them.
    After a preemption rows are computed, and observed, again from the first that the cache no longer holds.
    """

    request_ids: list[int]
    batch: PackedBatch  # the rows and their slots; logits_rows: the last row of each request
    next_token_ids: Tensor  # [num_tokens] int64; the token that follows each row
    states: Tensor | None  # [num_tokens, len(layer_ids), hidden]


class DraftStep(NamedTuple):
    """The requests to draft for. All were observed up to the row before their newest token."""

    request_ids: list[int]
    block_tables: Tensor  # [batch, max_blocks] int32
    seq_lens: Tensor  # [batch] int64; known tokens, the newest (not yet computed) one included
    last_token_ids: Tensor  # [batch] int64; that newest token
    max_drafts: list[int]  # drafts that still fit the context, the output limit and the blocks, per request
    temperature: Tensor  # [batch] float32
    seeds: Tensor  # [batch] int64


class Drafts(NamedTuple):
    """Draft tokens per request, the first `lengths[b]` of each row."""

    token_ids: Tensor  # [batch, k] int64 target ids; -1 beyond the length
    lengths: list[int]
    log_probs: Tensor | None  # [batch, k, draft_vocab] float32: the law each token was drawn from; None = point mass
    token_map: Tensor | None = None  # [draft_vocab] int64 target ids of the law's columns; None = the target's own


class Proposer(ABC):
    """One drafting method. It owns its planes' contents and any per-request state keyed by request id."""

    requirements: Requirements

    @abstractmethod
    def bind(self, planes: Planes) -> None:
        """Takes the engine's planes; called once, before the first step."""

    @abstractmethod
    def observe(self, rows: ObservedRows) -> None:
        """Takes the rows computed in this step; called before `propose` of the same step."""

    @abstractmethod
    def propose(self, step: DraftStep) -> Drafts:
        """Drafts at most min(num_draft_tokens, max_drafts[b]) tokens for each request."""

    @abstractmethod
    def release(self, request_id: int, *, finished: bool) -> None:
        """Forgets a request. A finished one still holds its blocks, until right after; a preempted one lost them."""
