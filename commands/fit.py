"""`spectrain fit`: a trained draft head from shards."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..recipes.loader import load_recipe
from .outputs import check_folders

if TYPE_CHECKING:
    from ..train.run import FitReport
    from ..train.trainer import Progress


class FitInputError(ValueError):
    """An option that `fit` needs is missing."""


def fit(
    recipe: Annotated[str, typer.Option(help="Name of a recipe, or the path of a YAML file.")] = "eagle3",
    shards: Annotated[list[Path] | None, typer.Option(help="Shard folders written by extract.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Folder or hub id of the model a head starts from, for recipes that start from one."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the head; the run is kept in its run/.")] = None,
    start_from: Annotated[
        Path | None, typer.Option(help="Head folder to go on from: its weights and its draft vocabulary.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override, such as optimizer.lr=2e-4.")
    ] = None,
    show: Annotated[
        bool, typer.Option("--show", help="Print the resolved recipe and where each value is from.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out, bit for bit.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete the run in --out first.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="Of the computation: auto, float32 or bfloat16. Masters stay float32.")
    ] = "auto",
    allow_package: Annotated[
        list[str] | None, typer.Option(help="Package outside spectrain whose classes a recipe may name.")
    ] = None,
) -> None:
    """Train a draft head on shards."""
    resolved = load_recipe(recipe, overrides or [])
    if show:
        print(resolved.to_yaml(), end="")
        return
    if not shards:
        raise FitInputError("fit needs at least one shard folder, found none; pass --shards DIR")
    if out is None:
        raise FitInputError("fit needs a folder for the head, found none; pass --out DIR")
    if os.environ.get("RANK", "0") == "0":  # the others may lie on machines that see another disk
        check_folders(out, out / "run")
    from ..train.run import FitRequest
    from ..train.run import fit as run_fit

    request = FitRequest(
        recipe=resolved,
        shards=tuple(shards),
        out=out,
        start_from=start_from,
        resume=resume,
        overwrite=overwrite,
        device=device,
        dtype=dtype,
        allowed_packages=tuple(allow_package or ()),
        model=model,
        command=tuple(["spectrain", *sys.argv[1:]]),
    )
    with Screen() as screen:
        run_fit(request, screen)


class Screen:
    """A progress bar and lines above it, on stderr; the result on stdout."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = Console(stderr=True, soft_wrap=True, highlight=False)
        self._bar = Progress(
            TextColumn("fit"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
            console=self._console,
        )
        self._task = self._bar.add_task("fit", total=None, figures="")
        self._started = False

    def __enter__(self) -> "Screen":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._started:
            self._bar.stop()

    def note(self, text: str) -> None:
        """One line about a decision."""
        self._console.print(text, markup=False)

    def progress(self, progress: "Progress") -> None:
        """Moves the bar; an evaluation gets a line of its own."""
        if not self._started:
            self._bar.start()
            self._started = True
        held_out = progress.values.get("validation_acceptance_length")
        if held_out is not None:
            self.note(f"step {progress.step}: predicted acceptance length {held_out:.3f} on held-out documents")
            return
        values = progress.values
        figures = (
            f"loss {values['loss']:.4f} · acceptance length {values['acceptance_length']:.2f} · "
            f"{values['tokens_per_second']:,.0f} tokens/s"
        )
        self._bar.update(self._task, completed=progress.step, total=progress.total_steps, figures=figures)

    def finished(self, report: "FitReport") -> None:
        """Says what was made."""
        if self._started:
            self._bar.stop()
            self._started = False
        result = report.result
        for evaluation, label in ((result.best, "best"), (result.last, "last")):
            if evaluation is not None:
                length = evaluation.acceptance_length
                print(f"predicted acceptance length {length:.3f} ({label}, step {evaluation.step}, held-out documents)")
        if result.skipped:
            print(f"{result.skipped} batches held no supervised row and were passed over")
        print(f"draft vocabulary covers {report.coverage:.2%} of the supervised tokens")
        ending = ", stopped early" if result.stopped_early else ""
        print(f"head of step {report.exported_step} of {result.step}{ending} written to {report.out}")
        print(f"elsewhere: vLLM, {report.elsewhere.vllm}; SGLang, {report.elsewhere.sglang}")
