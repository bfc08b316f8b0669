"""One optimizer step: global denominators, then forward and backward of each micro-batch, then the update.

The gradient of a step is the plain sum of its micro-batches' gradients over all processes. What distributed wrappers
average is multiplied back, so neither the split nor the number of processes changes it.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from ..heads.base import DraftHead
from ..heads.target_tensors import TargetTensors
from .batch import TrainBatch
from .data import StepPlan
from .objectives.base import LossOutput, Objective
from .settings import OptimizerSettings, SettingsError

Metrics = dict[str, tuple[Tensor, Tensor]]


class NonFiniteError(ValueError):
    """Loss or gradient became NaN or infinite; only under DeepSpeed can a gradient have reached the optimizer."""


class HeadWithObjective(nn.Module):
    """Head and objective under one forward, so that distributed wrappers see all of it."""

    def __init__(self, head: DraftHead, objective: Objective, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.head, self.objective, self.autocast = head, objective, autocast

    def forward(self, target: TargetTensors, batch: TrainBatch) -> LossOutput:
        device = batch.token_ids.device.type
        with torch.autocast(device, dtype=self.autocast, enabled=self.autocast is not None):
            return self.objective(self.head, target, batch)


class StepResult(NamedTuple):
    """Sums of this process; `skipped` where no process had a supervised row and nothing was updated."""

    skipped: bool
    loss: Tensor  # [] float32; this process's share
    grad_norm: Tensor  # [] float32; before clipping, of the whole gradient
    metrics: Metrics


def make_optimizer(head: DraftHead, settings: OptimizerSettings) -> torch.optim.AdamW:
    """AdamW over the head's trainable parameters; norms and biases never decay."""
    trainable = [(name, p) for name, p in head.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for _, p in trainable if p.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [p for _, p in trainable if p.dim() <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)


class Stepper:
    """Owns the wrapped module and optimizer of one process."""

    def __init__(
        self,
        accelerator: Accelerator,
        module: HeadWithObjective,
        target: TargetTensors,
        optimizer: OptimizerSettings,
        micro_batch_size: int,
    ) -> None:
        self.accelerator, self.module, self.target, self.settings = accelerator, module, target, optimizer
        self.sharded = accelerator.distributed_type == DistributedType.DEEPSPEED
        if self.sharded:
            if optimizer.clip_value is not None:
                raise SettingsError(
                    f"DeepSpeed clips by norm only, found optimizer.clip_value={optimizer.clip_value}; set it to null "
                    f"and optimizer.clip_norm instead, or train without DeepSpeed"
                )
            plugin: Any = accelerator.state.deepspeed_plugin
            plugin.deepspeed_config.update(
                {
                    "gradient_clipping": optimizer.clip_norm or 0.0,
                    "train_micro_batch_size_per_gpu": micro_batch_size,
                    "gradient_accumulation_steps": 1,
                }
            )
        self.wrapped, self.optimizer = accelerator.prepare(module, make_optimizer(module.head, optimizer))

    def run(self, plan: StepPlan, micro_batches: Iterator[TrainBatch], learning_rate: float) -> StepResult:
        """One update from the plan's micro-batches; raises NonFiniteError on every process alike."""
        device = self.accelerator.device
        counts = self.count(plan)
        zero = torch.zeros((), device=device)
        if not counts.sum() > 0:
            for _ in plan.micro_batches:
                next(micro_batches)
            return StepResult(True, zero, zero, {})
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        loss, metrics, last = zero, {}, len(plan.micro_batches) - 1
        for index in range(len(plan.micro_batches)):
            batch = to_device(next(micro_batches)._replace(denominators=counts), device)
            output = self._forward_backward(batch, final=index == last)
            loss = loss + output.loss.detach()
            add_metrics(metrics, output.metrics)
        grad_norm = self._update()
        return StepResult(False, loss, grad_norm, metrics)

    def count(self, plan: StepPlan) -> Tensor:
        """Supervised rows per term [num_terms] float32 over all micro-batches of all processes, on the device."""
        device, objective, head = self.accelerator.device, self.module.objective, self.module.head
        counts = torch.zeros(objective.num_terms, device=device)
        for batch in plan.micro_batches:
            counts = counts + objective.count(head, to_device(batch, device)).to(device)
        return self.sum(counts)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.accelerator.num_processes == 1:
            return values
        values = values.clone()
        torch.distributed.all_reduce(values)
        return values

    def _forward_backward(self, batch: TrainBatch, final: bool) -> LossOutput:
        accelerator = self.accelerator
        if self.sharded:
            accelerator.gradient_state.sync_gradients = final
            output = self.wrapped(self.target, batch)
            self._check_finite(output.loss.detach())
            accelerator.backward(output.loss * accelerator.num_processes)
            return output
        with _sync(accelerator, self.wrapped, final):
            output = self.wrapped(self.target, batch)
            (output.loss * accelerator.num_processes).backward()
        return output

    def _update(self) -> Tensor:
        if self.sharded:
            engine: Any = self.accelerator.deepspeed_engine_wrapped
            norm = torch.tensor(float(engine.get_global_grad_norm() or 0.0))
            if not torch.isfinite(norm):
                raise NonFiniteError("the gradient is not finite, and DeepSpeed has applied it")
            return norm
        parameters = list(self.module.head.parameters())
        norm = nn.utils.clip_grad_norm_(parameters, self.settings.clip_norm or math.inf)
        # the summed gradient is the same everywhere, so every process decides alike
        if not torch.isfinite(norm):
            self.optimizer.zero_grad()
            raise NonFiniteError("the gradient is not finite")
        if self.settings.clip_value is not None:
            nn.utils.clip_grad_value_(parameters, self.settings.clip_value)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def _check_finite(self, loss: Tensor) -> None:
        """DeepSpeed updates inside its backward, so a bad loss has to stop every process before it."""
        if not torch.isfinite(self.sum(loss)):
            raise NonFiniteError("the loss is not finite")


def to_device(batch: TrainBatch, device: torch.device) -> TrainBatch:
    """The batch on another device."""
    moved = {name: t.to(device, non_blocking=True) for name, t in batch._asdict().items() if t is not None}
    return batch._replace(**moved)


def add_metrics(total: Metrics, more: Metrics) -> None:
    """Adds numerators and denominators into `total`."""
    for name, (numerator, denominator) in more.items():
        old = total.get(name)
        numerator, denominator = numerator.detach(), denominator.detach()
        total[name] = (numerator, denominator) if old is None else (old[0] + numerator, old[1] + denominator)


def _sync(accelerator: Accelerator, wrapped: Any, final: bool) -> AbstractContextManager[None]:
    return nullcontext() if final else accelerator.no_sync(wrapped)
