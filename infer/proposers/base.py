"""What a proposer is: it sees every row the target computes, once and in order, and drafts what may come next."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ..batch import PackedBatch
from ..planes import Planes, PlaneSpec


class ProposerError(ValueError):
    """A drafting method that cannot do what it was asked; the message says what would work."""


@dataclass(frozen=True)
class Requirements:
    """What the engine must provide."""

    layer_ids: tuple[int, ...] = ()  # hidden states captured at these ids, ascending; id L is the raw last state
    planes: tuple[PlaneSpec, ...] = ()  # over the requests' own block tables
    next_token: int = 0  # how many tokens after t row t of its planes depends on: prefix-cache keys then include them,
    # and a block is offered once the rows that bring them are computed
    lookahead: int = 0  # slots beyond the last token that `propose` writes to
    fixed_lookahead: bool = False  # all of them for any draft, however few there is room for
    draft_laws: bool = False  # whether drafts carry the law they were drawn from
    observes: bool = True  # False: rows need not be gathered for it
    on_host: bool = False  # it reads what it is given on the host: its calls are not recorded

    def spare_slots(self, num_draft_tokens: int) -> int:
        """Slots that must stay free behind those of the drafts there is room for."""
        return max(0, self.lookahead - (1 if self.fixed_lookahead else num_draft_tokens))


class ObservedRows(NamedTuple):
    """Every row the target computed in a step, in order; a request's rows after its `last_rows` are rejected drafts.

    Rejected rows must leave nothing behind that later rows of the same positions do not overwrite. Rows found in the
    prefix cache are not computed, so a request's first observation may start at a later position: what a proposer knows
    of earlier rows is in its planes, written by whoever computed them. After a preemption rows are computed, and
    observed, again from the first that the cache no longer holds. Rows of the table row that belongs to nobody, and
    rows beyond `cu_seqlens`, are padding.
    """

    request_ids: list[int]  # host's ids of the first requests; the others are padding. Empty while a graph is recorded
    slots: Tensor  # [batch] int64 rows of the request table: where per-request state is kept
    batch: PackedBatch  # the rows and where their keys and values live
    next_token_ids: Tensor  # [num_tokens] int64; the token that follows each row
    last_rows: Tensor  # [batch] int64; the last final row of each request
    states: Tensor | None  # [num_tokens, len(layer_ids), hidden]


class DraftStep(NamedTuple):
    """The requests to draft for. All were observed up to the row before their newest token."""

    request_ids: list[int]  # as in `ObservedRows`
    slots: Tensor  # [batch] int64 rows of the request table
    block_tables: Tensor  # [batch, max_blocks] int32
    seq_lens: Tensor  # [batch] int64; known tokens, the newest (not yet computed) one included
    last_token_ids: Tensor  # [batch] int64; that newest token
    room: Tensor  # [batch] int64; drafts that still fit the context, the output limit and the blocks
    temperature: Tensor  # [batch] float32
    seeds: Tensor  # [batch] int64
    wants_confidence: bool = False  # whether `Drafts.confidence` is of use
    # the request table's own buffer [num_rows, width] int32, which never moves: row slots[b] begins with request b's
    # known tokens, those found in the prefix cache included; what stands behind them means nothing
    tokens: Tensor | None = None


class Drafts(NamedTuple):
    """Draft tokens per request, the first `lengths[b]` of each row."""

    token_ids: Tensor  # [batch, k] int64 target ids; -1 beyond the length
    lengths: Tensor  # [batch] int64
    log_probs: Tensor | None  # [batch, k, draft_vocab] float32: the law each token was drawn from; None = point mass
    token_map: Tensor | None = None  # [draft_vocab] int64 target ids of the law's columns; None = the target's own
    confidence: Tensor | None = None  # [batch, k] float32 top probability of the law at each position, known before the
    # token there is drawn; it may depend on earlier tokens, never on its own. None = not told


class Released(NamedTuple):
    """A request that leaves; its blocks are freed right after, or have been where it was preempted."""

    request_id: int
    block_table: list[int]  # empty where it was preempted
    num_rows: int  # rows that are final: 0..num_rows-1
    finished: bool  # False: preempted, and will come back; cancelled; or failed


class Proposer(ABC):
    """One drafting method: a `DeviceProposer` or a `HostProposer`.

    It owns its planes' contents and any per-request state, kept by row of the request table. What it does on the device
    has fixed shapes, reads nothing on the host and keeps its state in buffers that never move, so that it can be
    recorded as a CUDA graph, unless `requirements.on_host`; on a GPU a step's last requests may be padding in any case.
    """

    requirements: Requirements

    @abstractmethod
    def bind(self, planes: Planes, num_rows: int) -> None:
        """Takes the engine's planes and the number of rows of its request table; called once, before the first step.

        Of the target's own planes it may read the rows of observed tokens, the last final one included.
        """

    @abstractmethod
    def observe(self, rows: ObservedRows) -> None:
        """Takes the rows computed in this step; called before `propose` of the same step."""

    @abstractmethod
    def release(self, request: Released) -> None:
        """Forgets a request that finished, was cancelled or was preempted."""

    def forget(self) -> None:
        """Drops what was learned from earlier requests, so that a measured run starts like a new engine's."""
        return None


class DeviceProposer(Proposer):
    """One that drafts on the device: a pure function of what it is given and of its state."""

    @abstractmethod
    def propose(self, step: DraftStep) -> Drafts:
        """Drafts at most min(num_draft_tokens, room[b]) tokens for each request; the engine cuts what is more.

        A step in which drafting does not pay passes without it. Drafts that were never verified leave no trace: noise
        that drew one of them is not used again.
        """
