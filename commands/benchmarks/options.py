"""Options and checks that several benchmarks share."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ..outputs import obstacle

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


class OutputError(ValueError):
    """The output file may not be written, or a number is too small."""


def check_out(out: Path, overwrite: bool, *, beside: Sequence[Path] = (), **at_least_one: int) -> None:
    """Raises OutputError for a count below one, or a record that cannot be written or is there already.

    `beside` are further files that the benchmark writes.
    """
    check_counts(at_least_one)
    if found := obstacle(out.absolute().parent):
        raise OutputError(f"--out must be in a folder that can be written, found {found}; choose another")
    if out.suffix != ".json":
        raise OutputError(f"--out must be a file whose name ends in .json, found {out}; choose another name")
    for path in (out, *beside):
        if os.path.lexists(path) and not path.is_file():
            raise OutputError(f"--out must be a file, found something else at {path}; choose another name")
        if path.exists() and not overwrite:
            raise OutputError(f"{path} is there already; pass --overwrite or another --out")


def check_counts(at_least_one: Mapping[str, int]) -> None:
    """Raises OutputError for an option's count below one."""
    for name, value in at_least_one.items():
        if value < 1:
            raise OutputError(f"--{name.replace('_', '-')} must be at least 1, found {value}")


def plain_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as JSON; how the record is written is none of them."""
    return {name: value for name, value in settings.items() if name not in ("out", "overwrite")}
