"""Runs the stages of a step on the device, recorded where that pays, without waiting for the host.

The runner moves rows and tokens; it decides nothing about who runs (scheduler) or when a request ends (engine). What a
step needs of a request stands in the request table, so a step of decoding requests can be launched before the host has
read the step before it.
"""

from collections.abc import Sequence

from torch import Tensor

from .costs import Rehearsal, StepCosts, measure_costs, stopwatch
from .draft_policy import DraftPolicy, draft_widths
from .flight import Clock, Flight, Undrafted
from .graphs import GraphCache, call
from .host_drafting import HostDrafting
from .layout import Layout, MixedPlan, Slots, bucket
from .memory import free_memory
from .proposers.base import Drafts, Proposer
from .proposers.host import HostProposer, ragged
from .request import Request
from .sampling import NEUTRAL, Features, SamplingTable, features_of
from .scheduler import ScheduledRequest
from .stages import Stages
from .survival import SurvivalEstimator
from .table import Packed, RequestTable
from .target import Target, TargetOutput
from .verify import Verification

LOGITS_SHARE = 0.25
"""Of the memory that is free when steps with prompt rows are recorded: each keeps logits of its own."""


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
        max_batch_tokens: int,
        adaptive: bool = False,
    ) -> None:
        self.table, self.graphs, self.requirements = table, graphs, proposer.requirements
        self.layout, self.max_batch_tokens = Layout(table), max_batch_tokens
        self.num_draft_tokens = table.num_draft_tokens
        self.adaptive = adaptive and self.num_draft_tokens > 0
        on_host = isinstance(proposer, HostProposer)
        # where the host drafts it knows how many drafts wait, so that steps need not have room for the most
        several = (self.adaptive or on_host) and self.num_draft_tokens > 0
        self.widths = draft_widths(self.num_draft_tokens) if several else (1, self.num_draft_tokens + 1)
        estimator = SurvivalEstimator(self.num_draft_tokens, table.device) if self.adaptive else None
        self.stages = Stages(target, proposer, table, settings, verification, estimator, self.widths)
        self.host = HostDrafting(proposer, self.stages) if on_host else None
        self.policy: DraftPolicy | None = None

    def admit(self, request: Request) -> None:
        """A request got its row of the request table."""
        if self.host is not None and request.slot is not None:
            self.host.texts.admit(request.slot, request.token_ids, len(request.prompt_token_ids))

    def launch(self, scheduled: Sequence[ScheduledRequest]) -> Flight:
        """Starts a step whose rows the host knows."""
        requests = [rows.request for rows in scheduled]
        samples = [rows.samples for rows in scheduled]
        flight = self._flight(requests, samples, [rows.start + rows.num_tokens for rows in scheduled])
        self.table.write_blocks(requests)
        flight.wanted = _wanted_by(flight.samplers)
        drafts_wait = any(rows.num_drafts for rows in scheduled)
        if flight.all_sample and all(rows.num_tokens == rows.num_drafts + 1 for rows in scheduled):
            starts, counts = [rows.start for rows in scheduled], [rows.num_tokens for rows in scheduled]
            self._decode(flight, starts, counts, counts, drafts_wait)
        else:
            self._mixed(flight, scheduled, drafts_wait)
        return flight

    def launch_ahead(self, requests: list[Request], before: Flight) -> Flight:
        """Starts a step of decoding requests, whose blocks are written, behind one that was not read yet."""
        flight = self._flight(requests, [True] * len(requests), [])
        most = None
        if before.waiting is not None:
            most = [1 + before.waiting.get(request.request_id, 0) for request in requests]
        flight.wanted = before.wanted if requests == before.requests else _wanted_by(requests)
        self._decode(flight, None, None, most, before.drafts)
        return flight

    def _flight(self, requests: list[Request], samples: list[bool], ends: list[int]) -> Flight:
        return Flight(requests, samples, ends, Clock(self.table.device), drafts=self.num_draft_tokens > 0)

    def draft(self, flight: Flight) -> None:
        """Has the requests of a launched step draft, unless they did or ended since.

        A host that drafts waits for the step here; until then it may read the one before. Whatever a proposer raises,
        the step is whole and can be landed.
        """
        step, flight.undrafted = flight.undrafted, None
        if step is None:
            return
        try:
            promised = self._draft_on_device(flight, step) if self.host is None else self.host.draft(flight, step)
            if self.policy is not None and promised is not None:
                ids = [request.request_id for request in flight.alive.values()]
                flight.keep_promise(self.policy.promise(ids), promised)
        finally:
            flight.clock.mark("drafted")
            if self.host is None:
                flight.keep(step, self.table.num_drafts[step.drafting, None] if flight.drafts else None)

    def _draft_on_device(self, flight: Flight, step: Undrafted) -> Tensor | None:
        alive = flight.alive
        if not (flight.drafts and alive):
            return None
        drafting, ids = step.drafting, [request.request_id for request in alive.values()]
        if self.requirements.on_host:
            # it goes by the ids: rows of others than these must not stand between theirs
            drafting = drafting[self.table.upload(step.places_of(alive))]
        return self._propose(step.graphs, step.key, drafting, ids)

    def _verified(self, flight: Flight, step: Undrafted, request_ids: list[int]) -> None:
        """Has a step drafted, or told to the host that will."""
        flight.undrafted = step
        if self.host is not None:
            brief = None
            if flight.drafts and not self.host.inner_on_host:
                inner, brief = self._brief(step.graphs, step.key, step.drafting, request_ids)
                flight.undrafted = step._replace(inner=inner)
            flight.keep(step, brief)
        elif not self.requirements.on_host:
            self.draft(flight)

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
        call(graphs, ("follow", batch), self.stages.follow, slots)
        packed, output, told = self._run_target(slots, num_rows, NEUTRAL, graphs)
        self._observe(graphs, (batch, num_rows), slots, packed, output.states, [])
        self._propose_for_nobody(graphs, batch, slots.rows, told)

    def _propose_for_nobody(self, graphs: GraphCache | None, key: int | str, drafting: Tensor, told: Tensor) -> None:
        if not self.num_draft_tokens:
            return
        if self.host is None:
            self._propose(graphs, key, drafting, [])
            return
        graphs = None if self.host.inner_on_host else graphs
        inner, _ = self._brief(graphs, key, drafting, [])
        step = Undrafted(key, graphs, drafting, [], told, (), inner)
        self.host.take(step, ragged([], self.num_draft_tokens), [])

    def run_plainly(self) -> None:
        """Records nothing any more and forgets what was: every step runs call by call."""
        self.graphs = None
        self.layout.pad_mixed(0)

    def _capture_mixed(self, batch: int) -> None:
        """Steps with prompt rows are recorded for `batch` requests, unless their logits would take much memory."""
        if self.stages.target.state_specs:
            return  # recurrent layers go by the longest piece, which is not known
        self.layout.pad_mixed(batch, self.max_batch_tokens)
        each = batch * (self.num_draft_tokens + 1) * self.stages.target.vocab_size * 4
        if len(self.layout.mixed_sizes) * each > LOGITS_SHARE * free_memory(self.table.device):
            self.layout.pad_mixed(0)
        plan = self.layout.buffered()
        for num_rows in reversed(self.layout.mixed_sizes):
            for graphs in (None, self.graphs):
                packed, output, told = self._run_mixed(plan, num_rows, NEUTRAL, graphs, True)
                self._observe(graphs, ("mixed", num_rows), plan.slots, packed, output.states, [])
                assert told is not None
                self._propose_for_nobody(graphs, "mixed", plan.sampling, told)

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
        packed, output = call(self.graphs, ("target", batch, num_rows), self.stages.forward, slots, num_rows)

        def verify() -> None:
            self._run_target(slots, num_rows, NEUTRAL, self.graphs)

        def rest() -> None:
            if not self.stages.observer.requirements.on_host:
                self._observe(self.graphs, (batch, num_rows), slots, packed, output.states, [])

        def draft() -> None:
            if not self.num_draft_tokens or self.stages.observer.requirements.on_host:
                return
            if self.host is None:
                self._propose(self.graphs, batch, slots.rows, [])
            else:
                self._brief(self.graphs, batch, slots.rows, [])

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
        if starts is None:
            call(self.graphs, ("follow", batch), self.stages.follow, slots)
        packed, output, told = self._run_target(slots, num_rows, flight.wanted, self.graphs)
        logprobs = self.stages.logprobs(told, packed.batch.cu_seqlens, output, flight.wanted)
        flight.clock.mark("verified")
        self._observe(self.graphs, (batch, num_rows), slots, packed, output.states, ids)
        step = Undrafted(batch, self.graphs, slots.rows, slice(len(requests)), told, logprobs)
        self._verified(flight, step, ids)

    def _run_target(
        self, slots: Slots, num_rows: int, wanted: Features, graphs: GraphCache | None
    ) -> tuple[Packed, TargetOutput, Tensor]:
        batch = slots.rows.shape[0]
        key = (batch, num_rows)
        if self.adaptive and num_rows < batch * (self.num_draft_tokens + 1):
            call(graphs, ("select", *key), self.stages.select, slots, num_rows - batch)
        packed, output = call(graphs, ("target", *key), self.stages.forward, slots, num_rows)
        # settings beyond the temperature change which kernels run, so they are not replayed
        run = None if wanted.edits else graphs
        return packed, output, call(run, ("verify", *key), self.stages.verify, slots, packed, output, wanted)

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
            call(graphs, ("observe", *key), self.stages.observe, slots, packed, states, request_ids)

    def _propose(
        self, graphs: GraphCache | None, key: int | str, drafting: Tensor, request_ids: list[int]
    ) -> Tensor | None:
        """Has a proposer on the device draft for table rows `drafting` [batch]; `Stages.propose`."""
        graphs = None if self.requirements.on_host else graphs
        return call(graphs, ("propose", key), self.stages.propose, drafting, request_ids)

    def _brief(
        self, graphs: GraphCache | None, key: int | str, drafting: Tensor, request_ids: list[int]
    ) -> tuple[Drafts | None, Tensor]:
        """What a proposer on the host goes by for table rows `drafting` [batch]; `Stages.brief`."""
        return call(graphs, ("brief", key), self.stages.brief, drafting, request_ids)

    def _mixed(self, flight: Flight, scheduled: Sequence[ScheduledRequest], drafts_wait: bool) -> None:
        """A step with prompt rows: logits are asked for where requests sample, and only those draft."""
        sampler_ids = [rows.request.request_id for rows in scheduled if rows.samples]
        if self.policy is not None and sampler_ids:
            width, flight.drafts = self.policy.choose(sampler_ids, len(sampler_ids), drafts_wait)
            scheduled = [_shortened(rows, width - 1) for rows in scheduled]
        total, batch = sum(rows.num_tokens for rows in scheduled), len(scheduled)
        recorded = self.layout.padded_size(total, batch)
        graphs = None if recorded is None else self.graphs
        if recorded is None:
            plan, num_rows = self.layout.exact(scheduled), total
        else:
            plan, num_rows = self.layout.padded(scheduled), recorded
        packed, output, told = self._run_mixed(plan, num_rows, flight.wanted, graphs, bool(sampler_ids))
        logprobs = () if told is None else self.stages.logprobs(told, plan.cu_rows, output, flight.wanted)
        flight.clock.mark("verified")
        ids = [rows.request.request_id for rows in scheduled]
        self._observe(graphs, ("mixed", num_rows), plan.slots, packed, output.states, ids)
        if told is None:
            flight.clock.mark("drafted")
            return
        places = [i for i, rows in enumerate(scheduled) if rows.samples]
        at = slice(len(places)) if recorded is None else places
        self._verified(flight, Undrafted("mixed", graphs, plan.sampling, at, told, logprobs), sampler_ids)

    def _run_mixed(
        self, plan: MixedPlan, num_rows: int, wanted: Features, graphs: GraphCache | None, samples: bool
    ) -> tuple[Packed, TargetOutput, Tensor | None]:
        key = ("mixed", num_rows)
        packed, output = call(graphs, ("target", *key), self.stages.forward_mixed, plan, num_rows)
        if not samples:
            return packed, output, None
        run = None if wanted.edits else graphs
        return packed, output, call(run, ("verify", *key), self.stages.verify_mixed, plan, packed, output, wanted)


def _wanted_by(requests: Sequence[Request]) -> Features:
    """What any of the requests asks for."""
    return features_of([request.params for request in requests])


def _shortened(rows: ScheduledRequest, num_drafts: int) -> ScheduledRequest:
    """The same rows with at most so many drafts."""
    dropped = max(rows.num_drafts - num_drafts, 0)
    return rows._replace(num_tokens=rows.num_tokens - dropped, num_drafts=rows.num_drafts - dropped)
