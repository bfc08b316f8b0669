"""Runs the stages of a step on the device, recorded where that pays, without waiting for the host.

The runner moves rows and tokens; it decides nothing about who runs (scheduler) or when a request ends (engine). What a
step needs of a request stands in the request table, so a step of decoding requests can be launched before the host has
read the step before it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..kernels.records import RejectionOutputs
from .costs import Rehearsal, StepCosts, measure_costs, stopwatch
from .draft_policy import DraftPolicy, draft_widths
from .flight import Clock, Flight, Undrafted
from .graphs import GraphCache
from .layout import Layout, MixedPlan, Slots, bucket
from .proposers.base import Drafts, Proposer
from .request import Request
from .sampling import NEUTRAL, Features, SamplingTable, features_of
from .scheduler import ScheduledRequest
from .stages import Stages
from .survival import SurvivalEstimator
from .table import Packed, RequestTable
from .target import Target, TargetOutput
from .verify import Verification

RECORDED_LOGITS_BYTES = 2**28
"""Each recorded step keeps logits of its own."""


class Proposed(NamedTuple):
    """What is known of a step's new drafts."""

    promised: Tensor | None  # for adaptive drafting: accepted drafts a request by width, `survival.expected_accepted`
    at_most: Sequence[int] | None = None  # drafts of each request, where the host knows them


class Runner:
    """Has the stages of steps run, or replayed."""

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
        self.layout = Layout(table)
        self.num_draft_tokens = table.num_draft_tokens
        self.adaptive = adaptive and self.num_draft_tokens > 0
        # where the host drafts it knows how many drafts wait, so that steps need not have room for the most
        several = (self.adaptive or self.requirements.on_host) and self.num_draft_tokens > 0
        self.widths = draft_widths(self.num_draft_tokens) if several else (1, self.num_draft_tokens + 1)
        estimator = SurvivalEstimator(self.num_draft_tokens, table.device) if self.adaptive else None
        self.stages = Stages(target, proposer, table, settings, verification, estimator, self.widths)
        self.policy: DraftPolicy | None = None
        self._kept: dict[int, Drafts] = {}  # of the host, where recorded calls read them, by padded batch

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
            self._decode(flight, starts, counts, counts, drafts_wait)
        else:
            self._mixed(flight, scheduled, drafts_wait)
        self._draft_at_once(flight)
        return flight

    def launch_ahead(self, requests: list[Request], before: Flight) -> Flight:
        """Starts a step of decoding requests of which an earlier one is still in flight."""
        flight = Flight(requests, [True] * len(requests), [], Clock(self.table.device))
        self.table.write_blocks(requests)
        most = None
        if before.at_most is not None:
            most = [1 + before.at_most.get(request.request_id, 0) for request in requests]
        self._decode(flight, None, None, most, before.drafts)
        self._draft_at_once(flight)
        return flight

    def draft(self, flight: Flight) -> None:
        """Has the requests of a launched step draft, unless they did or ended since, and its results copied.

        A host that drafts waits for the step here; until then it may read the one before. Whatever a proposer raises,
        the step is whole and can be landed.
        """
        step, flight.undrafted = flight.undrafted, None
        if step is None:
            return
        requests = flight.samplers
        try:
            self._draft(flight, step, requests)
        finally:
            flight.clock.mark("drafted")
            results = [self.stages.results(step.verified, step.drafting, step.num_drafted), *step.logprobs]
            places = slice(len(requests)) if step.places is None else self.layout.upload(step.places)
            flight.keep([tensor[places] for tensor in results])

    def _draft_at_once(self, flight: Flight) -> None:
        if not self.requirements.on_host:
            self.draft(flight)

    def _draft(self, flight: Flight, step: Undrafted, requests: Sequence[Request]) -> None:
        alive = [i for i, request in enumerate(requests) if not request.finish_reason]
        if not (flight.drafts and alive and self.num_draft_tokens):
            return
        ids = [requests[i].request_id for i in alive]
        places = step.places or range(len(requests))
        asked = None if step.places is None and len(alive) == len(requests) else [places[i] for i in alive]
        proposed = self._propose(step.graphs, step.key, step.drafting, ids, asked)
        if proposed.at_most is not None:
            flight.at_most = dict(zip(ids, proposed.at_most, strict=True))
        if self.policy is not None and proposed.promised is not None:
            flight.keep_promise(self.policy.promise(ids), proposed.promised)

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
            self._run_nobody(bucket(max_batch_size), 1, None)
        for batch in sorted({bucket(n) for n in range(1, max_batch_size + 1)}, reverse=True):
            for width in sorted(set(self.widths)):
                for graphs in (None, self.graphs):
                    self._run_nobody(batch, width, graphs)
        self._capture_mixed(bucket(max_batch_size))

    def _run_nobody(self, batch: int, width: int, graphs: GraphCache | None) -> None:
        slots, num_rows = self.layout.nobody(batch, 1), batch * width
        packed, output, _ = self._run_target(slots, num_rows, NEUTRAL, graphs)
        self._observe(graphs, (batch, num_rows), slots, packed, output.states, [])
        if self.num_draft_tokens:
            self._propose(graphs, batch, slots.rows, [])

    def run_plainly(self) -> None:
        """Records nothing any more and forgets what was: every step runs call by call."""
        self.graphs = None
        self.layout.pad_mixed(0)

    def _capture_mixed(self, batch: int) -> None:
        """Steps with prompt rows are recorded for `batch` requests, unless their logits would take much memory."""
        if (
            batch * (self.num_draft_tokens + 1) * self.stages.target.vocab_size * 4 > RECORDED_LOGITS_BYTES
            or self.stages.target.state_specs
        ):
            return  # recurrent layers go by the longest piece, which is not known
        self.layout.pad_mixed(batch)
        plan = self.layout.buffered()
        for num_rows in reversed(self.layout.mixed_sizes):
            for graphs in (None, self.graphs):
                packed, output, _ = self._run_mixed(plan, num_rows, NEUTRAL, graphs, True)
                self._observe(graphs, ("mixed", num_rows), plan.slots, packed, output.states, [])
                if self.num_draft_tokens:
                    self._propose(graphs, "mixed", plan.sampling, [], [])

    def measure(self, max_batch_size: int) -> StepCosts:
        """What steps cost at batch sizes up to `max_batch_size`, at every width where steps are recorded."""
        table = self.table
        batches, widths = (1, max_batch_size), (1, self.num_draft_tokens + 1)
        if self.graphs is not None:
            batches, widths = {bucket(n) for n in range(1, max_batch_size + 1)}, self.widths
        table.limits[table.nobody] = table.capacities[table.nobody] = table.max_length  # room to draft
        costs = measure_costs(self._rehearse, sorted(set(batches)), sorted(set(widths)), stopwatch(table.device))
        table.limits[table.nobody] = table.capacities[table.nobody] = 0
        return costs

    def _rehearse(self, batch: int, width: int) -> Rehearsal:
        slots, num_rows = self.layout.nobody(batch, width), batch * width
        packed, output = self._call(self.graphs, "target", (batch, num_rows), self.stages.forward, slots, num_rows)

        def verify() -> None:
            self._run_target(slots, num_rows, NEUTRAL, self.graphs)

        def rest() -> None:
            if not self.stages.observer.requirements.on_host:
                self._observe(self.graphs, (batch, num_rows), slots, packed, output.states, [])

        def draft() -> None:
            if self.num_draft_tokens and not self.requirements.on_host:
                self._propose(self.graphs, batch, slots.rows, [])
            elif self.num_draft_tokens and not self.stages.observer.requirements.on_host:
                self._propose_within(self.graphs, batch, slots.rows, None, [])

        return Rehearsal(verify, rest, draft)

    def _decode(
        self,
        flight: Flight,
        starts: list[int] | None,
        counts: list[int] | None,
        most: list[int] | None,
        drafts_wait: bool,
    ) -> None:
        """A step in which every request computes its newest token and its drafts, at `most` so many rows, and samples.

        Where the rows do not hold all drafts that wait, those that are verified are chosen and counted.
        """
        requests, recorded = flight.requests, self.graphs is not None
        ids = [request.request_id for request in requests]
        flight.padded = batch = bucket(len(requests)) if recorded else len(requests)
        width = self.num_draft_tokens + 1
        if most is not None:
            total = sum(most) + batch - len(requests)
            width = next(width for width in self.widths if batch * width >= total)
        if self.policy is not None:
            flight.choice = self.policy.choose(ids, batch, drafts_wait)
            width, flight.drafts = flight.choice
        num_rows = batch * width
        if counts is not None and not recorded:
            num_rows = min(num_rows, sum(counts))
        slots = self.layout.decode(requests, starts, counts, batch if recorded else None)
        wanted = features_of([request.params for request in requests])
        packed, output, verified = self._run_target(slots, num_rows, wanted, self.graphs)
        logprobs = self.stages.logprobs(verified, packed.batch.cu_seqlens, output, wanted)
        flight.clock.mark("verified")
        self._observe(self.graphs, (batch, num_rows), slots, packed, output.states, ids)
        flight.undrafted = Undrafted(batch, self.graphs, slots.rows, None, slots.counts - 1, verified, logprobs)

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

    def _observe(
        self,
        graphs: GraphCache | None,
        key: tuple[int | str, ...],
        slots: Slots,
        packed: Packed,
        states: Tensor | None,
        request_ids: list[int],
    ) -> None:
        of_observer = self.stages.observer.requirements
        if of_observer.observes:
            graphs = None if of_observer.on_host else graphs
            self._call(graphs, "observe", key, self.stages.observe, slots, packed, states, request_ids)

    def _propose(
        self,
        graphs: GraphCache | None,
        key: int | str,
        drafting: Tensor,
        request_ids: list[int],
        asked: Sequence[int] | None = None,
    ) -> Proposed:
        """Drafts for table rows `drafting` [batch].

        `asked` are the places of the requests in it where others than padding stand between them, which a proposer on
        the host is not shown.
        """
        if not self.requirements.on_host:
            return Proposed(self._call(graphs, "propose", (key,), self.stages.propose, drafting, request_ids))
        places = None if asked is None else self.layout.upload(asked)
        shown = drafting if places is None else drafting[places]
        inner = self._propose_within(graphs, key, drafting, places, request_ids)
        drafts = self.stages.host_drafts(shown, request_ids, inner)
        if graphs is None or places is not None or drafts.log_probs is not None:
            return Proposed(self.stages.take(shown, drafts), drafts.at_most)
        kept = self._kept.setdefault(len(drafting), drafts)  # the first ones' own buffers
        kept.copy_(drafts)
        return Proposed(self._call(graphs, "take", (key,), self.stages.take, drafting, kept), drafts.at_most)

    def _propose_within(
        self, graphs: GraphCache | None, key: int | str, drafting: Tensor, places: Tensor | None, request_ids: list[int]
    ) -> Drafts | None:
        """What the proposer within one on the host drafts, if there is one, for the requests at `places`."""
        observer = self.stages.observer
        if observer is self.stages.proposer:
            return None
        if observer.requirements.on_host:
            return self.stages.inner_drafts(drafting if places is None else drafting[places], request_ids)
        drafts = self._call(graphs, "draft", (key,), self.stages.inner_drafts, drafting, request_ids)
        return drafts if places is None else drafts.of(places)

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
        recorded = self.layout.padded_size(total, batch)
        graphs = None if recorded is None else self.graphs
        if recorded is None:
            plan, num_rows = self.layout.exact(scheduled), total
        else:
            plan, num_rows = self.layout.padded(scheduled), recorded
        packed, output, verified = self._run_mixed(plan, num_rows, wanted, graphs, bool(sampler_ids))
        logprobs = () if verified is None else self.stages.logprobs(verified, plan.cu_rows, output, wanted)
        flight.clock.mark("verified")
        ids = [rows.request.request_id for rows in scheduled]
        self._observe(graphs, ("mixed", num_rows), plan.slots, packed, output.states, ids)
        if verified is None:
            flight.clock.mark("drafted")
            return
        places = None if recorded is None else [i for i, rows in enumerate(scheduled) if rows.samples]
        flight.undrafted = Undrafted("mixed", graphs, plan.sampling, places, plan.num_drafts, verified, logprobs)

    def _run_mixed(
        self, plan: MixedPlan, num_rows: int, wanted: Features, graphs: GraphCache | None, samples: bool
    ) -> tuple[Packed, TargetOutput, RejectionOutputs | None]:
        key = ("mixed", num_rows)
        packed, output = self._call(graphs, "target", key, self.stages.forward_mixed, plan, num_rows)
        if not samples:
            return packed, output, None
        run = None if wanted.edits else graphs
        return packed, output, self._call(run, "verify", key, self.stages.verify_mixed, plan, packed, output, wanted)


def _shortened(rows: ScheduledRequest, num_drafts: int) -> ScheduledRequest:
    """The same rows with at most so many drafts."""
    dropped = max(rows.num_drafts - num_drafts, 0)
    return rows._replace(num_tokens=rows.num_tokens - dropped, num_drafts=rows.num_drafts - dropped)
