"""Adaptive drafting against never and always drafting, under given acceptance, at each number of running requests.

Every policy is timed over the same stretch of its texts, since attention costs more the longer they are. Checked: by
position, drafts are kept as often as was asked for.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...infer.draft_policy import DraftPolicyName
from ...infer.engine import Engine
from ...infer.proposers.none import NoneProposer
from ...infer.proposers.synthetic import SyntheticProposer
from ...infer.statistics import EngineStatistics
from ...infer.target import Target
from ...kernels.records import VerifyMode
from ..engines import build_engine
from .record import Record
from .steady import start, stop
from .targets import Source, random_prompts
from .timing import median_and_spread, synchronize
from .verify import accepted_as_asked

STRONG = (0.947, 0.890, 0.832, 0.778, 0.728, 0.678, 0.628)
CHAT = (0.70, 0.45, 0.30, 0.20, 0.13, 0.09, 0.06)
RATES = {"strong": STRONG, "chat": CHAT}
"""Acceptance by position, of a strong head on easy text and of an ordinary one on chat."""

SKIPPED = 32  # output tokens a request before the clock starts
TIMED = 96  # output tokens a request that are timed
REPEATS = 3
LEARNED_REQUEST_STEPS = 2000


class Work(NamedTuple):
    """What to decode."""

    concurrency: Sequence[int]
    context: int
    num_draft_tokens: int
    rates: Mapping[str, tuple[float, ...]]

    def learning_steps(self, requests: int) -> int:
        """Steps that are not counted, in which adaptive drafting learns."""
        return min(max(LEARNED_REQUEST_STEPS // requests, 16), 120)

    def max_tokens(self, requests: int) -> int:
        """Enough that no request ends."""
        per_step = self.num_draft_tokens + 1
        return max((self.learning_steps(requests) + 8) * per_step, SKIPPED + TIMED + 16 * per_step)

    @property
    def longest(self) -> int:
        return self.context + max(map(self.max_tokens, self.concurrency))

    def num_blocks(self, block_size: int = 16) -> int:
        """What the most demanding number of requests takes."""
        room = self.context + 2 * (self.num_draft_tokens + 1) + block_size
        return 64 + max(n * (1 + (room + self.max_tokens(n)) // block_size) for n in self.concurrency)


class Speed(NamedTuple):
    """Of one policy at one number of requests."""

    tokens_per_second: float
    spread: float
    statistics: EngineStatistics


def run(record: Record, source: Source, work: Work) -> None:
    """Adds a row for each set of rates and number of requests; raises BenchError where acceptance is not as asked."""
    target = Target.from_model(source.build(), max_length=work.longest)
    prompts = random_prompts(max(work.concurrency), work.context, target.vocab_size)
    none = _speeds(target, prompts, work, None, "fixed")
    for name, rates in work.rates.items():
        fixed = _speeds(target, prompts, work, rates, "fixed")
        adaptive = _speeds(target, prompts, work, rates, "adaptive")
        for requests in work.concurrency:
            speeds = none[requests], fixed[requests], adaptive[requests]
            checks = [accepted_as_asked(speeds[1].statistics, rates)._replace(name="acceptance as asked, fixed")]
            if speeds[2].statistics.num_drafts:
                found = accepted_as_asked(speeds[2].statistics, rates)
                checks.append(found._replace(name="acceptance as asked, adaptive"))
            record.add({"rates": name, "requests": requests, "context": work.context, **_row(*speeds)}, checks)


def _row(none: Speed, fixed: Speed, adaptive: Speed) -> dict[str, Any]:
    gained, possible = (s.tokens_per_second - none.tokens_per_second for s in (adaptive, fixed))
    counts = adaptive.statistics
    return {
        "none_tokens_per_second": none.tokens_per_second,
        "fixed_to_none": fixed.tokens_per_second / none.tokens_per_second,
        "adaptive_to_none": adaptive.tokens_per_second / none.tokens_per_second,
        "adaptive_to_best": adaptive.tokens_per_second / max(none.tokens_per_second, fixed.tokens_per_second),
        "share_of_fixed_gain": gained / possible if possible > 0 else None,
        "drafts_verified_a_request": counts.draft_tokens / counts.request_forwards,
        "spread": max(none.spread, fixed.spread, adaptive.spread),
    }


def _speeds(
    target: Target,
    prompts: Sequence[Sequence[int]],
    work: Work,
    rates: tuple[float, ...] | None,
    policy: DraftPolicyName,
) -> dict[int, Speed]:
    """By number of requests; no rates: no drafts."""
    k = 0 if rates is None else work.num_draft_tokens
    engine = build_engine(
        target,
        SyntheticProposer(k, target.vocab_size) if k else NoneProposer(),
        num_draft_tokens=k,
        batch_size=max(work.concurrency),
        longest=work.longest,
        num_blocks=work.num_blocks(),
        verify_mode=VerifyMode.STANDARD if rates is None else VerifyMode.SYNTHETIC,
        acceptance_rates=rates,
        draft_policy=policy,
    )
    return {n: _speed(engine, prompts[:n], work, learns=policy == "adaptive") for n in work.concurrency}


def _speed(engine: Engine, prompts: Sequence[Sequence[int]], work: Work, *, learns: bool) -> Speed:
    requests = len(prompts)
    max_tokens = work.max_tokens(requests)
    start(engine, prompts, max_tokens)
    for _ in range(work.learning_steps(requests) if learns else 2):
        engine.step()
    stop(engine, forget=False)
    engine.statistics = EngineStatistics()
    speeds = [_timed(engine, prompts, max_tokens, first_seed=(1 + i) * requests) for i in range(REPEATS)]
    engine.pool.forget()
    return Speed(*median_and_spread(speeds), engine.statistics)


def _timed(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int, first_seed: int) -> float:
    """Tokens a second between the SKIPPED-th and the last timed output token, on average over the requests."""
    device, counts = engine.target.device, engine.statistics
    before = counts.output_tokens
    start(engine, prompts, max_tokens, first_seed)
    while counts.output_tokens - before < SKIPPED * len(prompts):
        engine.step()
    synchronize(device)
    first, begun = counts.output_tokens, time.perf_counter()
    while counts.output_tokens - before < (SKIPPED + TIMED) * len(prompts):
        engine.step()
    synchronize(device)
    seconds = time.perf_counter() - begun
    emitted = counts.output_tokens - first
    stop(engine, forget=False)
    return emitted / seconds
