"""CUDA graphs applied from outside: a function on fixed buffers is recorded once a key and replayed after."""

from collections.abc import Callable, Hashable
from typing import Any

import torch


class GraphCache:
    """Recorded calls by key. A call's tensors arrive in buffers that never move; its results stay in place too.

    The results of a replay are overwritten by the next replay of the same key.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._recorded: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}

    def run(self, key: Hashable, function: Callable[..., Any], *arguments: Any) -> Any:
        """Replays the call, after recording it when the key is new.

        Recording runs nothing, so what the function compiles lazily must have been compiled by an earlier plain call.
        """
        if key not in self._recorded:
            self._record(key, function, arguments)
        graph, results = self._recorded[key]
        graph.replay()
        return results

    def replay(self, key: Hashable) -> None:
        """Replays a recorded call on whatever its buffers hold."""
        self._recorded[key][0].replay()

    def _record(self, key: Hashable, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            results = function(*arguments)
        self._recorded[key] = (graph, results)
