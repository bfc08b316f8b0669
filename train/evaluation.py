"""The held-out estimate that training is steered by: predicted acceptance length, not loss."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from . import checkpoint
from .data import RowReader, pack_rows
from .objectives.base import predicted_acceptance_length
from .settings import DataSettings
from .step import Metrics, Stepper, add_metrics, to_device


@dataclass(frozen=True)
class Evaluation:
    """One pass over the validation documents."""

    step: int
    acceptance_length: float
    loss: float
    metrics: dict[str, float]


class Validator:
    """Evaluates on documents split over processes; the head is back in its mode afterwards."""

    def __init__(self, reader: RowReader, documents: Tensor, settings: DataSettings, rank: int, world: int) -> None:
        self.reader, self.settings = reader, settings
        self.rows = pack_rows(documents, reader.lengths, settings.sequence_length, settings.seed)[rank::world]

    def run(self, stepper: Stepper, step: int) -> Evaluation | None:
        """None where no validation document has a supervised row."""
        module, device = stepper.module, stepper.accelerator.device
        objective, size = module.objective, self.settings.micro_batch_size
        ones = torch.ones(objective.num_terms, device=device)
        totals: Metrics = {}
        was_training = module.training
        module.eval()
        try:
            with torch.no_grad():
                # one group of padding where a process has no rows, so that all hold the same metrics
                for start in range(0, max(1, len(self.rows)), size):
                    group = self.rows[start : start + size]
                    batch = self.reader.fill(self.reader.ids(group), group)
                    add_metrics(
                        totals, module(stepper.target, to_device(batch._replace(denominators=ones), device)).metrics
                    )
        finally:
            module.train(was_training)
        summed = sum_metrics(stepper, totals)
        if not any(float(rows) for _, rows in summed.values()):
            return None
        means = mean_metrics(summed)
        losses = [value for name, value in means.items() if name.startswith("loss_")]
        return Evaluation(step, predicted_acceptance_length(summed), sum(losses) / max(1, len(losses)), means)


class EvaluationLog:
    """All evaluations of a run; the best has the highest finite acceptance length, then the lowest loss."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: list[Evaluation] = []

    def restore(self, step: int) -> None:
        """Reads what was recorded up to `step`."""
        if self.path.is_file():
            stored = json.loads(self.path.read_text())["evaluations"]
            self.entries = [Evaluation(**entry) for entry in stored if entry["step"] <= step]

    def add(self, evaluation: Evaluation) -> bool:
        """Records one; true where it is the new best."""
        self.entries.append(evaluation)
        return self.best is evaluation

    def write(self) -> None:
        best = self.best
        checkpoint.write_json(
            self.path,
            {
                "best_step": None if best is None else best.step,
                "evaluations": [asdict(entry) for entry in self.entries],
            },
        )

    @property
    def best(self) -> Evaluation | None:
        finite = [e for e in self.entries if _finite(e)]
        return max(finite, key=lambda e: (e.acceptance_length, -e.loss)) if finite else None

    def since_best(self) -> int:
        """Evaluations made after the best one."""
        best = self.best
        return 0 if best is None else sum(entry.step > best.step for entry in self.entries)


def sum_metrics(stepper: Stepper, metrics: Metrics) -> Metrics:
    """Numerators and denominators over all processes, in one exchange; every process must hold the same names."""
    if not metrics:
        return {}
    names = sorted(metrics)
    table = stepper.sum(torch.stack([torch.stack(metrics[name]).float() for name in names])).cpu()
    return {name: (row[0], row[1]) for name, row in zip(names, table, strict=True)}


def mean_metrics(metrics: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Numerator over denominator; a metric nobody counted is left out."""
    return {name: float(top) / float(bottom) for name, (top, bottom) in metrics.items() if float(bottom) > 0}


def _finite(evaluation: Evaluation) -> bool:
    values = torch.tensor([evaluation.acceptance_length, evaluation.loss])
    return bool(torch.isfinite(values).all())
