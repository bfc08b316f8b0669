"""The learning rate as a function of the optimizer step: nothing to save, nothing to advance twice."""

import math

from .settings import OptimizerSettings


def warmup_steps(settings: OptimizerSettings, total_steps: int) -> int:
    """Optimizer steps of linear warm-up."""
    if settings.warmup_steps is not None:
        return settings.warmup_steps
    return math.ceil(settings.warmup_share * total_steps)


def learning_rate(settings: OptimizerSettings, step: int, total_steps: int) -> float:
    """The rate of optimizer step `step`, counted from 0; the last step has the schedule's end value."""
    warmup = warmup_steps(settings, total_steps)
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    if settings.schedule == "constant":
        return settings.lr
    progress = min(1.0, (step - warmup + 1) / max(1, total_steps - warmup))
    fall = (1 - math.cos(math.pi * progress)) / 2 if settings.schedule == "cosine" else progress
    return settings.lr * (1 - (1 - settings.final_lr_share) * fall)
