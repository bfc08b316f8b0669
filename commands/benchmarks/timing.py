"""Clocks: how long calls take on a device, repeated, with buffers that no cache holds."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

COLD_BYTES = 400 * 2**20
"""Inputs of at least this many bytes are used in turn, so that none of them is left in a cache."""

COPIED_BYTES = {"cuda": 2**31, "cpu": 2**26}


class Timing(NamedTuple):
    """The median of repeats, and (slowest - fastest) / median."""

    ms: float
    spread: float

    @classmethod
    def of(cls, times_ms: Sequence[float]) -> "Timing":
        return cls(*median_and_spread(times_ms))


def median_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """The middle one of some values, and how far they lie apart as a share of it."""
    ordered = sorted(values)
    median = ordered[len(ordered) // 2]
    return median, (ordered[-1] - ordered[0]) / median if median else 0.0


def synchronize(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_once(function: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of one call: on the GPU's own clock, else the host's."""
    if device.type != "cuda":
        start = time.perf_counter()
        function()
        return 1000 * (time.perf_counter() - start)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    function()
    last.record()
    last.synchronize()
    return first.elapsed_time(last)


def time_calls(
    functions: Sequence[Callable[[], object]],
    device: torch.device,
    *,
    calls: int = 24,
    repeats: int = 5,
    recorded: bool = True,
) -> Timing:
    """The time of one call, the functions taken in turn; on a GPU `calls` of them are replayed as one CUDA graph.

    `recorded` False launches them one by one: for functions that read from the device.
    """

    def all_calls() -> None:
        for i in range(calls):
            functions[i % len(functions)]()

    run: Callable[[], object] = all_calls
    for function in functions:  # compiles, and fills caches of whatever is made once
        function()
    if device.type == "cuda" and recorded:
        graph = torch.cuda.CUDAGraph()
        synchronize(device)
        with torch.cuda.graph(graph):
            all_calls()
        run = graph.replay
    run()
    synchronize(device)
    return Timing.of([time_once(run, device) / calls for _ in range(repeats)])


def copies_for(num_bytes: int, device: torch.device) -> int:
    """How many buffers of that size to use in turn."""
    if device.type != "cuda":
        return 2
    return max(2, min(100, -(-COLD_BYTES // max(num_bytes, 1))))


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, of a large copy: what memory-bound work is measured against."""
    size = COPIED_BYTES[device.type]
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    to = torch.zeros_like(source)
    timing = time_calls([lambda: to.copy_(source)], device, calls=5, recorded=False)
    return 2 * size / timing.ms * 1000
