"""Prompts in, a measured and checked result out: plain decoding and a drafting method through the same engine.

Plain runs stand before and after the drafting run, so that a machine that warms up or slows down shows as noise and not
as a speed-up. Each engine is built, warmed up and measured alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from .engine import Engine
from .losslessness import Generation, Losslessness, check_greedy, check_sampled, count_differences, unchecked_synthetic
from .report import MethodResult
from .request import FinishReason, RequestOutput
from .sampling import SamplingParams
from .scoring import score_logits, score_probs
from .statistics import EngineStatistics

BuildEngine = Callable[[int, int], Engine]
"""`build(num_draft_tokens, batch_size)`: a fresh engine; 0 draft tokens decodes plainly."""

Progress = Callable[[str, int], None]
"""`progress(phase, finished)`: called with 0 when a phase starts and after each finished prompt."""

WARMUP_TOKENS = 8
CALIBRATION_TOKENS = 32


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What to measure."""

    method: str
    prompt_set: str
    prompts: Sequence[Sequence[int]]
    params: Sequence[SamplingParams]  # one a prompt, each with its own seed
    num_draft_tokens: int
    batch_size: int
    dtype: torch.dtype
    seed: int = 0
    law_by_position: bool = True  # False for verification rules that look beyond the token
    synthetic: bool = False  # drafts are kept by given rates: there is no output to check

    @property
    def temperature(self) -> float:
        return self.params[0].temperature


class Measured(NamedTuple):
    """A result, and the outputs it was measured on."""

    result: MethodResult
    outputs: list[RequestOutput]
    plain_outputs: list[RequestOutput]


class Run(NamedTuple):
    """One pass over the prompts."""

    outputs: list[RequestOutput]
    statistics: EngineStatistics

    @property
    def tokens_per_second(self) -> float:
        return self.statistics.output_tokens / max(self.statistics.wall_seconds, 1e-9)


class Drafted(NamedTuple):
    """A method's run, and what only its own engine can tell."""

    run: Run
    best_k_by_batch_size: dict[int, int]
    single: EngineStatistics | None  # a short run at one draft token; None: not made
    lossless: Losslessness | None  # None: still to be compared with plain decoding


class Costs(NamedTuple):
    """Milliseconds of a drafting step of 1, 2, ... draft tokens, and of a plain one."""

    drafting: list[float]
    decode: float


def evaluate(work: Evaluation, build: BuildEngine, progress: Progress) -> Measured:
    """Measures one method on one set of prompts and checks that it changed nothing."""
    return compare([work], [build], progress)[0]


def compare(works: Sequence[Evaluation], builds: Sequence[BuildEngine], progress: Progress) -> list[Measured]:
    """The same for several methods on the same prompts, all of them between the same two plain runs.

    `works` differ in method, draft tokens and what depends on them; `builds[i]` makes the engines of `works[i]`.
    """
    first, build = works[0], builds[0]
    before = decode(first, build(0, first.batch_size), partial(progress, "plain decoding"))
    drafts = [_draft(work, make, progress) for work, make in zip(works, builds, strict=True)]
    engine = build(0, first.batch_size)
    after = decode(first, engine, partial(progress, "plain decoding again"))
    measured = []
    for work, drafted in zip(works, drafts, strict=True):
        lossless = drafted.lossless
        if lossless is None:
            lossless = check_equal(work, engine, before, drafted.run, None)
        if needs_plain_differences(work, lossless):
            del engine
            again, copies = as_verified(work), work.num_draft_tokens + 1
            engine, phase = build(0, again.batch_size), f"plain decoding, batch {again.batch_size}"
            other = decode(again, engine, lambda finished, p=phase, c=copies: progress(p, finished // c))
            lossless = check_equal(work, engine, before, drafted.run, plain_differences(work, before, other))
        measured.append(
            Measured(result_of(work, (before, after), drafted, lossless), drafted.run.outputs, before.outputs)
        )
    return measured


def decode(work: Evaluation, engine: Engine, progress: Callable[[int], None]) -> Run:
    """All prompts once through a warmed-up engine, which knew none of them."""
    _warm_up(work, engine)
    finished = 0
    progress(0)

    def on_finish(output: RequestOutput) -> None:
        nonlocal finished
        finished += 1
        progress(finished)

    return Run(engine.generate(work.prompts, list(work.params), on_finish), engine.statistics)


def check_law(work: Evaluation, engine: Engine, drafted: Run) -> Losslessness:
    """The verdict above temperature 0; `engine`, idle, is asked for the target's law."""
    generator = torch.Generator().manual_seed(work.seed)
    laws = partial(score_probs, engine, work.params[0])
    return check_sampled([_generation(o) for o in drafted.outputs], laws, generator, work.law_by_position)


def check_equal(work: Evaluation, engine: Engine, plain: Run, drafted: Run, differences: int | None) -> Losslessness:
    """The verdict at temperature 0; `engine`, idle, is asked for the margin where two texts part.

    `differences` as in `check_greedy`: what `plain_differences` found, None where it was not asked.
    """
    first, second = ([_generation(o) for o in run.outputs] for run in (plain, drafted))
    return check_greedy(first, second, partial(score_logits, engine, work.params[0]), work.dtype, differences)


def needs_plain_differences(work: Evaluation, verdict: Losslessness) -> bool:
    """Whether greedy texts part where low precision may part them, since it rounds by the shape of the batch.

    What plain decoding shows against itself at as many rows a step as verification has is then the measure.
    """
    return work.dtype not in (torch.float32, torch.float64) and bool(verdict.divergences)


def as_verified(work: Evaluation) -> Evaluation:
    """The same work for plain decoding of as many rows a step as verification has: every prompt k + 1 times."""
    copies = work.num_draft_tokens + 1
    return replace(
        work,
        prompts=[prompt for prompt in work.prompts for _ in range(copies)],
        params=[params for params in work.params for _ in range(copies)],
        batch_size=work.batch_size * copies,
    )


def plain_differences(work: Evaluation, plain: Run, other: Run) -> int:
    """Prompts on which plain decoding says something else when it decodes them `as_verified`."""
    copies = work.num_draft_tokens + 1
    return count_differences(*([_generation(o) for o in part] for part in (plain.outputs, other.outputs[::copies])))


def result_of(work: Evaluation, plain: Sequence[Run], drafted: Drafted, lossless: Losslessness) -> MethodResult:
    """The figures of a drafting run beside plain ones."""
    run, counts = drafted.run, drafted.run.statistics
    rates = [run.tokens_per_second for run in plain]
    baseline = sum(rates) / len(rates)
    decode_steps = sum(run.statistics.num_decode_steps for run in plain)
    decode_seconds = sum(run.statistics.decode_seconds for run in plain)
    decode_ms = 1000 * decode_seconds / decode_steps if decode_steps else None
    break_even = best_k = predicted = None
    by_batch_size = dict(drafted.best_k_by_batch_size)
    acceptance = counts.acceptance_by_position
    if counts.draft_ms is not None and counts.verify_ms is not None and decode_ms and acceptance:
        break_even = (counts.draft_ms + counts.verify_ms) / decode_ms
        costs = step_costs(counts, drafted.single, decode_ms, len(acceptance))
        best_k, predicted = best_num_draft_tokens(acceptance, costs)
        if work.batch_size in by_batch_size:
            by_batch_size[work.batch_size] = best_k  # the run's own steps tell more than a rehearsal
    return MethodResult(
        method=work.method,
        prompt_set=work.prompt_set,
        num_draft_tokens=work.num_draft_tokens,
        temperature=work.temperature,
        batch_size=work.batch_size,
        num_prompts=len(work.prompts),
        prompt_tokens=counts.prompt_tokens,
        cached_prompt_tokens=counts.cached_prompt_tokens,
        output_tokens=counts.output_tokens,
        acceptance_length=counts.acceptance_length,
        acceptance_length_kept=counts.acceptance_length_kept,
        tokens_per_step=counts.tokens_per_step,
        acceptance_by_position=acceptance,
        conditional_acceptance_by_position=counts.conditional_acceptance_by_position,
        draft_acceptance_rate=counts.draft_acceptance_rate,
        tokens_per_second=run.tokens_per_second,
        baseline_tokens_per_second=baseline,
        speedup=run.tokens_per_second / baseline if baseline else 0.0,
        draft_ms=counts.draft_ms,
        verify_ms=counts.verify_ms,
        decode_ms=decode_ms,
        break_even_acceptance_length=break_even,
        best_k=best_k,
        predicted_speedup_by_k=predicted,
        best_k_by_batch_size=by_batch_size or None,
        noise_floor=noise_floor(rates),
        lossless=lossless,
    )


def best_num_draft_tokens(acceptance_by_position: Sequence[float], costs: Costs) -> tuple[int, list[float]]:
    """The k of the highest predicted speed-up (0: none exceeds 1) and the predictions for k = 1, 2, ...

    A step of k drafts yields 1 + p_1 + ... + p_k tokens, with p the unconditional acceptance by position.
    """
    predicted, tokens = [], 1.0
    for rate, cost in zip(acceptance_by_position, costs.drafting, strict=True):
        tokens += rate
        predicted.append(tokens * costs.decode / cost)
    best = max(range(len(predicted)), key=predicted.__getitem__) + 1
    return (best if predicted[best - 1] > 1 else 0), predicted


def step_costs(drafted: EngineStatistics, single: EngineStatistics | None, decode_ms: float, k: int) -> Costs:
    """Cost of a step for 1..k drafts: a straight line between the measured ends, k and 1 drafts.

    Without a measurement at 1, proposing grows from nothing and verifying from a plain step.
    """
    draft_k, verify_k = drafted.draft_ms, drafted.verify_ms
    assert draft_k is not None and verify_k is not None
    if single is None or single.draft_ms is None or single.verify_ms is None:
        totals = [draft_k * i / k + decode_ms + (verify_k - decode_ms) * i / k for i in range(1, k + 1)]
    else:
        first, last = single.draft_ms + single.verify_ms, draft_k + verify_k
        totals = [first + (last - first) * i / max(k - 1, 1) for i in range(k)]
    return Costs(totals, decode_ms)


def noise_floor(tokens_per_second: Sequence[float]) -> float:
    """(fastest - slowest) / mean of repeated runs."""
    mean = sum(tokens_per_second) / len(tokens_per_second)
    return (max(tokens_per_second) - min(tokens_per_second)) / mean if mean else 0.0


def _draft(work: Evaluation, build: BuildEngine, progress: Progress) -> Drafted:
    engine = build(work.num_draft_tokens, work.batch_size)
    run = decode(work, engine, partial(progress, work.method))
    best_k_by_batch_size = engine.best_num_draft_tokens()
    lossless = None
    if work.synthetic:
        lossless = unchecked_synthetic([_generation(output) for output in run.outputs])
    elif work.temperature > 0:
        lossless = check_law(work, engine, run)
    del engine
    single = _calibrate(work, build) if work.num_draft_tokens > 1 and run.statistics.num_drafts else None
    return Drafted(run, best_k_by_batch_size, single, lossless)


def _warm_up(work: Evaluation, engine: Engine) -> None:
    few = min(len(work.prompts), work.batch_size)
    params = [_shortened(p, WARMUP_TOKENS) for p in work.params[:few]]
    engine.generate(work.prompts[:few], params)
    engine.pool.forget()  # or the measured run would find these prompts computed
    engine.proposer.forget()
    engine.statistics = EngineStatistics()


def _calibrate(work: Evaluation, build: BuildEngine) -> EngineStatistics:
    """A short run at one draft token: the other end of the cost line."""
    few = min(len(work.prompts), work.batch_size)
    short = [_shortened(p, CALIBRATION_TOKENS) for p in work.params[:few]]
    part = replace(work, prompts=work.prompts[:few], params=short)
    return decode(part, build(1, work.batch_size), lambda finished: None).statistics


def _shortened(params: SamplingParams, most: int) -> SamplingParams:
    return replace(params, max_tokens=min(params.max_tokens, most), min_tokens=min(params.min_tokens, most))


def _generation(output: RequestOutput) -> Generation:
    return Generation(
        output.prompt_token_ids, output.token_ids, output.block_lengths, output.finish_reason is FinishReason.ERROR
    )
