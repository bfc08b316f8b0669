"""One step on the device: packed rows -> target -> verification -> observation -> drafts, without waiting for the host.

The runner moves rows and tokens; it decides nothing about who runs (scheduler) or when a request ends (engine). What a
step needs of a request stands in the request table, so a step of decoding requests can be launched before the host has
read the step before it.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..kernels.records import RejectionOutputs, law_columns
from .graphs import GraphCache
from .proposers.base import DraftStep, ObservedRows, Proposer
from .request import Request
from .sampling import NEUTRAL, Features, LogitsRows, SamplingTable, features_of, process_logits, top_logprobs
from .scheduler import ScheduledRequest
from .table import Packed, RequestTable
from .target import Target, TargetOutput
from .verify import Verification, verify_drafts

BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of requests a CUDA graph is captured for; beyond the last one batches grow by its size."""


class Slots(NamedTuple):
    """Who takes part in a step; on the device, [batch] int64 each."""

    rows: Tensor  # of the request table
    starts: Tensor  # first position computed
    counts: Tensor  # positions computed


class Verified(NamedTuple):
    """What one step said about one request that sampled, on the host."""

    token_ids: list[int]
    failed: bool  # the target's logits were not finite
    num_drafted: int  # drafts that were verified
    num_drafts: int  # drafts that wait for the next step
    logprobs: list[dict[int, float]]  # of each token, the token itself first; empty where not asked for


class Flight:
    """A launched step. `land` waits for it."""

    def __init__(self, requests: list[Request], samples: list[bool], ends: list[int], clock: "Clock") -> None:
        self.requests, self.samples = requests, samples
        self.ends = ends  # per request: rows in the cache once the step is done; only for those that do not sample
        self.clock = clock
        self._results: list[Tensor] = []

    @property
    def all_sample(self) -> bool:
        return all(self.samples)

    def keep(self, results: Sequence[Tensor]) -> None:
        """Starts copying results, [samplers, k + 5] int64 first, to the host.

        Where log-probabilities were asked for, ids [samplers, k + 1, n + 1] int64 and values float32 follow.
        """
        for tensor in results:
            if tensor.is_cuda:
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                tensor = host.copy_(tensor, non_blocking=True)
            self._results.append(tensor)
        self.clock.mark("copied")

    def land(self) -> list[Verified | None]:
        """The step's results, None for requests that did not sample; waits until the device has them."""
        self.clock.wait("copied")
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


class Runner:
    """Builds packed batches and calls target, verifier and proposer."""

    def __init__(
        self,
        target: Target,
        proposer: Proposer,
        table: RequestTable,
        settings: SamplingTable,
        graphs: GraphCache | None,
        *,
        verification: Verification,
    ) -> None:
        self.target, self.proposer, self.table, self.settings, self.graphs = target, proposer, table, settings, graphs
        self.verification = verification
        self.num_draft_tokens = table.num_draft_tokens
        self.spare_slots = max(0, proposer.requirements.lookahead - self.num_draft_tokens)
        self._law_columns: Tensor | None = None  # of the proposer's laws; made once, from the first
        self._buckets: dict[int, Slots] = {}

    def launch(self, scheduled: Sequence[ScheduledRequest]) -> Flight:
        """Starts a step whose rows the host knows."""
        requests = [rows.request for rows in scheduled]
        samples = [rows.samples for rows in scheduled]
        flight = Flight(
            requests, samples, [rows.start + rows.num_tokens for rows in scheduled], Clock(self.table.device)
        )
        self.table.write_blocks(requests)
        if flight.all_sample and all(rows.num_tokens == rows.num_drafts + 1 for rows in scheduled):
            starts, counts = [rows.start for rows in scheduled], [rows.num_tokens for rows in scheduled]
            self._decode(flight, starts, counts)
        else:
            self._mixed(flight, scheduled)
        return flight

    def launch_ahead(self, requests: list[Request]) -> Flight:
        """Starts a step of decoding requests of which an earlier step is still in flight."""
        flight = Flight(requests, [True] * len(requests), [], Clock(self.table.device))
        self.table.write_blocks(requests)
        self._decode(flight, None, None)
        return flight

    def capture(self, max_batch_size: int) -> None:
        """Captures the graphs of every bucket up to `max_batch_size`, on rows that belong to nobody."""
        if self.graphs is None:
            return
        for batch in sorted({_bucket(n) for n in range(1, max_batch_size + 1)}, reverse=True):
            slots = self._slots_of(batch)
            slots.rows.fill_(self.table.nobody)
            slots.starts.zero_()
            slots.counts.fill_(1)
            for width in sorted({1, self.num_draft_tokens + 1}):
                self._run_decode(slots, batch * width, width, NEUTRAL, None, [])
                self._run_decode(slots, batch * width, width, NEUTRAL, self.graphs, [])

    def _decode(self, flight: Flight, starts: list[int] | None, counts: list[int] | None) -> None:
        """A step in which every request computes its newest token and its drafts, and samples."""
        rows = [_row_of(request) for request in flight.requests]
        width = self.num_draft_tokens + 1 if counts is None else max(counts)
        batch = len(rows)
        if self.graphs is None:
            slots = Slots(self._upload(rows), *self._spans(rows, starts, counts))
            num_rows = batch * width if counts is None else sum(counts)
        else:
            batch, width = _bucket(batch), 1 if width == 1 else self.num_draft_tokens + 1
            slots, num_rows = self._slots_of(batch), batch * width
            padding = batch - len(rows)
            slots.rows.copy_(self._upload(rows + [self.table.nobody] * padding))
            spans = self._spans(
                slots.rows,
                None if starts is None else starts + [0] * padding,
                None if counts is None else counts + [1] * padding,
            )
            slots.starts.copy_(spans[0])
            slots.counts.copy_(spans[1])
        wanted = features_of([request.params for request in flight.requests])
        ids = [request.request_id for request in flight.requests]
        results = self._run_decode(slots, num_rows, width, wanted, self.graphs, ids, flight.clock)
        flight.keep([tensor[: len(rows)] for tensor in results])

    def _spans(
        self, rows: "Tensor | list[int]", starts: list[int] | None, counts: list[int] | None
    ) -> tuple[Tensor, Tensor]:
        if starts is not None and counts is not None:
            return self._upload(starts), self._upload(counts)
        index = self._upload(rows) if isinstance(rows, list) else rows
        return self.table.num_known[index] - 1, self.table.num_drafts[index] + 1

    def _run_decode(
        self,
        slots: Slots,
        num_rows: int,
        width: int,
        wanted: Features,
        graphs: GraphCache | None,
        request_ids: list[int],
        clock: "Clock | None" = None,
    ) -> list[Tensor]:
        """What `Flight.keep` takes: tokens, how many, failed, drafts verified, drafts waiting; log-probabilities."""
        key = (slots.rows.shape[0], width)

        def run(name: str, function: Callable, *arguments: object):
            # settings beyond the temperature change which kernels run, so they are not replayed
            if graphs is None or (name == "verify" and wanted.edits):
                return function(*arguments)
            return graphs.run((name, *key), function, *arguments)

        packed, output = run("target", self._forward, slots, num_rows, width)
        verified = run("verify", self._verify_all, slots, packed, output, wanted)
        logprobs = self._logprobs(verified, packed.batch.cu_seqlens, output, wanted)
        if clock is not None:
            clock.mark("verified")
        if self.num_draft_tokens or self.proposer.requirements.observes:
            run("draft", self._draft, slots, packed, output.states, slots.rows, request_ids, request_ids)
        if clock is not None:
            clock.mark("drafted")
        return [self._results(verified, slots.rows, slots.counts - 1), *logprobs]

    def _forward(self, slots: Slots, num_rows: int, width: int) -> tuple[Packed, TargetOutput]:
        packed = self.table.pack(*slots, num_rows, max_query_len=width, max_seq_len=self.table.max_length)
        return packed, self.target.forward(packed.batch)

    def _verify_all(self, slots: Slots, packed: Packed, output: TargetOutput, wanted: Features) -> RejectionOutputs:
        return self._verify(
            slots.rows, slots.counts - 1, packed.batch.cu_seqlens, packed.slots, packed.batch.positions, output, wanted
        )

    def _mixed(self, flight: Flight, scheduled: Sequence[ScheduledRequest]) -> None:
        """A step with prompt rows: logits are asked for where requests sample, and only those draft."""
        counts = [rows.num_tokens for rows in scheduled]
        slots = Slots(
            self._upload([_row_of(rows.request) for rows in scheduled]),
            self._upload([rows.start for rows in scheduled]),
            self._upload(counts),
        )
        packed = self.table.pack(
            *slots,
            sum(counts),
            max_query_len=max(counts),
            max_seq_len=max(rows.start + rows.num_tokens for rows in scheduled),
        )
        samplers = [rows for rows in scheduled if rows.samples]
        ends = np.cumsum(counts)
        asked = [
            range(end - rows.num_drafts - 1, end) for rows, end in zip(scheduled, ends, strict=True) if rows.samples
        ]
        asked_rows = self._upload([row for part in asked for row in part])
        packed = packed._replace(batch=packed.batch._replace(logits_rows=asked_rows))
        output = self.target.forward(packed.batch)
        sampling = self._upload([_row_of(rows.request) for rows in samplers])
        num_drafts = self._upload([rows.num_drafts for rows in samplers])
        verified, logprobs = None, ()
        if samplers:
            wanted = features_of([rows.request.params for rows in samplers])
            cu_rows = torch.nn.functional.pad((num_drafts + 1).cumsum(0), (1, 0)).int()
            asked_slots, positions = packed.slots[asked_rows], packed.batch.positions[asked_rows]
            verified = self._verify(sampling, num_drafts, cu_rows, asked_slots, positions, output, wanted)
            logprobs = self._logprobs(verified, cu_rows, output, wanted)
        flight.clock.mark("verified")
        if self.num_draft_tokens or self.proposer.requirements.observes:
            ids = [rows.request.request_id for rows in scheduled]
            self._draft(slots, packed, output.states, sampling, ids, [rows.request.request_id for rows in samplers])
        flight.clock.mark("drafted")
        if verified is not None:
            flight.keep([self._results(verified, sampling, num_drafts), *logprobs])

    def _verify(
        self,
        rows: Tensor,
        num_drafts: Tensor,
        cu_rows: Tensor,
        logits_slots: Tensor,
        positions: Tensor,
        output: TargetOutput,
        wanted: Features,
    ) -> RejectionOutputs:
        """Verifies the drafts of table `rows` [batch] and appends what was emitted."""
        table = self.table
        where = LogitsRows(logits_slots, positions)
        logits = process_logits(output.logits, where, self.settings, table.tokens, table.prompt_lens, wanted)
        law = table.draft_laws
        verified = verify_drafts(
            logits,
            table.drafts_of(rows, num_drafts),
            cu_rows,
            positions=table.num_known[rows],
            temperature=self.settings.temperature[rows],
            seeds=table.seeds[rows],
            draft_log_probs=None if law is None else law[rows],
            law_columns=None if law is None else self._law_columns,
            mode=self.verification.mode,
            rates=self.verification.rates,
        )
        table.append(rows, verified.token_ids, verified.num_emitted)
        return verified

    def _logprobs(
        self, verified: RejectionOutputs, cu_rows: Tensor, output: TargetOutput, wanted: Features
    ) -> Sequence[Tensor]:
        """Ids and log-probabilities [batch, k + 1, n + 1] of the emitted tokens, nothing where nobody asked."""
        if wanted.logprobs is None:
            return ()
        batch, width = verified.token_ids.shape
        rows = cu_rows[:-1, None] + torch.arange(width, device=cu_rows.device)
        rows = rows.clamp(max=output.logits.shape[0] - 1).flatten()
        found = top_logprobs(output.logits, rows, verified.token_ids.flatten(), wanted.logprobs)
        return [tensor.view(batch, width, -1) for tensor in found]

    def _draft(
        self,
        slots: Slots,
        packed: Packed,
        states: Tensor | None,
        drafting: Tensor,
        seen_ids: list[int],
        request_ids: list[int],
    ) -> None:
        """Shows the proposer every row and lets it draft for table rows `drafting` [batch], whose ids are the last."""
        table, batch = self.table, packed.batch
        if self.proposer.requirements.observes:
            last = (table.num_known[slots.rows] - 2 - slots.starts).clamp(min=0)
            self.proposer.observe(
                ObservedRows(
                    request_ids=seen_ids,
                    slots=slots.rows,
                    batch=batch,
                    next_token_ids=table.tokens[packed.slots, batch.positions + 1].long(),
                    last_rows=batch.cu_seqlens[:-1].long() + torch.minimum(last, slots.counts - 1),
                    states=states,
                )
            )
        if not self.num_draft_tokens or not drafting.shape[0]:
            return
        known, room = table.num_known[drafting], table.room(drafting, self.spare_slots)
        drafts = self.proposer.propose(
            DraftStep(
                request_ids=request_ids,
                slots=drafting,
                block_tables=table.block_tables[drafting],
                seq_lens=known,
                last_token_ids=table.tokens[drafting, known - 1].long(),
                room=room,
                temperature=self.settings.temperature[drafting],
                seeds=table.seeds[drafting],
            )
        )
        ids = drafts.token_ids
        # a placeholder or an id the target does not know ends the draft: the target must never embed it
        valid = ((ids >= 0) & (ids < self.target.vocab_size)).long().cumprod(dim=1)
        table.set_drafts(drafting, ids * valid, torch.minimum(torch.minimum(drafts.lengths, room), valid.sum(dim=1)))
        if drafts.log_probs is not None:
            table.set_laws(drafting, drafts.log_probs)
            if self._law_columns is None and drafts.token_map is not None:
                self._law_columns = law_columns(drafts.token_map, self.target.vocab_size)

    def _results(self, verified: RejectionOutputs, rows: Tensor, num_drafted: Tensor) -> Tensor:
        columns = (verified.num_emitted, verified.failed, num_drafted, self.table.num_drafts[rows])
        return torch.cat([verified.token_ids, torch.stack([column.long() for column in columns], dim=1)], dim=1)

    def _slots_of(self, batch: int) -> Slots:
        if batch not in self._buckets:
            empty = (torch.zeros(batch, dtype=torch.int64, device=self.table.device) for _ in range(3))
            self._buckets[batch] = Slots(*empty)
        return self._buckets[batch]

    def _upload(self, values: "Sequence[int] | np.ndarray") -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(self.table.device, non_blocking=True)


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


def _row_of(request: Request) -> int:
    assert request.slot is not None
    return request.slot


def _bucket(batch: int) -> int:
    """The smallest bucket that holds `batch` requests."""
    return next((size for size in BUCKETS if size >= batch), -(-batch // BUCKETS[-1]) * BUCKETS[-1])
