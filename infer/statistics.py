"""What an engine counts while it runs, and the rates read from the counts.

Definitions, which every report repeats:
    acceptance length   1 + accepted draft tokens / drafts: tokens a drafting step yields, the bonus token included
    a draft             one request in one step for which at least one token was drafted
    accepted            as vLLM counts: before a stop or length limit cuts the block; `kept`: after
    tokens per step     output tokens of a request over the forwards that sampled for it; plain decoding gives 1
"""

from dataclasses import dataclass, field
from typing import Literal

StepKind = Literal["prefill", "verify", "decode"]


@dataclass(kw_only=True)
class EngineStatistics:
    """Running totals; the engine adds to them, `evaluate` reads them."""

    num_steps: int = 0  # engine steps of any kind
    num_prefill_steps: int = 0  # steps holding prompt rows, whatever else they hold
    num_draft_steps: int = 0  # steps without prompt rows that verified drafts
    num_decode_steps: int = 0  # steps without prompt rows and without drafts
    num_drafts: int = 0  # (request, step) pairs that verified at least one drafted token
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_kept: int = 0
    drafted_per_position: list[int] = field(default_factory=list)
    reached_per_position: list[int] = field(default_factory=list)  # drafted, and all before it accepted
    accepted_per_position: list[int] = field(default_factory=list)
    output_tokens: int = 0
    request_forwards: int = 0  # (request, step) pairs that sampled
    num_preemptions: int = 0
    prompt_tokens: int = 0  # of requests that ended
    cached_prompt_tokens: int = 0  # of those, found in the prefix cache when the request first ran
    cache_hits: int = 0  # requests for which any were found
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0  # proposer, over the `num_draft_steps` steps
    verify_seconds: float = 0.0  # target and verification, over the `num_draft_steps` steps
    decode_seconds: float = 0.0  # target and sampling, over the `num_decode_steps` steps
    wall_seconds: float = 0.0

    def count_request(self, *, drafted: int, accepted: int, emitted: int) -> None:
        """Adds one request of one step that sampled for it.

        `accepted` counts drafted tokens the verifier took; `emitted` the tokens that reached the output after stop
        rules, the bonus or recovered token included.
        """
        assert 0 <= accepted <= drafted and emitted >= 0
        self.request_forwards += 1
        self.output_tokens += emitted
        if not drafted:
            return
        self.num_drafts += 1
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
        self.accepted_kept += min(accepted, emitted)
        for counts in (self.drafted_per_position, self.reached_per_position, self.accepted_per_position):
            counts += [0] * (drafted - len(counts))
        for position in range(drafted):
            self.drafted_per_position[position] += 1
            self.reached_per_position[position] += position <= accepted
            self.accepted_per_position[position] += position < accepted

    def count_prompt(self, num_tokens: int, *, cached: int) -> None:
        """Adds the prompt of a request that ended; `cached` of its tokens were not computed."""
        assert 0 <= cached < num_tokens
        self.prompt_tokens += num_tokens
        self.cached_prompt_tokens += cached
        self.cache_hits += cached > 0

    def count_step(self, kind: StepKind, *, target_seconds: float, draft_seconds: float = 0.0) -> None:
        """Adds one engine step; proposer time of prefill and plain decode steps goes with the step."""
        self.num_steps += 1
        if kind == "prefill":
            self.num_prefill_steps += 1
            self.prefill_seconds += target_seconds + draft_seconds
        elif kind == "verify":
            self.num_draft_steps += 1
            self.verify_seconds += target_seconds
            self.draft_seconds += draft_seconds
        else:
            self.num_decode_steps += 1
            self.decode_seconds += target_seconds + draft_seconds

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted / drafts; None where nothing was drafted."""
        return 1 + self.accepted_tokens / self.num_drafts if self.num_drafts else None

    @property
    def acceptance_length_kept(self) -> float | None:
        """The same over the tokens that survived stop rules."""
        return 1 + self.accepted_kept / self.num_drafts if self.num_drafts else None

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else None

    @property
    def tokens_per_step(self) -> float | None:
        """Output tokens over request forwards."""
        return self.output_tokens / self.request_forwards if self.request_forwards else None

    @property
    def acceptance_by_position(self) -> list[float] | None:
        """Unconditional: accepted at position i over all drafts, also those shorter than i + 1."""
        return [n / self.num_drafts for n in self.accepted_per_position] if self.num_drafts else None

    @property
    def conditional_acceptance_by_position(self) -> list[float | None] | None:
        """Accepted at i over drafts that were offered position i with every earlier token accepted; None: never."""
        if not self.num_drafts:
            return None
        pairs = zip(self.accepted_per_position, self.reached_per_position, strict=True)
        return [accepted / reached if reached else None for accepted, reached in pairs]

    @property
    def draft_ms(self) -> float | None:
        """Milliseconds of proposing a drafting step."""
        return _ms(self.draft_seconds, self.num_draft_steps)

    @property
    def verify_ms(self) -> float | None:
        """Milliseconds of the target's forward and verification a drafting step."""
        return _ms(self.verify_seconds, self.num_draft_steps)

    @property
    def decode_ms(self) -> float | None:
        """Milliseconds of a step that neither drafts nor reads a prompt."""
        return _ms(self.decode_seconds, self.num_decode_steps)


def _ms(seconds: float, steps: int) -> float | None:
    return 1000 * seconds / steps if steps else None
