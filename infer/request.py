"""A request: what was asked, what is known so far, and where its cache lives."""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from torch import Tensor

from .sampling import SamplingParams


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop"  # an end or stop token
    LENGTH = "length"  # the output or the context is full
    ERROR = "error"  # the target's logits were not finite
    CANCELLED = "cancelled"


class DraftLaw(NamedTuple):
    """Where the law of a request's drafts is kept: row `row` of one propose call's log_probs."""

    log_probs: Tensor  # [batch, k, draft_vocab] float32
    token_map: Tensor | None  # [draft_vocab] int64
    row: int


@dataclass(eq=False)
class Request:
    """One sequence on its way through the engine.

    `token_ids` are the known tokens, prompt first. Rows `0..num_computed-1` are in the cache. `drafts` wait to be
    verified in the next step; they are no part of the known tokens.
    """

    request_id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)  # of the full blocks of the known tokens
    num_registered: int = 0  # leading blocks of the table that the prefix cache has seen
    num_cached: int = 0  # prompt tokens found in the prefix cache at first admission
    drafts: list[int] = field(default_factory=list)
    draft_law: DraftLaw | None = None
    block_lengths: list[int] = field(default_factory=list)  # tokens kept of each verification step, in order
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def num_drafts(self) -> int:
        return len(self.drafts)

    @property
    def is_decoding(self) -> bool:
        """Whether every known token but the newest is in the cache."""
        return self.num_computed == len(self.token_ids) - 1

    def drop_drafts(self) -> None:
        self.drafts, self.draft_law = [], None


@dataclass(frozen=True)
class RequestOutput:
    """A finished request."""

    request_id: int
    prompt_token_ids: list[int]
    token_ids: list[int]  # an emitted end token is part of it
    finish_reason: FinishReason
    block_lengths: list[int]  # tokens each verification step added; sums to len(token_ids)
    error: str | None = None
