"""Options and checks that several benchmarks share."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ..outputs import OutputError, check_new_files

Prompts = Annotated[list[Path], typer.Option(help="JSONL files of prompts; one row of the table a file.")]
Limit = Annotated[int, typer.Option(help="Prompts a file.")]

TargetModel = Annotated[str | None, typer.Option("--model", help="The target: a folder or a hub id; or give --shape.")]
Shape = Annotated[
    str | None, typer.Option(help="A Qwen3 of random weights built on the device: tiny, 1b or 8b; or give --model.")
]
BatchSizes = Annotated[str, typer.Option(help="Requests decoded together, as 1,16,64; a row each.")]
Context = Annotated[int, typer.Option(help="Tokens each request has before it decodes.")]
Steps = Annotated[int, typer.Option(help="Engine steps a repeat; there are five.")]
Drafts = Annotated[int, typer.Option(help="Draft tokens a step.")]
OutFile = Annotated[Path, typer.Option(help="The JSON file to write.")]


class CountError(ValueError):
    """A number is too small."""


def check_out(out: Path, overwrite: bool, *, beside: Sequence[str] = (), **at_least_one: int) -> None:
    """Raises CountError for a count below one, OutputError for a record that cannot be written or is there already.

    `beside` are the suffixes of further files that the benchmark writes.
    """
    check_counts(at_least_one)
    if out.suffix != ".json":
        raise OutputError(f"--out must be a file whose name ends in .json, found {out}; choose another name")
    check_new_files(out, *map(out.with_suffix, beside), overwrite=overwrite)


def check_counts(at_least_one: Mapping[str, int]) -> None:
    """Raises CountError for an option's count below one."""
    for name, value in at_least_one.items():
        if value < 1:
            raise CountError(f"--{name.replace('_', '-')} must be at least 1, found {value}")


def plain_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as JSON; how the record is written is none of them."""
    return {name: value for name, value in settings.items() if name not in ("out", "overwrite")}
