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
    single: EngineStatistics | None  # a short run at one draft token
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
    before = _run(first, build(0, first.batch_size), partial(progress, "plain decoding"))
    drafts = [_draft(work, make, progress) for work, make in zip(works, builds, strict=True)]
    engine = build(0, first.batch_size)
    after = _run(first, engine, partial(progress, "plain decoding again"))
    measured = []
    for work, drafted in zip(works, drafts, strict=True):
        lossless = drafted.lossless
        if lossless is None:
            lossless, engine = _check_equal(work, build, engine, before, drafted.run, progress)
        measured.append(
            Measured(_result(work, (before, after), drafted, lossless), drafted.run.outputs, before.outputs)
        )
    return measured


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


def _run(work: Evaluation, engine: Engine, progress: Callable[[int], None]) -> Run:
    _warm_up(work, engine)
    finished = 0
    progress(0)

    def on_finish(output: RequestOutput) -> None:
        nonlocal finished
        finished += 1
        progress(finished)

    return Run(engine.generate(work.prompts, list(work.params), on_finish), engine.statistics)


def _draft(work: Evaluation, build: BuildEngine, progress: Progress) -> Drafted:
    engine = build(work.num_draft_tokens, work.batch_size)
    run = _run(work, engine, partial(progress, work.method))
    best_k_by_batch_size = engine.best_num_draft_tokens()
    lossless = None
    if work.synthetic:
        lossless = unchecked_synthetic([_generation(output) for output in run.outputs])
    elif work.temperature > 0:
        lossless = _check_law(work, engine, run)
    del engine
    single = _calibrate(work, build) if work.num_draft_tokens > 1 and run.statistics.num_drafts else None
    return Drafted(run, best_k_by_batch_size, single, lossless)


def _warm_up(work: Evaluation, engine: Engine) -> None:
    few = min(len(work.prompts), work.batch_size)
    params = [replace(p, max_tokens=min(p.max_tokens, WARMUP_TOKENS)) for p in work.params[:few]]
    engine.generate(work.prompts[:few], params)
    engine.pool.forget()  # or the measured run would find these prompts computed
    engine.proposer.forget()
    engine.statistics = EngineStatistics()


def _calibrate(work: Evaluation, build: BuildEngine) -> EngineStatistics:
    """A short run at one draft token: the other end of the cost line."""
    few = min(len(work.prompts), work.batch_size)
    short = [replace(p, max_tokens=min(p.max_tokens, CALIBRATION_TOKENS)) for p in work.params[:few]]
    part = replace(work, prompts=work.prompts[:few], params=short)
    return _run(part, build(1, work.batch_size), lambda finished: None).statistics


def _check_law(work: Evaluation, engine: Engine, drafted: Run) -> Losslessness:
    generator = torch.Generator().manual_seed(work.seed)
    laws = partial(score_probs, engine, work.params[0])
    return check_sampled([_generation(o) for o in drafted.outputs], laws, generator, work.law_by_position)


def _check_equal(
    work: Evaluation, build: BuildEngine, engine: Engine, plain: Run, drafted: Run, progress: Progress
) -> tuple[Losslessness, Engine]:
    """The verdict, and the engine that serves the target after it."""
    first, second = ([_generation(o) for o in run.outputs] for run in (plain, drafted))
    differences = None
    verdict = check_greedy(first, second, partial(score_logits, engine, work.params[0]), work.dtype, differences)
    if work.dtype in (torch.float32, torch.float64) or not verdict.divergences:
        return verdict, engine
    del engine
    # low precision rounds by the shape of the batch; what plain decoding shows against itself is the measure, with as
    # many rows a step as verification has: every prompt k + 1 times
    copies = work.num_draft_tokens + 1
    repeated = replace(
        work,
        prompts=[prompt for prompt in work.prompts for _ in range(copies)],
        params=[params for params in work.params for _ in range(copies)],
        batch_size=work.batch_size * copies,
    )
    engine = build(0, repeated.batch_size)
    phase = f"plain decoding, batch {repeated.batch_size}"
    other = _run(repeated, engine, lambda finished: progress(phase, finished // copies))
    differences = count_differences(first, [_generation(o) for o in other.outputs[::copies]])
    scores = partial(score_logits, engine, work.params[0])
    return check_greedy(first, second, scores, work.dtype, differences), engine


def _generation(output: RequestOutput) -> Generation:
    return Generation(
        output.prompt_token_ids, output.token_ids, output.block_lengths, output.finish_reason is FinishReason.ERROR
    )


def _result(work: Evaluation, plain: Sequence[Run], drafted: Drafted, lossless: Losslessness) -> MethodResult:
    run, counts = drafted.run, drafted.run.statistics
    rates = [run.tokens_per_second for run in plain]
    baseline = sum(rates) / len(rates)
    decode_steps = sum(run.statistics.num_decode_steps for run in plain)
    decode_seconds = sum(run.statistics.decode_seconds for run in plain)
    decode_ms = 1000 * decode_seconds / decode_steps if decode_steps else None
    break_even = best_k = predicted = None
    acceptance = counts.acceptance_by_position
    if counts.draft_ms is not None and counts.verify_ms is not None and decode_ms and acceptance:
        break_even = (counts.draft_ms + counts.verify_ms) / decode_ms
        costs = step_costs(counts, drafted.single, decode_ms, len(acceptance))
        best_k, predicted = best_num_draft_tokens(acceptance, costs)
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
        best_k_by_batch_size=drafted.best_k_by_batch_size or None,
        noise_floor=noise_floor(rates),
        lossless=lossless,
    )
