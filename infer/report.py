"""The record of one measurement: `report.json`, and the table in the terminal. Definitions: `statistics.py`."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .losslessness import Losslessness

DEFINITIONS = {
    "acceptance_length": "1 + accepted draft tokens / drafts, over steps that drafted, before stop rules cut a block",
    "acceptance_length_kept": "the same after stop rules",
    "cached_prompt_tokens": "prompt tokens found in the prefix cache, which every measured run starts empty",
    "tokens_per_step": "output tokens of a request / target forwards that sampled for it; plain decoding gives 1",
    "acceptance_by_position": "unconditional: drafts accepted up to this position / all drafts",
    "conditional_acceptance_by_position": "accepted here / drafts that reached this position",
    "speedup": "tokens_per_second / baseline_tokens_per_second, same engine, prompts, batch size and run",
    "break_even_acceptance_length": "(draft_ms + verify_ms) / decode_ms: the tokens a step must yield to pay",
    "best_k": "draft tokens with the highest predicted speed-up, up to the k measured; 0: drafting does not pay",
    "best_k_by_batch_size": "the same by requests decoded together; of others than the run's, steps without contexts",
    "noise_floor": "(fastest - slowest) / mean of repeated plain runs: smaller differences mean nothing",
}


LABEL_WIDTH, COLUMN_WIDTH = 24, 28  # of the terminal table


@dataclass(frozen=True, kw_only=True)
class MethodResult:
    """One method on one set of prompts; figures without a drafting step are None."""

    method: str
    prompt_set: str
    num_draft_tokens: int
    temperature: float
    batch_size: int
    num_prompts: int
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int
    acceptance_length: float | None
    acceptance_length_kept: float | None
    tokens_per_step: float | None
    acceptance_by_position: list[float] | None
    conditional_acceptance_by_position: list[float | None] | None
    draft_acceptance_rate: float | None
    tokens_per_second: float
    baseline_tokens_per_second: float
    speedup: float
    draft_ms: float | None
    verify_ms: float | None
    decode_ms: float | None
    break_even_acceptance_length: float | None
    best_k: int | None
    predicted_speedup_by_k: list[float] | None  # k = 1, 2, ...
    noise_floor: float
    lossless: Losslessness
    best_k_by_batch_size: dict[int, int] | None = None


def report_json(
    results: Sequence[MethodResult], settings: Mapping[str, Any], environment: Mapping[str, Any]
) -> dict[str, Any]:
    """`report.json`: one result at the top level, several as a list under `results`."""
    records = [dataclasses.asdict(result) for result in results]
    body: dict[str, Any] = records[0] if len(records) == 1 else {"results": records}
    return {**body, "settings": dict(settings), "environment": dict(environment), "definitions": DEFINITIONS}


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    """Writes a report; NaN and infinity, which are no JSON, are refused."""
    path.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")


def verdict(result: MethodResult) -> str:
    """The losslessness verdict in a few words."""
    check = result.lossless
    if check.mode == "synthetic":
        return f"not lossless, not checked: {check.reason}"
    if check.mode == "greedy":
        facts = f"{check.equal}/{check.checked} prompts equal"
        if check.excused:
            facts += f", {check.excused} differ by rounding"
    else:
        p = "none" if check.p_value is None else f"{check.p_value:.2g}"
        facts = f"KS p = {p}, n = {check.num_tokens}"
    word = "passed" if check.passed else "FAILED" if check.tested else "not tested"
    return f"{word}: {facts}" + (f"; {check.reason}" if check.reason else "")


def advice(result: MethodResult) -> str:
    """Whether drafting pays here, plainly."""
    if result.acceptance_length is None or result.break_even_acceptance_length is None or result.best_k is None:
        return "Plain decoding: nothing was drafted, so there is no speed-up to judge."
    gained = (
        f"{result.acceptance_length:.2f} tokens a step against the {result.break_even_acceptance_length:.2f} that a "
        f"step of {result.num_draft_tokens} draft tokens costs here"
    )
    if result.best_k == 0:
        return f"Drafting does not pay on this machine at batch size {result.batch_size}: {gained}."
    if result.lossless.mode == "synthetic":
        gained += ", at acceptance rates that were given and not measured"
    pays = "pays" if result.speedup > 1 + result.noise_floor else "does not show beyond noise"
    hint = "" if result.best_k == result.num_draft_tokens else f" Try --num-draft-tokens {result.best_k}."
    return f"Drafting {pays} at batch size {result.batch_size}: {gained}.{hint}"


def table_rows(result: MethodResult) -> list[tuple[str, str]]:
    """Label and value of every line people look for, shared by the terminal table and the page."""
    drafts = f"{result.num_draft_tokens}" if result.acceptance_length is not None else "none"
    rows = [
        ("prompts", f"{result.num_prompts} ({result.prompt_set}), batch {result.batch_size}"),
        ("temperature", f"{result.temperature:g}"),
        ("draft tokens", drafts),
        ("prompt tokens", f"{result.prompt_tokens:,}, {result.cached_prompt_tokens:,} of them cached"),
        ("output tokens", f"{result.output_tokens:,}"),
        ("acceptance length", _length(result.acceptance_length)),
        ("  after stops", _number(result.acceptance_length_kept)),
        ("tokens per step", _number(result.tokens_per_step)),
        ("acceptance by position", _rates(result.acceptance_by_position)),
        ("  given the one before", _rates(result.conditional_acceptance_by_position)),
        ("draft acceptance rate", _percent(result.draft_acceptance_rate)),
        ("tokens/s", f"{result.tokens_per_second:.1f}, plain {result.baseline_tokens_per_second:.1f}"),
        ("speed-up", f"{result.speedup:.2f}x, noise {100 * result.noise_floor:.1f} %"),
        ("draft + verify, plain", f"{_ms(result.draft_ms)} + {_ms(result.verify_ms)}, {_ms(result.decode_ms)} a step"),
        ("break-even length", _number(result.break_even_acceptance_length)),
        ("best k", "none" if result.best_k is None else str(result.best_k)),
        ("  by batch size", _pairs(result.best_k_by_batch_size)),
        ("lossless", verdict(result)),
    ]
    return rows


def print_table(results: Sequence[MethodResult]) -> None:
    """The report in the terminal: a column a result, as many abreast as there is room for; a line of advice each."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    together = max(1, (console.width - LABEL_WIDTH) // COLUMN_WIDTH)
    for begin in range(0, len(results), together):
        some = results[begin : begin + together]
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("")
        for result in some:
            table.add_column(result.method, overflow="fold")
        for lines in zip(*(table_rows(result) for result in some), strict=True):
            table.add_row(lines[0][0], *(value for _, value in lines))
        console.print(table, markup=False)
    for result in results:
        of = f"{result.method}: " if len(results) > 1 else ""
        console.print(of + advice(result), markup=False)


def _length(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}  (1 + accepted / drafts)"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "none" if value is None else f"{100 * value:.1f} %"


def _ms(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f} ms"


def _pairs(values: Mapping[int, int] | None) -> str:
    return "none" if not values else ", ".join(f"{batch}: {k}" for batch, k in values.items())


def _rates(values: Sequence[float | None] | None) -> str:
    return "none" if not values else " ".join("-" if v is None else f"{v:.3f}" for v in values)
