"""Progress bars of long commands."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..infer.evaluate import Progress


@contextmanager
def progress_bars(num_prompts: int) -> "Iterator[Progress]":
    """A bar for each phase that reports; gone when the block ends."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True) as bars:
        tasks: dict[str, Any] = {}

        def report(phase: str, finished: int) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(phase, total=num_prompts)
            bars.update(tasks[phase], completed=finished)

        yield report
