"""Short trainings for tests, in this process or in others."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from spectrain.extract.shards import ShardSet
from spectrain.recipes.loader import load_recipe
from spectrain.train.assembly import assemble, new_head
from spectrain.train.data import RowReader, StepPlan, TrainingRows
from spectrain.train.launch import start
from spectrain.train.run import FitReport, FitRequest, fit
from spectrain.train.step import HeadWithObjective, Stepper
from spectrain.train.trainer import Progress

SMALL = (
    "head.layer_ids=[1,2,3]",
    "head.draft_vocab_size=64",
    "objective.steps=3",
    "optimizer.lr=3e-3",
    "data.sequence_length=32",
    "data.batch_size=3",
    "data.validation_share=0.2",
    "stopping.epochs=3",
    "stopping.eval_every=3",
    "stopping.save_every=2",
    "stopping.log_every=1",
)


@dataclass
class Recorder:
    """A listener that keeps what it hears."""

    notes: list[str] = field(default_factory=list)
    events: list[Progress] = field(default_factory=list)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def progress(self, progress: Progress) -> None:
        self.events.append(progress)

    def finished(self, report: FitReport) -> None:
        pass


def run(
    shards: Path | Sequence[Path],
    out: Path,
    *changes: str,
    resume: bool = False,
    overwrite: bool = False,
    listener: Recorder | None = None,
    base: Sequence[str] = SMALL,
    recipe: str = "eagle3",
    model: str | None = None,
) -> FitReport:
    """Trains in this process on the CPU."""
    folders = (shards,) if isinstance(shards, Path) else tuple(shards)
    request = FitRequest(
        recipe=load_recipe(recipe, [*base, *changes]),
        shards=folders,
        out=out,
        resume=resume,
        overwrite=overwrite,
        device="cpu",
        model=model,
        command=("spectrain",),
    )
    return fit(request, listener or Recorder())


def arguments(shards: Path, out: Path, *changes: str, base: Sequence[str] = SMALL) -> list[str]:
    """Command-line arguments of the same training."""
    sets = [part for change in (*base, *changes) for part in ("--set", change)]
    return ["fit", "--recipe", "eagle3", "--shards", str(shards), "--out", str(out), "--device", "cpu", *sets]


def launch(command: Sequence[str], processes: int = 1, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Runs `python -m spectrain` or, for several processes, torchrun over gloo; never raises for its exit code."""
    start = [sys.executable, "-m"]
    if processes > 1:
        start += ["torch.distributed.run", "--standalone", "--nproc_per_node", str(processes), "-m"]
    return subprocess.run(
        [*start, "spectrain", *command], capture_output=True, text=True, timeout=timeout, env=environment()
    )


def environment() -> dict[str, str]:
    """This process's environment, for children on the CPU with one thread each."""
    return {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}


def weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file."""
    return load_file(folder)


def make_stepper(shards: ShardSet, *changes: str) -> tuple[Stepper, TrainingRows]:
    """The stepper and rows `fit` would use, over all documents."""
    assembly = assemble(load_recipe("eagle3", [*SMALL, *changes]), shards)
    accelerator = start("cpu")
    head = new_head(assembly, shards)
    module = HeadWithObjective(head, assembly.objective, None)
    stepper = Stepper(accelerator, module, shards.target_tensors(), assembly.optimizer, assembly.data.micro_batch_size)
    reader = RowReader(shards, assembly.config.layer_ids, True, assembly.data.sequence_length)
    everything = torch.arange(shards.num_documents)
    rank, world = accelerator.process_index, accelerator.num_processes
    return stepper, TrainingRows(reader, everything, assembly.data, rank, world)


def gradients(shards: ShardSet, *changes: str) -> dict[str, Tensor]:
    """Summed gradients of the first optimizer step, and its loss over all processes under `loss`."""
    stepper, rows = make_stepper(shards, *changes)
    stepper._update = lambda: torch.zeros(())
    stream = rows.stream(0, 1)
    plan = next(stream)
    assert isinstance(plan, StepPlan)
    result = stepper.run(plan, stream, 1e-3)
    grads = {name: p.grad for name, p in stepper.module.head.named_parameters() if p.grad is not None}
    return {**grads, "loss": stepper.sum(result.loss)}
