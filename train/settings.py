"""The recipe sections that training reads, each a frozen dataclass validated where it is built."""

from dataclasses import dataclass
from typing import Literal


class SettingsError(ValueError):
    """A setting that cannot be honoured; the message names the key."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW over float32 masters, and a learning rate that is a function of the optimizer step."""

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float | None = 0.5
    """The largest norm of the whole gradient."""
    clip_value: float | None = None
    """The largest magnitude of each of its elements."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_share: float = 0.015
    warmup_steps: int | None = None
    final_lr_share: float = 0.0

    def __post_init__(self) -> None:
        _require(self.lr > 0, "optimizer.lr", "above 0", self.lr)
        _require(all(0 <= beta < 1 for beta in self.betas), "optimizer.betas", "at least 0 and below 1", self.betas)
        for name in ("eps", "weight_decay"):
            _require(getattr(self, name) >= 0, f"optimizer.{name}", "at least 0", getattr(self, name))
        for name in ("clip_norm", "clip_value"):
            value = getattr(self, name)
            _require(value is None or value > 0, f"optimizer.{name}", "above 0 or null", value)
        if self.clip_norm is not None and self.clip_value is not None:
            raise SettingsError(
                f"a gradient is clipped by norm or by value, found optimizer.clip_norm={self.clip_norm} and "
                f"optimizer.clip_value={self.clip_value}; set one of them to null"
            )
        _require(0 <= self.warmup_share < 1, "optimizer.warmup_share", "at least 0 and below 1", self.warmup_share)
        _require(0 <= self.final_lr_share <= 1, "optimizer.final_lr_share", "between 0 and 1", self.final_lr_share)
        if self.warmup_steps is not None:
            _require(self.warmup_steps >= 0, "optimizer.warmup_steps", "at least 0", self.warmup_steps)


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """How documents become rows, and rows optimizer steps."""

    sequence_length: int = 2048
    batch_size: int = 16
    """Rows an optimizer step, over all processes: the sample order does not depend on their number."""
    micro_batch_size: int = 1
    """Rows a forward of one process."""
    validation_share: float = 0.02
    max_validation_documents: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        _require(self.sequence_length >= 4, "data.sequence_length", "at least 4", self.sequence_length)
        _require(self.batch_size >= 1, "data.batch_size", "at least 1", self.batch_size)
        _require(self.micro_batch_size >= 1, "data.micro_batch_size", "at least 1", self.micro_batch_size)
        _require(
            0 <= self.validation_share < 1, "data.validation_share", "at least 0 and below 1", self.validation_share
        )
        for name in ("max_validation_documents", "seed"):
            _require(getattr(self, name) >= 0, f"data.{name}", "at least 0", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class StoppingSettings:
    """When training ends and what happens on the way; every interval counts optimizer steps."""

    epochs: int = 10
    max_steps: int | None = None
    eval_every: int = 500
    save_every: int = 500
    log_every: int = 10
    keep_last: int = 2
    patience: int | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "eval_every", "save_every", "log_every", "keep_last"):
            _require(getattr(self, name) >= 1, f"stopping.{name}", "at least 1", getattr(self, name))
        for name in ("max_steps", "patience"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"stopping.{name}", "at least 1 or null", value)


@dataclass(frozen=True, kw_only=True)
class ServingSettings:
    """What the head is meant to be served with; recorded in its folder."""

    num_draft_tokens: int = 5

    def __post_init__(self) -> None:
        _require(self.num_draft_tokens >= 1, "serving.num_draft_tokens", "at least 1", self.num_draft_tokens)


def _require(holds: bool, key: str, expected: str, found: object) -> None:
    if not holds:
        raise SettingsError(
            f"{key} must be {expected}, found {found}; change it in the recipe or with --set {key}=VALUE"
        )
