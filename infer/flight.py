"""A step on its way: launched on the device, read by the host once it has landed."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.records import RejectionOutputs
from .draft_policy import Choice, Promise
from .graphs import GraphCache
from .request import Request


class Clock:
    """Marks in a device's queue of work; times are read when the work is done, so marking never waits."""

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
        self._marks: dict[str, torch.cuda.Event | float] = {}
        self.mark("started")

    def mark(self, name: str) -> None:
        if not self.is_cuda:
            self._marks[name] = time.perf_counter()
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks[name] = event

    def wait(self, name: str) -> None:
        event = self._marks.get(name, self._marks["drafted"])
        if isinstance(event, torch.cuda.Event):
            event.synchronize()

    def seconds(self, first: str, last: str, since: "Clock | None" = None) -> float:
        """Time from a mark of this clock, or of `since`, to a mark of this one; both of finished work."""
        start, end = (since or self)._marks[first], self._marks[last]
        if isinstance(start, float) and isinstance(end, float):
            return end - start
        assert isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
        return start.elapsed_time(end) / 1000


class Verified(NamedTuple):
    """What one step said about one request that sampled, on the host."""

    token_ids: list[int]
    failed: bool  # the target's logits were not finite
    num_drafted: int  # drafts that were verified
    num_drafts: int  # drafts that wait for the next step
    logprobs: list[dict[int, float]]  # of each token, the token itself first; empty where not asked for


class Undrafted(NamedTuple):
    """A step that was verified, before it drafts."""

    key: int | str  # of the proposer's recorded calls
    graphs: GraphCache | None
    drafting: Tensor  # [batch] int64; table rows of the requests that sample, and of padding
    places: Sequence[int] | None  # of those requests in it; None: the first
    num_drafted: Tensor  # [batch] int64; drafts verified
    verified: RejectionOutputs
    logprobs: Sequence[Tensor]


class Flight:
    """A launched step: verified, then drafted, then landed; `land` waits for it."""

    def __init__(self, requests: list[Request], samples: list[bool], ends: list[int], clock: Clock) -> None:
        self.requests, self.samples = requests, samples
        self.ends = ends  # per request: rows in the cache once the step is done; only for those that do not sample
        self.clock = clock
        self.drafts = True  # whether drafts may wait once the step is done
        self.choice: Choice | None = None  # of a decoding step that was chosen adaptively
        self.padded = len(requests)
        self.undrafted: Undrafted | None = None
        # drafts that wait, by request id, where the host knows them; what the target does not know is cut from them
        self.at_most: dict[int, int] | None = None
        self._promise: Promise | None = None
        self._accepted: Tensor | None = None
        self._results: list[Tensor] = []

    @property
    def samplers(self) -> list[Request]:
        return [request for request, samples in zip(self.requests, self.samples, strict=True) if samples]

    @property
    def all_sample(self) -> bool:
        return all(self.samples)

    def keep(self, results: Sequence[Tensor]) -> None:
        """Starts copying results, [samplers, k + 5] int64 first, to the host.

        Where log-probabilities were asked for, ids [samplers, k + 1, n + 1] int64 and values float32 follow.
        """
        self._results = [_to_host(tensor) for tensor in results]
        self.clock.mark("copied")

    def keep_promise(self, promise: Promise, accepted: Tensor) -> None:
        """Starts copying to the host what the step's drafts promise; called before `keep`."""
        self._promise, self._accepted = promise, _to_host(accepted)

    def land(self) -> list[Verified | None]:
        """The step's results, None for requests that did not sample; waits until the device has them."""
        self.clock.wait("copied")
        if self._promise is not None and self._accepted is not None:
            self._promise.accepted = self._accepted.tolist()
        rows = iter(zip(*(tensor.tolist() for tensor in self._results), strict=True))
        landed: list[Verified | None] = []
        for request, samples in zip(self.requests, self.samples, strict=True):
            if not samples:
                landed.append(None)
                continue
            (*tokens, count, failed, drafted, drafts), *laws = next(rows)
            wanted, logprobs = request.params.logprobs, []
            if wanted is not None:
                logprobs = [dict(zip(ids[: wanted + 1], law, strict=False)) for ids, law in zip(*laws, strict=True)]
            landed.append(Verified(tokens[:count], bool(failed), drafted, drafts, logprobs[:count]))
        return landed


def _to_host(tensor: Tensor) -> Tensor:
    """A copy that is filled once the device gets there; the tensor itself where it is there already."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
