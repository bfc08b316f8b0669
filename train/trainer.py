"""The training loop: steps, evaluations, checkpoints, stopping. It knows no method and no file format of heads."""

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..heads.base import DraftHead
from . import checkpoint
from .batch import TrainBatch
from .checkpoint import CheckpointFolder, RunState
from .data import StepPlan, TrainingRows
from .evaluation import Evaluation, EvaluationLog, Validator, mean_metrics, sum_metrics
from .launch import run_on_main
from .log import MetricsLog
from .objectives.base import predicted_acceptance_length
from .prefetch import prefetch
from .schedule import learning_rate, warmup_steps
from .settings import OptimizerSettings, StoppingSettings
from .step import Metrics, NonFiniteError, Stepper, StepResult, add_metrics

_PREFETCHED = 3


class TrainingError(ValueError):
    """Training cannot go on; the last whole checkpoint is kept."""


class FrozenParameterWarning(UserWarning):
    """A norm weight did not move at all during warm-up: the usual sign of low-precision masters."""


class Progress(NamedTuple):
    """What a listener is told at every log step."""

    step: int
    total_steps: int
    values: dict[str, float]


@dataclass(frozen=True)
class TrainResult:
    """How a run ended; `best` is None where there was nothing to validate on."""

    step: int
    skipped: int
    best: Evaluation | None
    last: Evaluation | None
    stopped_early: bool


class Trainer:
    """Runs one head's training from any position to the end."""

    def __init__(
        self,
        *,
        stepper: Stepper,
        rows: TrainingRows,
        validator: Validator | None,
        optimizer: OptimizerSettings,
        stopping: StoppingSettings,
        run_folder: Path,
        state: RunState,
        listen: Callable[[Progress], None],
    ) -> None:
        self.stepper, self.rows, self.validator = stepper, rows, validator
        self.optimizer, self.stopping, self.state = optimizer, stopping, state
        self.checkpoints = CheckpointFolder(run_folder / "checkpoints")
        self.evaluations = EvaluationLog(run_folder / "evaluations.json")
        self.is_main = stepper.accelerator.is_main_process
        self.run_folder, self.listen = run_folder, listen
        self.log: MetricsLog | None = None
        self.start_norms = norm_weights(stepper.module.head)
        self.window = _Window()
        self.saved_step = state.step

    def check_rows(self) -> None:
        """Raises TrainingError where no batch of the run holds a supervised row; writes nothing."""
        end = self._end()
        if self.state.step > 0 or any(self.stepper.count(self.rows.plan_at(at)).sum() > 0 for at in range(end)):
            return
        raise TrainingError(
            f"expected supervised rows to train on, found none in {end} batches: answers are masked out, shorter than "
            f"two tokens or outside the draft vocabulary; look at the shards with `spectrain inspect`"
        )

    def train(self) -> TrainResult:
        """Trains to the end; raises TrainingError when loss or gradient become non-finite."""
        self.log = MetricsLog(self.run_folder, self.state.step) if self.is_main else None
        self.evaluations.restore(self.state.step)
        resumed = self.state.step > 0
        if resumed and self.state.step % self.stopping.eval_every == 0 and self._evaluated() is None:
            self._evaluate()
        stream = prefetch(self.rows.stream(self.state.position, self._end()), _PREFETCHED)
        with contextlib.closing(stream):
            while self.state.step < self.state.total_steps and not self._out_of_patience():
                plan = next(stream, None)
                if plan is None:
                    break
                assert isinstance(plan, StepPlan)
                if self._step(plan, stream):
                    self._after_step()
        if self.saved_step != self.state.step:
            self._save()
        last = self._evaluated() or self._evaluate()
        # a run killed between its last evaluation and the pruning after it comes here with both behind it
        self._prune()
        if self.log is not None:
            self.log.close()
        stopped_early = self._out_of_patience() and self.state.step < self.state.total_steps
        return TrainResult(self.state.step, self.state.skipped, self.evaluations.best, last, stopped_early)

    def _after_step(self) -> None:
        step, stopping = self.state.step, self.stopping
        if step % stopping.eval_every == 0:
            # saved first, so that a failing evaluation loses nothing
            self._save()
            self._evaluate()
        elif step % stopping.save_every == 0:
            self._save()

    def _end(self) -> int:
        return self.rows.steps_per_epoch * self.stopping.epochs

    def _step(self, plan: StepPlan, stream: Iterator[Any]) -> bool:
        """Consumes one batch; false where it held nothing to learn from."""
        state, settings = self.state, self.optimizer
        rate = learning_rate(settings, state.step, state.total_steps)
        # modules with dropout read the global generator; seeding it by position makes resuming exact
        torch.manual_seed(self.rows.settings.seed + plan.position * 65_537 + self.rows.rank)
        batches: Iterator[TrainBatch] = stream
        try:
            result = self.stepper.run(plan, batches, rate)
        except NonFiniteError as error:
            newest = self.checkpoints.newest()
            kept = "no checkpoint was written yet" if newest is None else f"the last good one is {newest.folder}"
            raise TrainingError(
                f"{error} at optimizer step {state.step + 1} (documents {list(plan.documents)[:8]}); {kept}; lower "
                f"optimizer.lr or look at these documents with `spectrain inspect`"
            ) from error
        if result.skipped:
            self.state = replace(state, position=plan.position + 1, skipped=state.skipped + 1)
            return False
        self.state = replace(state, position=plan.position + 1, step=state.step + 1)
        self.window.add(result, sum(int((batch.document_ids >= 0).sum()) for batch in plan.micro_batches))
        if self.state.step == warmup_steps(settings, state.total_steps) + 1:
            self._warn_frozen()
        if self.state.step % self.stopping.log_every == 0 or self.state.step == state.total_steps:
            self._report(rate)
        return True

    def _report(self, rate: float) -> None:
        values = self.window.means(self.stepper)
        self.window = _Window()
        values["lr"], values["epoch"] = rate, self.state.position / self.rows.steps_per_epoch
        if self.log is not None:
            self.log.write("train", self.state.step, values)
        self.listen(Progress(self.state.step, self.state.total_steps, values))

    def _evaluate(self) -> Evaluation | None:
        if self.validator is None:
            return None
        evaluation = self.validator.run(self.stepper, self.state.step)
        if evaluation is None:
            return None
        self.evaluations.add(evaluation)
        run_on_main(self.stepper.accelerator, self.evaluations.write)
        if self.log is not None:
            summary = {"acceptance_length": evaluation.acceptance_length, "loss": evaluation.loss}
            self.log.write("validation", evaluation.step, summary | evaluation.metrics)
        self.listen(
            Progress(
                self.state.step, self.state.total_steps, {"validation_acceptance_length": evaluation.acceptance_length}
            )
        )
        self._prune()
        return evaluation

    def _save(self) -> None:
        stepper = self.stepper
        checkpoint.save(
            self.checkpoints.path(self.state.step),
            stepper,
            stepper.module.head,
            self.state,
            lambda work: run_on_main(stepper.accelerator, work),
        )
        self.saved_step = self.state.step
        self._prune()

    def _prune(self) -> None:
        best = self.evaluations.best
        keep = None if best is None else best.step
        run_on_main(self.stepper.accelerator, lambda: self.checkpoints.prune(self.stopping.keep_last, keep))

    def _evaluated(self) -> Evaluation | None:
        """The evaluation of the present step, if made."""
        return next((entry for entry in self.evaluations.entries if entry.step == self.state.step), None)

    def _out_of_patience(self) -> bool:
        patience = self.stopping.patience
        return patience is not None and self.evaluations.since_best() >= patience

    def _warn_frozen(self) -> None:
        if not self.is_main:
            return
        frozen = [
            name
            for name, weight in norm_weights(self.stepper.module.head).items()
            if name in self.start_norms and torch.equal(weight, self.start_norms[name])
        ]
        if frozen:
            warnings.warn(
                f"after warm-up these weights are bit-equal to their start: {', '.join(frozen)}; they get no gradient "
                f"or updates too small for their precision",
                FrozenParameterWarning,
                stacklevel=2,
            )


class _Window:
    """Sums since the last report."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._norms: list[Tensor] = []
        self._metrics: Metrics = {}
        self._tokens, self._since = 0, time.perf_counter()

    def add(self, result: StepResult, tokens: int) -> None:
        self._losses.append(result.loss)
        self._norms.append(result.grad_norm)
        add_metrics(self._metrics, result.metrics)
        self._tokens += tokens

    def means(self, stepper: Stepper) -> dict[str, float]:
        """Means over the window and over all processes."""
        summed = sum_metrics(stepper, self._metrics)
        elapsed = time.perf_counter() - self._since
        tokens = torch.tensor(float(self._tokens), device=stepper.accelerator.device)
        return {
            "loss": float(stepper.sum(torch.stack(self._losses).mean())),
            "acceptance_length": predicted_acceptance_length(summed),
            "grad_norm": float(torch.stack(self._norms).mean()),
            "tokens_per_second": float(stepper.sum(tokens)) / elapsed,
            **mean_metrics(summed),
        }


def norm_weights(head: DraftHead) -> dict[str, Tensor]:
    """Copies of the trainable one-dimensional weights, by name."""
    return {name: p.detach().cpu().clone() for name, p in head.named_parameters() if p.dim() == 1 and p.requires_grad}
