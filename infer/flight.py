"""A step on its way: launched on the device, read by the host once it has landed."""

import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .draft_policy import Choice, Promise
from .graphs import GraphCache
from .proposers.base import Drafts
from .request import Request
from .sampling import NEUTRAL


class Clock:
    """Marks in a device's queue of work; times are read when the work is done, so marking never waits."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._marks: dict[str, torch.cuda.Event | float] = {}
        self.mark("started")

    def mark(self, name: str) -> None:
        if self._stream is None:
            self._marks[name] = time.perf_counter()
            return
        event = self._marks[name] = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)

    def wait(self, name: str) -> None:
        event = self._marks[name]
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


Places = slice | list[int]
"""Of the requests that sample, among the padded rows of a step."""


class Undrafted(NamedTuple):
    """A step that was verified, before it drafts."""

    key: int | str  # of the proposer's recorded calls
    graphs: GraphCache | None
    drafting: Tensor  # [batch] int64; table rows of the requests that sample, and of padding
    places: Places
    told: Tensor  # what verification said, [batch, width + 4] int64 as in `Stages`
    logprobs: Sequence[Tensor]  # ids [batch, k + 1, n + 1] int64 and values float32, where they were asked for
    inner: Drafts | None = None  # of `HostProposer.inner`

    def places_of(self, samplers: Iterable[int]) -> np.ndarray:
        """Where requests stand among the rows `drafting`, given by their number among those that sample."""
        return np.arange(len(self.drafting))[self.places][list(samplers)]


class Flight:
    """A launched step: verified, then drafted, then landed; `land` waits for it."""

    def __init__(
        self, requests: list[Request], samples: list[bool], ends: list[int], clock: Clock, *, drafts: bool
    ) -> None:
        self.requests, self.samples = requests, samples
        self.ends = ends  # per request: rows in the cache once the step is done; only for those that do not sample
        self.clock = clock
        self.drafts = drafts  # whether drafts may wait once the step is done
        self.choice: Choice | None = None  # of a decoding step that was chosen adaptively
        self.padded = len(requests)
        self.wanted = NEUTRAL  # what the requests that sample ask for
        self.undrafted: Undrafted | None = None
        self.waiting: dict[int, int] | None = None  # drafts by request id, where the host made them
        self._places: Places = []
        self._results: list[Tensor] = []
        self._width = 0  # of what verification said; what stands beside it follows
        self._promise: Promise | None = None
        self._accepted: Tensor | None = None

    @property
    def samplers(self) -> list[Request]:
        return [request for request, samples in zip(self.requests, self.samples, strict=True) if samples]

    @property
    def alive(self) -> dict[int, Request]:
        """The requests that sample and have not ended since, by their number among those that sample."""
        return {i: request for i, request in enumerate(self.samplers) if not request.finish_reason}

    @property
    def all_sample(self) -> bool:
        return all(self.samples)

    def keep(self, step: Undrafted, beside: Tensor | None) -> None:
        """Starts copying to the host what verification said, and [batch, n] int64 beside it.

        That is what a host goes by when it drafts, else how many drafts wait.
        """
        self._places, self._width = step.places, step.told.shape[1]
        results = step.told if beside is None else torch.cat([step.told, beside], dim=1)
        self._results = [_to_host(tensor) for tensor in (results, *step.logprobs)]
        self.clock.mark("copied")

    def keep_promise(self, promise: Promise, accepted: Tensor) -> None:
        """Starts copying to the host what the step's drafts promise; called before "drafted" is marked."""
        self._promise, self._accepted = promise, _to_host(accepted)

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """What verification said, and what was kept beside it, of padding too; waits for the device."""
        self.clock.wait("copied")
        kept = self._results[0].numpy()
        return kept[:, : self._width], kept[:, self._width :]

    def land(self) -> list[Verified | None]:
        """The step's results, None for requests that did not sample; waits until the device has them."""
        self.clock.wait("drafted")
        if self._results:
            self.clock.wait("copied")
        if self._promise is not None and self._accepted is not None:
            self._promise.accepted = self._accepted.tolist()
        rows = iter(zip(*(part.numpy()[self._places].tolist() for part in self._results), strict=True))
        landed: list[Verified | None] = []
        for request, samples in zip(self.requests, self.samples, strict=True):
            if not samples:
                landed.append(None)
                continue
            row, *laws = next(rows)
            (*tokens, count, failed, drafted), beside = row[: self._width], row[self._width :]
            wanted, logprobs = request.params.logprobs, []
            if wanted is not None:
                logprobs = [dict(zip(ids[: wanted + 1], law, strict=False)) for ids, law in zip(*laws, strict=True)]
            made = self.waiting
            drafts = made.get(request.request_id, 0) if made is not None else next(iter(beside), 0)
            landed.append(Verified(tokens[:count], bool(failed), drafted, drafts, logprobs[:count]))
        return landed


def _to_host(tensor: Tensor) -> Tensor:
    """A copy that is filled once the device gets there."""
    if not tensor.is_cuda:
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
