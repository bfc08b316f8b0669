"""Verification: what k + 1 rows cost beside one, and what of that an engine with free drafts turns into speed.

Checked: drafts that are mostly right leave the greedy texts as plain decoding has them, so that every row of a
verification step is looked at; with given acceptance, as many drafts are kept as were asked for.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from ...infer.engine import Engine
from ...infer.proposers.base import Proposer
from ...infer.proposers.none import NoneProposer
from ...infer.proposers.synthetic import SyntheticProposer
from ...infer.statistics import EngineStatistics
from ...infer.synthetic import conditional, survival_of_length
from ...infer.target import Target
from ...kernels.records import VerifyMode
from ..engines import build_engine
from .checks import KnownText, same_text, texts_so_far
from .record import Check, Record
from .steady import Recorded, Steady, recorded, start, steady, stop, tokens_needed
from .targets import Source, random_prompts

CHECKED_STEPS = 8
DEVIATIONS = 5.0  # how far a share of kept drafts may lie from the one asked for


class Work(NamedTuple):
    """What to verify."""

    batch_sizes: Sequence[int]
    context: int
    steps: int
    num_draft_tokens: int
    acceptance_length: float

    @property
    def new_tokens(self) -> int:
        prompt_tokens = max(self.batch_sizes) * self.context
        checked = CHECKED_STEPS * (self.num_draft_tokens + 1)
        return tokens_needed(self.steps, self.num_draft_tokens, prompt_tokens) + checked


class Loop(NamedTuple):
    """One engine at one batch size."""

    steady: Steady
    recorded: Recorded | None
    texts: list[list[int]]

    @property
    def target_ms(self) -> float:
        """Target and verification of a step: recorded calls alone where there are any."""
        ms = self.steady.target_ms if self.recorded is None else self.recorded.target.ms
        assert ms is not None, "a steady loop decodes"
        return ms


def run(record: Record, source: Source, work: Work) -> None:
    """Adds a row a batch size; raises BenchError at the first whose texts or acceptance are not as they must be."""
    target = Target.from_model(source.build(), max_length=work.context + work.new_tokens)
    prompts = random_prompts(max(work.batch_sizes), work.context, target.vocab_size)
    engine = _build(target, NoneProposer(), work, 0)
    plain = {batch: _loop(engine, prompts[:batch], work) for batch in work.batch_sizes}
    same = _same_texts(target, prompts, work, plain)
    del engine
    engine = _build(target, SyntheticProposer(work.num_draft_tokens, target.vocab_size), work, work.num_draft_tokens)
    for batch in work.batch_sizes:
        record.require(same[batch])
        loop = _loop(engine, prompts[:batch], work)
        rates = survival_of_length(work.acceptance_length, work.num_draft_tokens)
        accepted = accepted_as_asked(loop.steady.statistics, rates)
        record.add({"batch": batch, "context": work.context, **_row(plain[batch], loop, work)}, [same[batch], accepted])


def accepted_as_asked(counts: EngineStatistics, rates: Sequence[float]) -> Check:
    """Whether each draft was kept as often, once all before it were, as `rates` by position say."""
    found, passed = [], counts.num_drafts > 0
    reached_kept = zip(counts.reached_per_position, counts.accepted_per_position, strict=True)
    for (reached, kept), rate in zip(reached_kept, conditional(rates), strict=False):
        if reached:
            room = DEVIATIONS * math.sqrt(rate * (1 - rate) / reached) + 1e-6
            passed &= abs(kept / reached - rate) <= room
            found.append(f"{kept / reached:.3f} for {rate:.3f}")
    return Check("acceptance as asked", passed, ", ".join(found) or "nothing was drafted")


def _build(target: Target, proposer: Proposer, work: Work, k: int, *, synthetic: bool = True) -> Engine:
    synthetic = synthetic and k > 0
    return build_engine(
        target,
        proposer,
        num_draft_tokens=k,
        batch_size=max(work.batch_sizes),
        longest=work.context + work.new_tokens,
        verify_mode=VerifyMode.SYNTHETIC if synthetic else VerifyMode.STANDARD,
        acceptance_rates=tuple(survival_of_length(work.acceptance_length, k)) if synthetic else None,
    )


def _loop(engine: Engine, prompts: Sequence[Sequence[int]], work: Work) -> Loop:
    start(engine, prompts, work.new_tokens)
    for _ in range(CHECKED_STEPS):
        engine.step()
    measured = steady(engine, work.steps)
    texts = texts_so_far(engine)
    alone = recorded(engine)
    stop(engine)
    return Loop(measured, alone, texts)


def _same_texts(
    target: Target, prompts: Sequence[Sequence[int]], work: Work, plain: dict[int, Loop]
) -> dict[int, Check]:
    """By batch size: greedy texts with drafts that are mostly right against plain decoding's."""
    k = work.num_draft_tokens
    most = max(work.batch_sizes)
    known = [[*prompt, *text] for prompt, text in zip(prompts, plain[most].texts, strict=True)]
    proposer = KnownText(known, k, target.vocab_size, target.device)
    engine = _build(target, proposer, work, k, synthetic=False)
    checks = {}
    for batch in work.batch_sizes:
        start(engine, prompts[:batch], work.new_tokens)
        for _ in range(CHECKED_STEPS):
            engine.step()
        texts = texts_so_far(engine)
        stop(engine)
        checks[batch] = same_text("drafted = plain", engine, prompts[:batch], plain[batch].texts, texts)
    accepted = engine.statistics.accepted_tokens
    return {
        batch: check._replace(
            passed=check.passed and accepted > 0, found=f"{check.found}, {accepted} drafts kept in all batches"
        )
        for batch, check in checks.items()
    }


def _row(plain: Loop, drafted: Loop, work: Work) -> dict[str, Any]:
    length = drafted.steady.statistics.acceptance_length
    assert length is not None
    ratio = drafted.target_ms / plain.target_ms
    speedup = drafted.steady.tokens_per_second / plain.steady.tokens_per_second
    return {
        "num_draft_tokens": work.num_draft_tokens,
        "plain_ms": plain.target_ms,
        "verify_ms": drafted.target_ms,
        "verify_to_plain": ratio,
        "acceptance_length": length,
        "plain_step_ms": plain.steady.step.ms,
        "drafting_step_ms": drafted.steady.step.ms,
        "spread": max(plain.steady.step.spread, drafted.steady.step.spread),
        "speedup": speedup,
        "possible_speedup": length / ratio,
        "realised_share": speedup * ratio / length,
    }
