"""Who runs in a step: one budget of tokens, chunked prefill, preemption by block supply.

Prompt, decode and draft tokens are all just tokens to compute. No tensors here.
"""

from collections import deque
from typing import NamedTuple

from .planes import BlockPool
from .request import FinishReason, Request


class ScheduledRequest(NamedTuple):
    """Rows start..start+num_tokens of a request's known tokens and drafts; the last `num_drafts` of them are drafts."""

    request: Request
    start: int
    num_tokens: int
    num_drafts: int
    samples: bool  # whether the rows reach the newest known token, so that a next token can be sampled


class Scheduler:
    """First come, first served; the request that came last is preempted first."""

    def __init__(self, pool: BlockPool, max_batch_tokens: int, max_batch_size: int) -> None:
        self.pool = pool
        self.max_batch_tokens, self.max_batch_size = max_batch_tokens, max_batch_size
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def schedule(self) -> tuple[list[ScheduledRequest], list[Request]]:
        """The rows of the next step, and the requests that were preempted to make room.

        A preempted request has lost its blocks: the caller tells the proposer, then calls `requeue`.
        """
        budget = self.max_batch_tokens
        scheduled: list[ScheduledRequest] = []
        preempted: list[Request] = []
        for request in list(self.running):
            if budget == 0 or request in preempted:
                continue
            rows = self._make_room(request, budget, preempted)
            if rows is not None:
                scheduled.append(rows)
                budget -= rows.num_tokens
        if not preempted:
            self._admit(scheduled, budget)
        return scheduled, preempted

    def requeue(self, request: Request) -> None:
        """Puts a preempted request at the head of the line."""
        self.waiting.appendleft(request)

    def can_admit(self) -> bool:
        """Whether the first waiting request could run in the next step."""
        return self._admissible() is not None

    def register(self, request: Request) -> None:
        """Lets later requests share the blocks that a committed step filled.

        Rows 0..num_computed-1 must be final and written, or queued to be written, in every plane; a plane whose rows
        depend on n following tokens may lag n - 1 rows behind. A request that failed shares nothing more.
        """
        lag = max(self.pool.next_token - 1, 0)
        full = min(max(request.num_computed - lag, 0) // self.pool.block_size, len(request.block_table))
        if full <= request.num_registered or request.finish_reason is FinishReason.ERROR:
            return
        self.pool.extend_keys(request.block_keys, request.token_ids)
        full = min(full, len(request.block_keys))
        for i in range(request.num_registered, full):
            self.pool.register(request.block_table[i], request.block_keys[i])
        request.num_registered = full

    def finish(self, request: Request) -> None:
        """Takes a request out and its blocks back."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self.pool.release(request.block_table)

    def _rows(self, request: Request, budget: int) -> ScheduledRequest:
        pending = len(request.token_ids) - request.num_computed
        num_drafts = min(request.num_drafts, budget - 1) if pending == 1 else 0
        num_tokens = min(pending, budget) + num_drafts
        return ScheduledRequest(request, request.num_computed, num_tokens, num_drafts, samples=pending <= budget)

    def _make_room(self, request: Request, budget: int, preempted: list[Request]) -> ScheduledRequest | None:
        """Rows whose blocks are taken; None if the request itself had to give way."""
        rows = self._rows(request, budget)
        while not self._grow(rows):
            if request.num_drafts:
                # a guess is cheaper to lose than the rows a neighbour has computed
                request.num_drafts = 0
                rows = self._rows(request, budget)
                continue
            victim = self.running[-1]
            self._preempt(victim)
            preempted.append(victim)
            if victim is request:
                return None
        return rows

    def _grow(self, rows: ScheduledRequest) -> bool:
        return self.pool.grow(rows.request.block_table, rows.start + rows.num_tokens)

    def _preempt(self, victim: Request) -> None:
        self.running.remove(victim)
        self.pool.release(victim.block_table)
        victim.num_computed = 0
        victim.num_preemptions += 1
        victim.num_drafts = 0

    def _admit(self, scheduled: list[ScheduledRequest], budget: int) -> None:
        while budget > 0 and (shared := self._admissible()) is not None:
            request = self.waiting.popleft()
            self.pool.share(request.block_table, shared)
            request.num_registered = len(shared)
            request.num_computed = len(shared) * self.pool.block_size
            if not request.num_preemptions:
                request.num_cached = request.num_computed
            rows = self._rows(request, budget)
            grown = self._grow(rows)
            assert grown, "free blocks were counted before admission"
            self.running.append(request)
            scheduled.append(rows)
            budget -= rows.num_tokens

    def _admissible(self) -> list[int] | None:
        """The cached blocks that the first waiting request would start with; None if it has to wait."""
        if not self.waiting or len(self.running) >= self.max_batch_size:
            return None
        request = self.waiting[0]
        known = len(request.token_ids)
        self.pool.extend_keys(request.block_keys, request.token_ids)
        # the newest token is always computed: its row gives the logits of the next
        shared = self.pool.find(request.block_keys[: (known - 1) // self.pool.block_size])
        # room for all that is known keeps a half-filled prompt from being preempted by its own neighbours
        return shared if self.pool.fits(known + 1, shared) else None
