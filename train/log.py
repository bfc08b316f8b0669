"""What a run writes for people: JSONL metrics, TensorBoard events where it is installed, two plots."""

import importlib.util
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"


class MetricsLog:
    """Appends one JSON object a line; a resumed run continues as if it had never stopped."""

    def __init__(self, folder: Path, resumed_step: int) -> None:
        """Keeps lines up to `resumed_step` of an earlier run."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / METRICS_FILE
        kept = [line for line in read_metrics(folder) if line["step"] <= resumed_step]
        self.path.write_text("".join(json.dumps(line) + "\n" for line in kept))
        self._board = _board(folder / "tensorboard", resumed_step)

    def write(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Records `values` under `kind` (train or validation)."""
        line = {"kind": kind, "step": step, **{name: _json_number(value) for name, value in values.items()}}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        if self._board is not None:
            self._board.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Every whole line of a run's metrics; a last line cut by a kill is left out."""
    path = folder / METRICS_FILE
    if not path.is_file():
        return []
    lines = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            break
    return lines


def plot(folder: Path) -> list[Path]:
    """Draws loss and predicted acceptance length over steps; returns the files written."""
    from matplotlib.figure import Figure

    lines = read_metrics(folder)
    written = []
    for name, label in (("loss", "loss"), ("acceptance_length", "predicted acceptance length")):
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot()
        for kind in ("train", "validation"):
            points = [
                (line["step"], line[name]) for line in lines if line["kind"] == kind and line.get(name) is not None
            ]
            _draw(axes, points, kind)
        axes.set_xlabel("optimizer step")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=120)
        written.append(path)
    return written


def _draw(axes: Any, points: Sequence[tuple[int, float]], label: str) -> None:
    if points:
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, label=label, marker="o" if len(points) < 30 else None, markersize=3)


def _board(folder: Path, resumed_step: int) -> Any:
    if importlib.util.find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=resumed_step + 1 if resumed_step else None)


def _json_number(value: float) -> float | None:
    return value if math.isfinite(value) else None
