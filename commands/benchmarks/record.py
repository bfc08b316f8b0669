"""One benchmark's record: rows that passed their checks, written as JSON and shown as a table.

No figure without a passing check: a row enters together with its checks, and the first that fails ends the run.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..devices import environment

if TYPE_CHECKING:
    from rich.console import Console

CPU_NOTE = "CPU figures: they show that the benchmark runs, and say nothing of a GPU"


class BenchError(ValueError):
    """Nothing may be measured: a check failed, or an option does not fit."""


class Check(NamedTuple):
    """A comparison that stands behind a figure."""

    name: str
    passed: bool
    found: str  # what was compared and seen, in words


@dataclass
class Record:
    """The rows of one run; `settings` are what reproduces it."""

    benchmark: str
    device: torch.device
    settings: Mapping[str, Any]
    path: Path | None = None  # written after each row, so that a run cut short keeps what had passed
    rows: list[dict[str, Any]] = field(default_factory=list)
    facts: Mapping[str, Any] = field(default_factory=dict)  # what belongs to the run and to no row
    refused: str | None = None
    begun: float = field(default_factory=time.perf_counter)

    def add(self, row: Mapping[str, Any], checks: Sequence[Check]) -> None:
        """Keeps a row; raises BenchError, and keeps nothing, unless it has checks and all of them passed."""
        assert checks, "a figure needs a check"
        for check in checks:
            self.require(check)
        self.rows.append({**row, "checks": {check.name: check.found for check in checks}})
        self.write()

    def require(self, check: Check) -> None:
        """Raises BenchError where a check failed, before anything is timed."""
        if not check.passed:
            self.refused = f"{check.name}: {check.found}"
            raise BenchError(f"no figure without a passing check: {self.refused}")

    def as_json(self) -> dict[str, Any]:
        """JSON-ready: what was run, where and when, and the rows."""
        return {
            "benchmark": self.benchmark,
            "date": time.strftime("%Y-%m-%d"),
            "environment": environment(self.device),
            "note": CPU_NOTE if self.device.type == "cpu" else None,
            "settings": dict(self.settings),
            "seconds": round(time.perf_counter() - self.begun, 1),
            "refused": self.refused,
            **self.facts,
            "results": self.rows,
        }

    def write(self) -> None:
        """Writes the rows that passed, and what was refused; nothing where there is no row or no path."""
        if self.path is None or not self.rows:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.as_json(), indent=2, allow_nan=False) + "\n")

    def show(self, text: str | None = None) -> None:
        """Prints `text`, else a table for each kind of row: a line a figure, a column a row; then what was checked."""
        from rich.console import Console

        console = Console(highlight=False)
        if text is None:
            self._print_tables(console)
        else:
            print(text)
        checked = dict.fromkeys(name for row in self.rows for name in row["checks"])
        console.print(f"checked: {'; '.join(checked)}", markup=False)
        if self.device.type == "cpu":
            console.print(CPU_NOTE, markup=False)

    def _print_tables(self, console: "Console") -> None:
        from rich.table import Table

        groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for row in self.rows:
            groups.setdefault(tuple(row), []).append(row)
        for names, rows in groups.items():
            table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
            for name in names:
                if name != "checks":
                    table.add_row(name.replace("_", " "), *(_shown(row[name]) for row in rows))
            console.print(table, markup=False)


def finish(
    record: Record, measure: Callable[[Record], None], text: Callable[[Sequence[dict[str, Any]]], str] | None = None
) -> None:
    """Measures; the rows that passed are shown, by `text` if given, and written, also where a later one was refused."""
    try:
        measure(record)
    finally:
        if record.rows:
            record.write()
            record.show(None if text is None else text(record.rows))
            print(f"record: {record.path}")


def _shown(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)


def numbers(text: str, option: str, least: int = 1) -> list[int]:
    """The whole numbers of `1,16,64`; raises BenchError for anything else or below `least`."""
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) >= least for part in parts):
        raise BenchError(f"{option} takes whole numbers of at least {least} between commas, found {text!r}")
    return [int(part) for part in parts]
