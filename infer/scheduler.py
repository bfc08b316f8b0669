"""Who runs in a step: one budget of tokens, chunked prefill, preemption by block supply.

Prompt, decode and draft tokens are all just tokens to compute. No tensors here.
"""

from collections import deque
from typing import NamedTuple

from .planes import BlockPool
from .request import Request


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

        A preempted request still holds its block table: the caller tells the proposer, then calls `requeue`.
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

    def can_admit(self) -> bool:
        """Whether a waiting request could join now."""
        if not self.waiting or len(self.running) >= self.max_batch_size:
            return False
        return self.pool.num_free >= self.pool.blocks_for(len(self.waiting[0].token_ids) + 1)

    def requeue(self, request: Request) -> None:
        """Puts a preempted request, stripped of its cache, at the head of the line."""
        self.pool.release(request.block_table)
        self.waiting.appendleft(request)

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
            victim = self.running[-1]
            if victim is request and len(self.running) == 1 and request.num_drafts:
                request.num_drafts = 0
                rows = self._rows(request, budget)
                continue
            self.running.pop()
            victim.num_computed = 0
            victim.num_preemptions += 1
            victim.num_drafts = 0
            preempted.append(victim)
            if victim is request:
                return None
        return rows

    def _grow(self, rows: ScheduledRequest) -> bool:
        return self.pool.grow(rows.request.block_table, rows.start + rows.num_tokens)

    def _admit(self, scheduled: list[ScheduledRequest], budget: int) -> None:
        # room for all that is known keeps a half-filled prompt from being preempted by its own neighbours
        while budget > 0 and self.can_admit():
            request = self.waiting[0]
            rows = self._rows(request, budget)
            assert self._grow(rows), "free blocks were counted before admission"
            self.running.append(self.waiting.popleft())
            scheduled.append(rows)
            budget -= rows.num_tokens
