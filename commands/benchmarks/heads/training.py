"""Training one head of the table: `fit`, on the benchmark's rows and budget, and what there is to tell of it."""

import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ....extract.shards import ShardSet
from ....heads.base import DraftHead
from ....heads.folder import load_head, read_record
from ....recipes.loader import Recipe, build
from ....train.assembly import Assembly, assemble, first_difference, own_packages
from ....train.budget import Budget, steps_for_tokens
from ....train.log import read_metrics
from ....train.run import FitRequest, fit, without_paths
from ....train.settings import DataSettings
from ...devices import device_of, environment
from ...fit import Screen
from ..record import BenchError
from .plan import EVALUATIONS, Plan, Run
from .work import Work, weights_digest


def budget_of(plan: Plan, run: Run, shards: ShardSet) -> Budget:
    """How long a run trains."""
    data = build(DataSettings, run.head.resolved(plan, run.seed).section("data"), "data")
    return steps_for_tokens(shards, data, plan.token_budget)


def recipe_of(plan: Plan, run: Run, budget: Budget) -> Recipe:
    """The recipe of a run, down to its last step."""
    every = -(-budget.steps // EVALUATIONS)
    return run.head.resolved(
        plan,
        run.seed,
        f"stopping.epochs={budget.epochs}",
        f"stopping.max_steps={budget.steps}",
        f"stopping.eval_every={every}",
        f"stopping.save_every={every}",
        f"stopping.log_every={min(10, -(-budget.steps // 10))}",
    )


def assembled(plan: Plan, run: Run, shards: ShardSet, work: Work) -> Assembly:
    """The parts of a run, checked before anything starts.

    Where it starts from a head that is not made yet, the target stands in for that.
    """
    return assemble(
        recipe_of(plan, run, budget_of(plan, run, shards)), shards, plan.packages, _model(plan, run, work, plan.model)
    )


def check_trained(plan: Plan, run: Run, work: Work, shards: ShardSet, loads_left: int) -> None:
    """Raises BenchError where a finished run is not the one that is asked for, or its head is needed and gone."""
    record = work.trained(run)
    assert record is not None
    asked = json.loads(json.dumps(recipe_of(plan, run, budget_of(plan, run, shards)).to_dict()))
    difference = first_difference(record["recipe"], asked)
    if difference is not None:
        key, before, now = difference
        raise BenchError(
            f"{run.name} was trained with {key} = {before}, this call says {now}; give the same --set, another label "
            f"or another --work"
        )
    folder = work.head_folder(run)
    if not loads_left:
        return
    found = weights_digest(folder) if (folder / "model.safetensors").is_file() else "none"
    if found != record["weights"]:
        raise BenchError(
            f"{folder} must hold the head that was trained (weights {record['weights']}), found {found}, and "
            f"{loads_left} loads are to be measured; put it back, or delete trained/{run.name}.json and "
            f"measured/{run.name} to train and measure it again"
        )


def train(plan: Plan, run: Run, work: Work, shards: ShardSet) -> dict[str, Any]:
    """Trains a run, or ends one that was interrupted, and records what it took."""
    budget = budget_of(plan, run, shards)
    recipe = recipe_of(plan, run, budget)
    folder = work.head_folder(run)
    request = FitRequest(
        recipe=recipe,
        shards=plan.shards,
        out=folder,
        resume=(folder / "run").is_dir(),
        device=plan.device,
        dtype=plan.dtype,
        allowed_packages=plan.packages,
        model=_model(plan, run, work, None),
        command=("spectrain", *sys.argv[1:]),
    )
    # compiled attention is kept for a few shapes only, and those of the head before are of no use
    torch.compiler.reset()
    memory = PeakMemory(device_of(plan.device))
    begun = time.perf_counter()
    with Screen() as screen:
        report = fit(request, screen)
    seconds = time.perf_counter() - begun
    head = load_head(folder, allowed_packages=(*plan.packages, *own_packages(recipe))).head
    validation = read_record(folder)["metrics"]["validation"]
    start = plan.starts_from(run)
    record = {
        "head": run.head.label,
        "seed": run.seed,
        "recipe": recipe.to_dict(),
        "weights": weights_digest(folder),
        "starts_from": None if start is None else start.name,
        "parameters": parameters_of(head),
        "steps": report.result.step,
        "exported_step": report.exported_step,
        "tokens": budget.tokens,
        "epochs": budget.epochs,
        "tokens_per_second": training_speed(folder / "run"),
        "peak_memory_bytes": memory.peak(),
        "predicted_acceptance_length": None if validation is None else validation["acceptance_length"],
        "coverage": report.coverage,
        "seconds": round(seconds, 1),
        "date": time.strftime("%Y-%m-%d"),
        "environment": environment(memory.device),
        "command": without_paths(request.command),
    }
    record = json.loads(json.dumps(record))
    work.save_trained(run, record)
    return record


class PeakMemory:
    """Bytes that tensors took on the GPU from now on, beyond those that were there before; None on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._before = 0
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()

    def peak(self) -> int | None:
        """The most so far."""
        return None if self.device.type == "cpu" else torch.cuda.max_memory_allocated() - self._before


def parameters_of(head: DraftHead) -> dict[str, int]:
    """How many numbers are trained, and how many the head's folder holds."""
    return {
        "trained": sum(p.numel() for p in head.parameters() if p.requires_grad),
        "stored": sum(t.numel() for t in head.state_dict().values()),
    }


def training_speed(run_folder: Path) -> float | None:
    """Tokens/s between log steps: the median, so that starting, evaluating and saving do not count."""
    rates = [line["tokens_per_second"] for line in read_metrics(run_folder) if line["kind"] == "train"]
    return statistics.median(rates) if rates else None


def _model(plan: Plan, run: Run, work: Work, stand_in: str | None) -> str | None:
    if not run.head.needs_model:
        return None
    start = plan.starts_from(run)
    if start is None:
        return plan.model
    folder = work.head_folder(start)
    return str(folder) if stand_in is None or work.trained(start) is not None else stand_in
