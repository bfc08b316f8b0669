"""CUDA graphs applied from outside: a function on fixed buffers is recorded once a key and replayed after."""

from collections.abc import Callable
from typing import Any

import torch

GraphKey = tuple[str | int, ...]
"""The stage of a step, and what its shapes depend on."""


class RecordingError(RuntimeError):
    """A call cannot be recorded: it waits for the device, or memory ran out; the message says which call and why."""


class GraphCache:
    """Recorded calls by key. A call's tensors arrive in buffers that never move; its results stay in place too.

    The results of a replay last until the next replay of the same stage: graphs of one stage share their memory, and
    a step runs each stage once. Graphs of different stages must not share it, since a graph's scratch memory may lie
    where one recorded later keeps its results.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pools: dict[str | int, Any] = {}
        self._recorded: dict[GraphKey, tuple[torch.cuda.CUDAGraph, Any]] = {}

    def run(self, key: GraphKey, function: Callable[..., Any], *arguments: Any) -> Any:
        """Replays the call, after recording it when the key is new; raises RecordingError where it cannot be recorded.

        Recording runs nothing, so what the function compiles lazily must have been compiled by an earlier plain call.
        """
        if key not in self._recorded:
            self._record(key, function, arguments)
        graph, results = self._recorded[key]
        graph.replay()
        return results

    def replay(self, key: GraphKey) -> None:
        """Replays a recorded call on whatever its buffers hold."""
        self._recorded[key][0].replay()

    def _record(self, key: GraphKey, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        graph = torch.cuda.CUDAGraph()
        pool = self._pools.setdefault(key[0], torch.cuda.graph_pool_handle())
        torch.cuda.synchronize(self.device)
        stream = torch.cuda.current_stream(self.device)
        try:
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                results = function(*arguments)
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # a recording that fails leaves its own behind
            first_line = next(iter(str(error.__context__ or error).splitlines()), type(error).__name__)
            raise RecordingError(f"its {key[0]} stage cannot be recorded as a CUDA graph: {first_line}") from error
        self._recorded[key] = (graph, results)


def call(graphs: GraphCache | None, key: GraphKey, function: Callable[..., Any], *arguments: Any) -> Any:
    """The call replayed, or as it stands where nothing is recorded."""
    return function(*arguments) if graphs is None else graphs.run(key, function, *arguments)
