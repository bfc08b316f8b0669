"""Runs the stages of a step on the device, recorded where that pays, without waiting for the host.

The runner moves rows and tokens; it decides nothing about who runs (scheduler) or when a request ends (engine). What a
step needs of a request stands in the request table, so a step of decoding requests can be launched before the host has
read the step before it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kernels.records import RejectionOutputs
from .costs import Rehearsal, StepCosts, measure_costs, stopwatch
from .draft_policy import DraftPolicy, draft_widths
from .drafting import SurvivalEstimator
from .flight import Clock, Flight
from .graphs import GraphCache
from .proposers.base import Proposer
from .request import Request
from .sampling import NEUTRAL, Features, SamplingTable, features_of
from .scheduler import ScheduledRequest
from .stages import MixedPlan, Slots, Stages
from .table import Packed, RequestTable
from .target import Target, TargetOutput
from .verify import Verification

BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of requests a CUDA graph is captured for; beyond the last one batches grow by its size."""

MIXED_SIZES = (64, 128, 256, 512, 1024, 2048)
"""Rows that a step with prompt rows is padded to where it is recorded; longer ones keep a GPU busy without."""

RECORDED_LOGITS_BYTES = 2**28
"""Each recorded step keeps logits of its own."""


class Runner:
    """Lays out steps in buffers that never move and has their stages run, or replayed."""

    def __init__(
        self,
        target: Target,
        proposer: Proposer,
        table: RequestTable,
        settings: SamplingTable,
        graphs: GraphCache | None,
        *,
        verification: Verification,
        adaptive: bool = False,
    ) -> None:
        self.table, self.graphs, self.requirements = table, graphs, proposer.requirements
        self.num_draft_tokens = table.num_draft_tokens
        self.adaptive = adaptive and self.num_draft_tokens > 0
        # where the host drafts it knows how many drafts wait, so that steps need not have room for the most
        several = (self.adaptive or self.requirements.on_host) and self.num_draft_tokens > 0
        self.widths = draft_widths(self.num_draft_tokens) if several else (1, self.num_draft_tokens + 1)
        estimator = SurvivalEstimator(self.num_draft_tokens, table.device) if self.adaptive else None
        self.stages = Stages(target, proposer, table, settings, verification, estimator, self.widths)
        self.policy: DraftPolicy | None = None
        self._buckets: dict[int, Slots] = {}
        self._mixed_batch, self._mixed_sizes = 0, ()  # steps with prompt rows that are recorded
        self._mixed_buffer = torch.empty(5, 0, dtype=torch.int64, device=table.device)

    def launch(self, scheduled: Sequence[ScheduledRequest]) -> Flight:
        """Starts a step whose rows the host knows."""
        requests = [rows.request for rows in scheduled]
        samples = [rows.samples for rows in scheduled]
        flight = Flight(
            requests, samples, [rows.start + rows.num_tokens for rows in scheduled], Clock(self.table.device)
        )
        self.table.write_blocks(requests)
        drafts_wait = any(rows.num_drafts for rows in scheduled)
        if flight.all_sample and all(rows.num_tokens == rows.num_drafts + 1 for rows in scheduled):
            starts, counts = [rows.start for rows in scheduled], [rows.num_tokens for rows in scheduled]
            self._decode(flight, starts, counts, drafts_wait)
        else:
            self._mixed(flight, scheduled, drafts_wait)
        return flight

    def launch_ahead(self, requests: list[Request], drafts_wait: bool) -> Flight:
        """Starts a step of decoding requests of which an earlier step, which drafted or not, is still in flight."""
        flight = Flight(requests, [True] * len(requests), [], Clock(self.table.device))
        self.table.write_blocks(requests)
        self._decode(flight, None, None, drafts_wait)
        return flight

    def forget(self, request_id: int, finished: bool) -> None:
        """A request left, for good or to come back from its start."""
        if self.policy is not None:
            self.policy.forget(request_id, finished)

    def capture(self, max_batch_size: int) -> None:
        """Captures the graphs of every bucket up to `max_batch_size`, on rows that belong to nobody."""
        if self.graphs is None:
            return
        if self.requirements.draft_laws:
            # the first step verifies without the laws that it brings, and what is recorded must have run before
            self._run_decode(self._nobody(_bucket(max_batch_size), 1), _bucket(max_batch_size), NEUTRAL, None, [])
        for batch in sorted({_bucket(n) for n in range(1, max_batch_size + 1)}, reverse=True):
            slots = self._nobody(batch, 1)
            for width in sorted(set(self.widths)):
                self._run_decode(slots, batch * width, NEUTRAL, None, [])
                self._run_decode(slots, batch * width, NEUTRAL, self.graphs, [])
        self._capture_mixed(_bucket(max_batch_size))

    def run_plainly(self) -> None:
        """Records nothing any more and forgets what was: every step runs call by call."""
        self.graphs = None
        self._mixed_batch, self._mixed_sizes = 0, ()

    def _capture_mixed(self, batch: int) -> None:
        """Steps with prompt rows are recorded for `batch` requests, unless their logits would take much memory."""
        if (
            batch * (self.num_draft_tokens + 1) * self.stages.target.vocab_size * 4 > RECORDED_LOGITS_BYTES
            or self.requirements.on_host
            or self.stages.target.state_specs
        ):
            return  # the host drafts without padding; recurrent layers go by the longest piece, which is not known
        self._mixed_batch, self._mixed_sizes = batch, tuple(size for size in MIXED_SIZES if size >= batch)
        self._mixed_buffer = torch.zeros(5, batch, dtype=torch.int64, device=self.table.device)
        self._mixed_buffer[[0, 3]] = self.table.nobody
        self._mixed_buffer[2] = 1
        plan = self._buffered_plan()
        for num_rows in reversed(self._mixed_sizes):
            for graphs in (None, self.graphs):
                packed, output, _ = self._run_mixed(plan, num_rows, NEUTRAL, graphs, True)
                self._finish_mixed(plan, num_rows, packed, output, graphs, [], [], True)

    def measure(self, max_batch_size: int) -> StepCosts:
        """What steps cost at batch sizes up to `max_batch_size`, at every width where steps are recorded."""
        table = self.table
        batches, widths = (1, max_batch_size), (1, self.num_draft_tokens + 1)
        if self.graphs is not None:
            batches, widths = {_bucket(n) for n in range(1, max_batch_size + 1)}, self.widths
        table.limits[table.nobody] = table.capacities[table.nobody] = table.max_length  # room to draft
        costs = measure_costs(self._rehearse, sorted(set(batches)), sorted(set(widths)), stopwatch(table.device))
        table.limits[table.nobody] = table.capacities[table.nobody] = 0
        return costs

    def _rehearse(self, batch: int, width: int) -> Rehearsal:
        slots, num_rows = self._nobody(batch, width), batch * width
        packed, output = self._call(self.graphs, "target", (batch, num_rows), self.stages.forward, slots, num_rows)

        def verify() -> None:
            self._run_target(slots, num_rows, NEUTRAL, self.graphs)

        def rest() -> None:
            if self.requirements.observes and not self.requirements.on_host:
                self._call(
                    self.graphs, "observe", (batch, num_rows), self.stages.observe, slots, packed, output.states, []
                )

        def draft() -> None:
            if self.num_draft_tokens and not self.requirements.on_host:
                self._call(self.graphs, "propose", (batch,), self.stages.propose, slots.rows, [])

        return Rehearsal(verify, rest, draft)

    def _nobody(self, batch: int, width: int) -> Slots:
        """`width` rows for each of `batch` requests that are none."""
        slots = self._slots_of(batch)
        slots.rows.fill_(self.table.nobody)
        slots.starts.zero_()
        slots.counts.fill_(width)
        return slots

    def _decode(self, flight: Flight, starts: list[int] | None, counts: list[int] | None, drafts_wait: bool) -> None:
        """A step in which every request computes its newest token and its drafts, and samples."""
        rows = [_row_of(request) for request in flight.requests]
        ids = [request.request_id for request in flight.requests]
        flight.padded = batch = len(rows) if self.graphs is None else _bucket(len(rows))
        width = self.num_draft_tokens + 1
        if counts is not None:
            total = sum(counts) + batch - len(rows)
            width = next(width for width in self.widths if batch * width >= total)
        if self.policy is not None:
            flight.choice = self.policy.choose(ids, batch, drafts_wait)
            width, flight.drafts = flight.choice
        num_rows = batch * width
        if self.graphs is None:
            slots = Slots(self._upload(rows), *self._spans(rows, starts, counts))
            if counts is not None:
                num_rows = min(num_rows, sum(counts))
        else:
            slots = self._slots_of(batch)
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
        results, accepted = self._run_decode(slots, num_rows, wanted, self.graphs, ids, flight.drafts, flight.clock)
        self._promise(flight, ids, accepted)
        flight.keep([tensor[: len(rows)] for tensor in results])

    def _promise(self, flight: Flight, request_ids: list[int], accepted: Tensor | None) -> None:
        if self.policy is not None and accepted is not None:
            flight.keep_promise(self.policy.promise(request_ids), accepted)

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
        wanted: Features,
        graphs: GraphCache | None,
        request_ids: list[int],
        drafts: bool = True,
        clock: Clock | None = None,
    ) -> tuple[list[Tensor], Tensor | None]:
        """What `Flight.keep` takes: tokens, how many, failed, drafts verified, drafts waiting; log-probabilities.

        And what the new drafts promise. Where `num_rows` do not hold all drafts that `slots` count, those that are
        verified are chosen and counted.
        """
        batch = slots.rows.shape[0]
        packed, output, verified = self._run_target(slots, num_rows, wanted, graphs)
        logprobs = self.stages.logprobs(verified, packed.batch.cu_seqlens, output, wanted)
        if clock is not None:
            clock.mark("verified")
        if self.requirements.observes:
            key = (batch, num_rows)
            self._call(
                self._own(graphs), "observe", key, self.stages.observe, slots, packed, output.states, request_ids
            )
        accepted = None
        if self.num_draft_tokens and drafts:
            accepted = self._call(self._own(graphs), "propose", (batch,), self.stages.propose, slots.rows, request_ids)
        if clock is not None:
            clock.mark("drafted")
        return [self.stages.results(verified, slots.rows, slots.counts - 1), *logprobs], accepted

    def _run_target(
        self, slots: Slots, num_rows: int, wanted: Features, graphs: GraphCache | None
    ) -> tuple[Packed, TargetOutput, RejectionOutputs]:
        batch = slots.rows.shape[0]
        key = (batch, num_rows)
        if self.adaptive and num_rows < batch * (self.num_draft_tokens + 1):
            self._call(graphs, "select", key, self.stages.select, slots, num_rows - batch)
        packed, output = self._call(graphs, "target", key, self.stages.forward, slots, num_rows)
        # settings beyond the temperature change which kernels run, so they are not replayed
        verified = self._call(
            None if wanted.edits else graphs, "verify", key, self.stages.verify, slots, packed, output, wanted
        )
        return packed, output, verified

    def _own(self, graphs: GraphCache | None) -> GraphCache | None:
        """Where the proposer's calls are recorded: nowhere if it reads them on the host."""
        return None if self.requirements.on_host else graphs

    @staticmethod
    def _call(
        graphs: GraphCache | None,
        name: str,
        key: tuple[int | str, ...],
        function: Callable[..., Any],
        *arguments: object,
    ) -> Any:
        return function(*arguments) if graphs is None else graphs.run((name, *key), function, *arguments)

    def _mixed(self, flight: Flight, scheduled: Sequence[ScheduledRequest], drafts_wait: bool) -> None:
        """A step with prompt rows: logits are asked for where requests sample, and only those draft."""
        sampler_ids = [rows.request.request_id for rows in scheduled if rows.samples]
        if self.policy is not None and sampler_ids:
            width, flight.drafts = self.policy.choose(sampler_ids, len(sampler_ids), drafts_wait)
            scheduled = [_shortened(rows, width - 1) for rows in scheduled]
        wanted = features_of([rows.request.params for rows in scheduled if rows.samples])
        total, batch = sum(rows.num_tokens for rows in scheduled), len(scheduled)
        recorded = next((size for size in self._mixed_sizes if size >= total + self._mixed_batch - batch), None)
        graphs = None if recorded is None else self.graphs
        if recorded is None:
            plan, num_rows = self._exact_plan(scheduled), total
        else:
            plan, num_rows = self._padded_plan(scheduled), recorded
        packed, output, verified = self._run_mixed(plan, num_rows, wanted, graphs, bool(sampler_ids))
        logprobs = () if verified is None else self.stages.logprobs(verified, plan.cu_rows, output, wanted)
        flight.clock.mark("verified")
        ids = [rows.request.request_id for rows in scheduled]
        accepted = self._finish_mixed(
            plan, num_rows, packed, output, graphs, ids, sampler_ids, flight.drafts and bool(sampler_ids)
        )
        if sampler_ids:
            self._promise(flight, sampler_ids, accepted)
        flight.clock.mark("drafted")
        if verified is not None:
            results = [self.stages.results(verified, plan.sampling, plan.num_drafts), *logprobs]
            if recorded is not None:
                asked = self._upload([i for i, rows in enumerate(scheduled) if rows.samples])
                results = [tensor[asked] for tensor in results]
            flight.keep(results)

    def _run_mixed(
        self, plan: MixedPlan, num_rows: int, wanted: Features, graphs: GraphCache | None, samples: bool
    ) -> tuple[Packed, TargetOutput, RejectionOutputs | None]:
        key = ("mixed", num_rows)
        packed, output = self._call(graphs, "target", key, self.stages.forward_mixed, plan, num_rows)
        if not samples:
            return packed, output, None
        run = None if wanted.edits else graphs
        return packed, output, self._call(run, "verify", key, self.stages.verify_mixed, plan, packed, output, wanted)

    def _finish_mixed(
        self,
        plan: MixedPlan,
        num_rows: int,
        packed: Packed,
        output: TargetOutput,
        graphs: GraphCache | None,
        request_ids: list[int],
        sampler_ids: list[int],
        drafts: bool,
    ) -> Tensor | None:
        if self.requirements.observes:
            key = ("mixed", num_rows)
            self._call(graphs, "observe", key, self.stages.observe, plan.slots, packed, output.states, request_ids)
        if not self.num_draft_tokens or not drafts:
            return None
        return self._call(graphs, "propose", ("mixed",), self.stages.propose, plan.sampling, sampler_ids)

    def _exact_plan(self, scheduled: Sequence[ScheduledRequest]) -> MixedPlan:
        """What the host knows of a step, and nothing beside it."""
        asked = [i for i, rows in enumerate(scheduled) if rows.samples]
        samplers = [scheduled[i] for i in asked]
        slots = Slots(
            self._upload([_row_of(rows.request) for rows in scheduled]),
            self._upload([rows.start for rows in scheduled]),
            self._upload([rows.num_tokens for rows in scheduled]),
        )
        return MixedPlan(
            slots=slots,
            asked=self._upload(asked),
            sampling=self._upload([_row_of(rows.request) for rows in samplers]),
            num_drafts=self._upload([rows.num_drafts for rows in samplers]),
            width=1 + max((rows.num_drafts for rows in samplers), default=0),
            longest=max(rows.num_tokens for rows in scheduled),
            max_seq_len=max(rows.start + rows.num_tokens for rows in scheduled),
        )

    def _padded_plan(self, scheduled: Sequence[ScheduledRequest]) -> MixedPlan:
        """The same in buffers that never move: as many requests as can be, those that do not sample as nobody's."""
        nobody, padding = self.table.nobody, self._mixed_batch - len(scheduled)
        columns = (
            [_row_of(rows.request) for rows in scheduled] + [nobody] * padding,
            [rows.start for rows in scheduled] + [0] * padding,
            [rows.num_tokens for rows in scheduled] + [1] * padding,
            [_row_of(rows.request) if rows.samples else nobody for rows in scheduled] + [nobody] * padding,
            [rows.num_drafts if rows.samples else 0 for rows in scheduled] + [0] * padding,
        )
        self._mixed_buffer.copy_(self._upload(np.asarray(columns)))
        return self._buffered_plan()

    def _buffered_plan(self) -> MixedPlan:
        rows, starts, counts, sampling, num_drafts = self._mixed_buffer
        return MixedPlan(
            slots=Slots(rows, starts, counts),
            asked=None,
            sampling=sampling,
            num_drafts=num_drafts,
            width=self.num_draft_tokens + 1,
            longest=None,
            max_seq_len=self.table.max_length,
        )

    def _slots_of(self, batch: int) -> Slots:
        if batch not in self._buckets:
            empty = (torch.zeros(batch, dtype=torch.int64, device=self.table.device) for _ in range(3))
            self._buckets[batch] = Slots(*empty)
        return self._buckets[batch]

    def _upload(self, values: "Sequence[int] | np.ndarray") -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(self.table.device, non_blocking=True)


def _shortened(rows: ScheduledRequest, num_drafts: int) -> ScheduledRequest:
    """The same rows with at most so many drafts."""
    dropped = max(rows.num_drafts - num_drafts, 0)
    return rows._replace(num_tokens=rows.num_tokens - dropped, num_drafts=rows.num_drafts - dropped)


def _row_of(request: Request) -> int:
    assert request.slot is not None
    return request.slot


def _bucket(batch: int) -> int:
    """The smallest bucket that holds `batch` requests."""
    return next((size for size in BUCKETS if size >= batch), -(-batch // BUCKETS[-1]) * BUCKETS[-1])
