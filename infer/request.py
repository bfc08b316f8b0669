"""A request: what was asked, what is known so far, and where its cache lives."""

from dataclasses import dataclass, field

from .sampling import SamplingParams
from .stopping import FinishReason, Stopper


class EngineError(ValueError):
    """A request or setting the engine cannot honour; the message says what would work."""


@dataclass(eq=False)
class Request:
    """One sequence on its way through the engine.

    `token_ids` are the known tokens, prompt first. Rows `0..num_computed-1` are in the cache. `num_drafts` drafts wait
    in the request table to be verified in the next step; they are no part of the known tokens.
    """

    request_id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    stopper: Stopper
    token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)  # of the full blocks of the known tokens
    num_registered: int = 0  # leading blocks of the table that the prefix cache has seen
    num_cached: int = 0  # prompt tokens found in the prefix cache at first admission
    num_drafts: int = 0
    slot: int | None = None  # row of the request table while it runs
    block_lengths: list[int] = field(default_factory=list)  # tokens kept of each verification step, in order
    logprobs: list[dict[int, float]] = field(default_factory=list)  # of each output token, where asked for
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
    def is_decoding(self) -> bool:
        """Whether every known token but the newest is in the cache."""
        return self.num_computed == len(self.token_ids) - 1


@dataclass(frozen=True)
class RequestOutput:
    """A finished request."""

    request_id: int
    prompt_token_ids: list[int]
    token_ids: list[int]  # an emitted end token is part of it, and so is what completed a stop string
    finish_reason: FinishReason
    block_lengths: list[int]  # tokens each verification step added; sums to len(token_ids)
    error: str | None = None
    text: str | None = None  # with stop strings: the output's text, cut before the string that ended it
    # per output token, where asked for: log-probability by token id under the target's own law, the emitted one first
    logprobs: list[dict[int, float]] | None = None
