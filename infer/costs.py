"""What the parts of a decoding step cost at each batch size and width, timed on rows that belong to nobody."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch


class Rehearsal(NamedTuple):
    """The parts of one decoding step, to be called in this order, each as often as one likes."""

    verify: Callable[[], object]  # target and verification
    rest: Callable[[], object]  # the proposer, observing
    draft: Callable[[], object]  # the proposer, drafting


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Milliseconds of the parts of a step, measured at some batch sizes and widths and read between them."""

    batches: tuple[int, ...]  # ascending
    widths: tuple[int, ...]  # ascending; rows a request
    verify_ms: tuple[tuple[float, ...], ...]  # [batches][widths]: target and verification
    draft_ms: tuple[float, ...]  # [batches]: the proposer, drafting
    rest_ms: tuple[float, ...]  # [batches]: the proposer, only observing

    def verify(self, batch: int, width: float) -> float:
        """Target and verification of batch * width rows."""
        column = [float(np.interp(width, self.widths, row)) for row in self.verify_ms]
        return float(np.interp(batch, self.batches, column))

    def propose(self, batch: int, drafts: bool) -> float:
        """The proposer's part of a step that drafts, or of one that does not."""
        return float(np.interp(batch, self.batches, self.draft_ms if drafts else self.rest_ms))

    def best_num_draft_tokens(self, batch: int, survival: Sequence[float]) -> int:
        """The k of most tokens a millisecond at this batch size; 0: drafting does not pay.

        `survival` [k]: probability that a draft and all before it are accepted.
        """
        best, tokens = (1 / (self.verify(batch, 1) + self.propose(batch, False)), 0), 1.0
        for k, rate in enumerate(survival, start=1):
            tokens += rate
            best = max(best, (tokens / (self.verify(batch, k + 1) + self.propose(batch, True)), k))
        return best[1]


def measure_costs(
    rehearse: Callable[[int, int], Rehearsal],
    batches: Sequence[int],
    widths: Sequence[int],
    milliseconds: Callable[[Callable[[], object]], float],
) -> StepCosts:
    """Times `rehearse(batch, width)` at every batch size and width, both ascending."""
    verify, draft, rest = [], [], []
    for batch in batches:
        row = [milliseconds(rehearse(batch, width).verify) for width in widths]
        parts = rehearse(batch, widths[-1])
        observing = milliseconds(parts.rest)
        rest.append(observing)
        draft.append(observing + milliseconds(parts.draft))
        # more rows never cost less; what says so is noise
        verify.append(tuple(np.maximum.accumulate(row).tolist()))
    return StepCosts(
        batches=tuple(batches),
        widths=tuple(widths),
        verify_ms=tuple(verify),
        draft_ms=tuple(draft),
        rest_ms=tuple(rest),
    )


def stopwatch(device: torch.device, repeats: int = 5) -> Callable[[Callable[[], object]], float]:
    """A function that times calls on a device: milliseconds, the median of some after one that is not counted."""

    def once(function: Callable[[], object]) -> float:
        if device.type != "cuda":
            start = time.perf_counter()
            function()
            return 1000 * (time.perf_counter() - start)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        function()
        events[1].record()
        events[1].synchronize()
        return events[0].elapsed_time(events[1])

    def milliseconds(function: Callable[[], object]) -> float:
        function()
        return float(np.median([once(function) for _ in range(repeats)]))

    return milliseconds
