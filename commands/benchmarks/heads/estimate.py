"""How long a plan takes, said before it starts: rough, from one matrix product and a few decoding steps.

After each piece what is left is scaled by how wrong the estimate has been so far.
"""

import time

import torch

from ....heads.per_step import PerStepConfig
from ....train.assembly import Assembly
from ....train.budget import Budget
from ..timing import time_calls

SHARE_OF_PRODUCTS = 0.1
"""What training reaches of a large matrix product's speed: heads are small, and their products are not large."""

START_SECONDS = {"cuda": 12.0, "cpu": 1.0}
"""Of a training or an engine: loading, compiling, recording."""

MATRIX = {"cuda": 8192, "cpu": 512}


def product_speed(device: torch.device, dtype: torch.dtype) -> float:
    """Floating point operations a second of a large square product."""
    size = MATRIX[device.type]
    left, right = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    timing = time_calls([lambda: left @ right], device, calls=5, repeats=3, recorded=False)
    return 2 * size**3 / (timing.ms / 1000)


def training_seconds(assembly: Assembly, budget: Budget, speed: float, device: torch.device) -> float:
    """Seconds of one training: forward and backward of network and logits for every term of its loss."""
    config = assembly.config
    with torch.device("meta"):
        parameters = sum(p.numel() for p in assembly.network().parameters())
    # a part of such a head is a term's own
    terms = 1 if isinstance(config, PerStepConfig) else assembly.objective.num_terms
    logits = config.draft_vocab_size * config.target.hidden_size
    work = 6.0 * budget.tokens * terms * (parameters + logits)
    return START_SECONDS[device.type] + work / (SHARE_OF_PRODUCTS * speed)


class Clock:
    """Time since the start and time left, and what an estimate is worth by now."""

    def __init__(self, limit: float | None) -> None:
        self.begun, self.limit = time.perf_counter(), limit
        self._estimated = self._taken = 0.0

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.begun

    def note(self, estimated: float, taken: float) -> None:
        """A piece is done."""
        self._estimated += estimated
        self._taken += taken

    def expect(self, estimated: float) -> float:
        """An estimate, as far off as those before it were."""
        return estimated * (self._taken / self._estimated) if self._estimated else estimated

    def has_room(self, estimated: float, reserved: float = 0.0) -> bool:
        """Whether a piece is likely to end in time, and `reserved` seconds before the end."""
        return self.limit is None or self.seconds + self.expect(estimated) + reserved < self.limit


def minutes(seconds: float) -> str:
    """Seconds in words."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.1f} min"
