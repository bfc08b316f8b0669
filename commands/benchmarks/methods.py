"""Drafting methods beside plain decoding, by prompt set and batch size: a run of `eval` for each batch size.

Checked: what `eval` checks. A method whose output failed makes no row, and the command ends with code 2.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .record import Check, Record

if TYPE_CHECKING:
    from ...infer.report import MethodResult


class Work(NamedTuple):
    """What to run: `decode(batch_size)` gives the results of one `eval`."""

    batch_sizes: Sequence[int]
    decode: "Callable[[int], Sequence[MethodResult]]"


def run(record: Record, work: Work) -> None:
    """Adds a row a method, prompt set and batch size; raises BenchError after the others where one was not lossless."""
    failed: list[Check] = []
    for batch_size in work.batch_sizes:
        for result in work.decode(batch_size):
            check = check_of(result)
            if check.passed:
                record.add(row_of(result), [check])
            else:
                failed.append(check)
        write_markdown(record)
    for check in failed:
        record.require(check)


def check_of(result: "MethodResult") -> Check:
    """Whether a method left the output as it was."""
    from ...infer.report import verdict

    about = f"{result.method} on {result.prompt_set} at batch {result.batch_size}"
    return Check(about, result.lossless.passed, verdict(result))


def row_of(result: "MethodResult") -> dict[str, Any]:
    """One line of the table."""
    return {
        "method": result.method,
        "prompt_set": result.prompt_set,
        "batch_size": result.batch_size,
        "num_draft_tokens": result.num_draft_tokens,
        "temperature": result.temperature,
        "num_prompts": result.num_prompts,
        "acceptance_length": result.acceptance_length,
        "tokens_per_step": result.tokens_per_step,
        "draft_ms": result.draft_ms,
        "tokens_per_second": result.tokens_per_second,
        "plain_tokens_per_second": result.baseline_tokens_per_second,
        "speedup": result.speedup,
        "noise_floor": result.noise_floor,
    }


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """A table a prompt set: a line a method, a column a batch size, to be pasted into a page."""
    sizes = list(dict.fromkeys(row["batch_size"] for row in rows))
    lines: list[str] = []
    for name in dict.fromkeys(row["prompt_set"] for row in rows):
        mine = [row for row in rows if row["prompt_set"] == name]
        noise = {size: max((r["noise_floor"] for r in mine if r["batch_size"] == size), default=0.0) for size in sizes}
        lines += [f"### {name}", "", "| method | k | " + " | ".join(f"batch {size}" for size in sizes) + " |"]
        lines.append("|" + "---|" * (len(sizes) + 2))
        for method in dict.fromkeys(row["method"] for row in mine):
            cells = {row["batch_size"]: row for row in mine if row["method"] == method}
            k = next(iter(cells.values()))["num_draft_tokens"]
            shown = " | ".join(_cell(cells.get(size)) for size in sizes)
            lines.append(f"| {method} | {k} | {shown} |")
        floor = " | ".join(f"{noise[size]:.1%}" for size in sizes)
        lines += [f"| noise of plain | | {floor} |", ""]
    return "\n".join(lines)


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    length = "nothing drafted" if row["acceptance_length"] is None else f"{row['acceptance_length']:.2f}"
    return f"{row['speedup']:.2f} x ({length}; {row['tokens_per_step']:.2f} a step)"


def write_markdown(record: Record) -> None:
    """Writes the tables of what has passed beside the record."""
    if record.path is None or not record.rows:
        return
    facts = record.as_json()
    where = f"{facts['environment']['hardware']}, {facts['date']}"
    head = (
        f"{where}; `x`: tokens/s over plain decoding of the same run; in brackets: the acceptance length of steps that "
        f"drafted, and tokens a step over all.\n\n"
    )
    record.path.with_suffix(".md").write_text(head + markdown(record.rows), encoding="utf-8")
