"""Requests in, outputs and statistics out: continuous batching around one target and one proposer.

Plain decoding is a proposer that proposes nothing; it runs in the same loop as every method.
"""

import itertools
import operator
import secrets
import time
from collections.abc import Callable, Sequence

import torch

from ..kernels.records import VerifyMode
from .config import EngineConfig
from .costs import StepCosts
from .draft_policy import DraftPolicy
from .flight import Clock, Flight, Verified
from .graphs import GraphCache, RecordingError
from .layout import BUCKETS
from .memory import count_blocks, free_memory, state_bytes
from .planes import BlockPool, Planes, PlaneSpec
from .proposers.base import Proposer, Released
from .recurrent import States
from .request import EngineError, Request, RequestOutput
from .runner import Runner
from .sampling import SamplingParams, SamplingTable
from .scheduler import Scheduler
from .statistics import EngineStatistics, StepKind
from .stopping import FinishReason, Stopper
from .synthetic import synthetic_rates
from .table import RequestTable
from .target import Target
from .verify import Verification


class Engine:
    """Continuous batching over a paged cache. `step` until `has_unfinished` is False, or call `generate`."""

    def __init__(
        self, target: Target, proposer: Proposer, config: EngineConfig, costs: StepCosts | None = None
    ) -> None:
        """`costs` are what adaptive drafting takes a step to cost; None: measured now, corrected as it runs."""
        self.target, self.proposer, self.config = target, proposer, config
        self.max_length = min(config.max_length or target.max_length, target.max_length)
        if config.num_draft_tokens >= self.max_length:
            raise EngineError(
                f"drafts must be shorter than the context: {config.num_draft_tokens} draft tokens, context "
                f"{self.max_length}; lower --num-draft-tokens"
            )
        requirements = proposer.requirements
        target.capture(requirements.layer_ids)
        on_gpu = target.device.type == "cuda"
        self.not_fused: str | None = None  # why the target runs its own code, where it could be fused
        self.not_recorded: str | None = None  # why steps run call by call, where they could be CUDA graphs
        if on_gpu and not config.eager:
            self.not_fused = target.fuse()
        else:
            target.unfuse()
        specs = (*target.plane_specs, *requirements.planes)
        spare_slots = requirements.spare_slots(config.num_draft_tokens)
        num_blocks = self._num_blocks(specs, self.max_length + spare_slots)
        # a block holds no recurrent state, so that a request cannot begin behind one
        prefix_cache = config.prefix_cache and not target.state_specs
        self.pool = BlockPool(
            num_blocks, config.block_size, prefix_cache=prefix_cache, next_token=requirements.next_token
        )
        planes = Planes(specs, num_blocks, config.block_size, target.device)
        target.bind(
            planes, States(target.state_specs, config.max_batch_size + 1, config.num_draft_tokens, target.device)
        )
        self.scheduler = Scheduler(self.pool, config.max_batch_tokens, config.max_batch_size)
        self.table = RequestTable(
            config.max_batch_size,
            self.max_length,
            config.num_draft_tokens,
            config.block_size,
            target.device,
            spare_slots,
        )
        proposer.bind(planes, config.max_batch_size + 1)
        self.settings = SamplingTable(config.max_batch_size + 1, target.vocab_size, target.device)
        use_graphs = on_gpu and not config.eager
        adaptive = config.draft_policy == "adaptive" and config.num_draft_tokens > 0
        graphs = GraphCache(target.device) if use_graphs else None
        self.runner = Runner(
            target,
            proposer,
            self.table,
            self.settings,
            graphs,
            verification=self._verification(),
            max_batch_tokens=config.max_batch_tokens,
            adaptive=adaptive,
        )
        launch_ahead = use_graphs if config.launch_ahead is None else config.launch_ahead
        fits = config.max_batch_size * (config.num_draft_tokens + 1) <= config.max_batch_tokens
        self._ahead = launch_ahead and fits
        self._flight: Flight | None = None
        self._last_clock: Clock | None = None
        self._ended: list[RequestOutput] = []  # of requests that ended as they came
        self.statistics = EngineStatistics()
        self._next_id = 0
        with torch.inference_mode():
            self._record()
            if adaptive:
                found = costs or self.runner.measure(config.max_batch_size)
                self.runner.policy = DraftPolicy(self.runner.widths, found, corrects_costs=costs is None)

    def _record(self) -> None:
        """Records steps as CUDA graphs where they are used; what cannot be recorded runs call by call instead."""
        try:
            self.runner.capture(self.config.max_batch_size)
        except RecordingError as error:
            self.not_recorded = str(error)
            self.runner.run_plainly()
            self._ahead = False

    def add_request(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> int:
        """Queues a prompt and returns its request id; raises EngineError if it can never run."""
        request = self._request(prompt_token_ids, params)
        self._queue(request)
        return request.request_id

    def _queue(self, request: Request) -> None:
        if request.params.max_tokens:
            self.scheduler.add(request)
            return
        # it asks for nothing: no row is computed and no block taken
        request.finish_reason = FinishReason.LENGTH
        self.statistics.count_prompt(len(request.prompt_token_ids), cached=0)
        self._ended.append(_output_of(request))

    def _request(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> Request:
        try:
            prompt = [operator.index(token) for token in prompt_token_ids]
        except TypeError as error:
            raise EngineError(f"prompt tokens must be whole numbers: {error}") from error
        if not prompt:
            raise EngineError("a prompt must hold at least one token, found none")
        wrong = [token for token in prompt if not 0 <= token < self.target.vocab_size]
        if wrong:
            raise EngineError(f"prompt tokens must lie in 0..{self.target.vocab_size - 1}, found {wrong[0]}")
        least = min(params.max_tokens, 1)
        if len(prompt) + least > self.max_length:
            raise EngineError(
                f"a prompt may hold {self.max_length - least} tokens in the context of {self.max_length}, found "
                f"{len(prompt)}; shorten it or raise --max-length"
            )
        longest = min(len(prompt) + params.max_tokens, self.max_length)
        if longest > self.pool.capacity:
            raise EngineError(
                f"a request of up to {longest} tokens needs {self.pool.blocks_for(longest)} blocks, the cache has "
                f"{self.pool.num_blocks - 1}; raise --num-blocks or lower --max-new-tokens"
            )
        ends = params.end_token_ids(self.target.eos_token_ids)
        try:
            params.check_vocabulary(self.target.vocab_size, ends)
            stopper = Stopper(params, ends, prompt, self.max_length, self.target.tokenizer)
        except ValueError as error:
            raise EngineError(str(error)) from error
        seed = secrets.randbits(63) if params.seed is None else params.seed
        request = Request(self._next_id, prompt, params, seed, stopper)
        self._next_id += 1
        return request

    @torch.inference_mode()
    def best_num_draft_tokens(self) -> dict[int, int]:
        """By batch size up to the engine's, the draft tokens a request that would have earned most; 0: none pay.

        From what was accepted so far and what steps cost here: measured now, unless adaptive drafting knows.
        """
        policy, conditional = self.runner.policy, self.statistics.conditional_acceptance_by_position
        sizes = [size for size in BUCKETS if size < self.config.max_batch_size] + [self.config.max_batch_size]
        if policy is not None:
            return {size: policy.best_num_draft_tokens(size) for size in sizes}
        if not conditional:
            return {}
        if self._flight is not None:
            self.runner.draft(self._flight)  # from buffers that measuring fills otherwise
        costs = self.runner.measure(self.config.max_batch_size)
        survival = list(itertools.accumulate((rate or 0.0 for rate in conditional), operator.mul))
        return {size: costs.best_num_draft_tokens(size, survival) for size in sizes}

    def has_unfinished(self) -> bool:
        """Whether any request still runs or waits."""
        return bool(self.scheduler.waiting or self.scheduler.running or self._ended)

    def cancel(self, request_id: int) -> RequestOutput | None:
        """Ends a request now; None if it is unknown or already finished."""
        for request in (*self.scheduler.running, *self.scheduler.waiting):
            if request.request_id == request_id:
                request.finish_reason = FinishReason.CANCELLED
                output = self._finish(request)
                if not self.has_unfinished():
                    self._rest()
                return output
        return None

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Computes one batch; returns the requests that finished in it.

        Where steps are launched ahead, the next one is already running when this returns. What a proposer raises
        leaves the engine as it was: the requests go on at the next call.
        """
        flight = self._flight = self._flight or self._launch()
        if flight is None:
            ended, self._ended = self._ended, []
            return ended
        ahead = self._ready_ahead(flight)  # first, since a host that drafts keeps the device waiting
        self.runner.draft(flight)
        self._flight = self.runner.launch_ahead(ahead, flight) if ahead else None
        ended, self._ended = self._ended, []
        return ended + self._land(flight)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        on_finish: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Runs prompts to the end; outputs in the order of the prompts.

        Raises EngineError, and queues none of them, if one can never run. `on_finish` may cancel others.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        requests = [self._request(prompt, p) for prompt, p in zip(prompts, each, strict=True)]
        for request in requests:
            self._queue(request)
        start = time.perf_counter()
        while self.has_unfinished():
            for output in self.step():
                if on_finish is not None:
                    on_finish(output)
        self.statistics.wall_seconds += time.perf_counter() - start
        return [_output_of(request) for request in requests]

    def _launch(self) -> Flight | None:
        """Starts the step the scheduler asks for; nothing is in flight."""
        scheduled, preempted = self.scheduler.schedule()
        for request in preempted:
            self._release(request, finished=False)
            self.scheduler.requeue(request)
            self.statistics.num_preemptions += 1
        if not scheduled:
            left = self.scheduler.waiting or self.scheduler.running
            assert preempted or not left, "requests wait and nothing can run: blocks were lost"
            return None
        for rows in scheduled:
            request = rows.request
            if request.slot is None:
                self._admit(request)
            if rows.samples:
                # blocks for what this step emits and the drafts after it; where they run short the request drafts less
                wanted = len(request.token_ids) + rows.num_drafts + 1 + self.config.num_draft_tokens
                self.pool.grow_within(request.block_table, self._slots(request, wanted))
        return self.runner.launch(scheduled)

    def _ready_ahead(self, flight: Flight) -> list[Request]:
        """Requests of a decoding step after `flight`, their blocks written; none if the host must decide first."""
        if not self._ahead or not flight.all_sample or self.scheduler.can_admit():
            return []
        k = self.config.num_draft_tokens
        ahead = [r for r in flight.requests if not r.finish_reason and len(r.token_ids) + 1 < self._limit(r)]
        # the flight emits up to k + 1 tokens, this step as many, and drafts wait behind them
        for request in ahead:
            wanted = self._slots(request, len(request.token_ids) + 2 * (k + 1) + k)
            if not self.pool.grow(request.block_table, wanted):
                return []
        self.table.write_blocks(ahead)
        return ahead

    def _admit(self, request: Request) -> None:
        self.table.admit(request, self._limit(request))
        self.runner.admit(request)
        assert request.slot is not None
        self.settings.set(request.slot, request.params, sorted(request.stopper.end_ids))

    def _limit(self, request: Request) -> int:
        """The number of known tokens at which a request ends."""
        return min(len(request.prompt_token_ids) + request.params.max_tokens, self.max_length)

    def _slots(self, request: Request, num_tokens: int) -> int:
        """Slots that `num_tokens` known and drafted tokens may need."""
        return min(num_tokens, self._limit(request)) + self.runner.stages.spare_slots

    def _land(self, flight: Flight) -> list[RequestOutput]:
        """Reads a step: appends what it emitted and ends the requests that are done."""
        results = flight.land()
        outputs: list[RequestOutput] = []
        prompts = drafted = landed = False
        for i, (request, result) in enumerate(zip(flight.requests, results, strict=True)):
            if request.finish_reason:
                continue  # it ended while this step was in flight
            landed = True
            if result is None:
                prompts = True
                request.num_computed = flight.ends[i]
                self.scheduler.register(request)
                continue
            prompts |= not request.is_decoding
            drafted |= result.num_drafted > 0
            self._commit(request, result)
            self.scheduler.register(request)
            if request.finish_reason:
                outputs.append(self._finish(request))
        if landed:
            self._count_step(flight, "prefill" if prompts else "verify" if drafted else "decode")
        if not self.has_unfinished():
            self._rest()
        return outputs

    def _rest(self) -> None:
        """Nothing is left to do: a step in flight is of no use, and time until the next one is no step's."""
        self._flight = self._last_clock = None

    def _count_step(self, flight: Flight, kind: StepKind) -> None:
        clock, before = flight.clock, self._last_clock
        # what lies between two steps belongs to the later one
        target_seconds = clock.seconds("drafted" if before else "started", "verified", since=before)
        draft_seconds = clock.seconds("verified", "drafted")
        self.statistics.count_step(kind, target_seconds=target_seconds, draft_seconds=draft_seconds)
        if self.runner.policy is not None and flight.choice is not None:
            times = 1000 * target_seconds, 1000 * draft_seconds
            self.runner.policy.count_step(flight.choice, len(flight.requests), flight.padded, *times)
        self._last_clock = clock

    def _commit(self, request: Request, result: Verified) -> None:
        """Appends what was emitted up to the first stop."""
        request.num_drafts = result.num_drafts
        if result.failed:
            request.finish_reason = FinishReason.ERROR
            request.error = (
                f"the target's logits were not finite, or its settings forbade every token, after token "
                f"{len(request.token_ids)}"
            )
            return
        kept, request.finish_reason = request.stopper.take(result.token_ids)
        request.token_ids.extend(result.token_ids[:kept])
        request.logprobs.extend(result.logprobs[:kept])
        request.block_lengths.append(kept)
        request.num_computed = len(request.token_ids) - 1
        self.statistics.count_request(drafted=result.num_drafted, accepted=len(result.token_ids) - 1, emitted=kept)

    def _finish(self, request: Request) -> RequestOutput:
        self._release(request, finished=request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH))
        self.scheduler.finish(request)
        self.statistics.count_prompt(len(request.prompt_token_ids), cached=request.num_cached)
        return _output_of(request)

    def _release(self, request: Request, *, finished: bool) -> None:
        """Tells the proposer, whose rows of the request are still in its blocks, and gives the table row back."""
        released = Released(request.request_id, request.block_table, request.num_computed, finished)
        self.proposer.release(released)
        self.runner.forget(request.request_id, finished=request.finish_reason is not None)
        self.table.release(request)

    def _verification(self) -> Verification:
        mode, rates, k = self.config.verify_mode, self.config.acceptance_rates, self.config.num_draft_tokens
        if not k or rates is None:
            return Verification(mode if k else VerifyMode.STANDARD, fp64_gumbel=self.config.fp64_gumbel)
        return Verification(mode, synthetic_rates(k, rates=rates, device=self.target.device), self.config.fp64_gumbel)

    def _num_blocks(self, specs: Sequence[PlaneSpec], slots: int) -> int:
        """Blocks for a full batch of so many slots each, or as many as memory holds, unless the config says."""
        config, free = self.config, free_memory(self.target.device)
        free -= state_bytes(self.target.state_specs, config.max_batch_size, config.num_draft_tokens, free)
        wanted = config.max_batch_size * -(-slots // config.block_size) + 1
        given, share = config.num_blocks, config.memory_share
        return count_blocks(specs, config.block_size, free, wanted=wanted, given=given, share=share)


def _output_of(request: Request) -> RequestOutput:
    assert request.finish_reason is not None
    return RequestOutput(
        request.request_id,
        request.prompt_token_ids,
        request.output_token_ids,
        request.finish_reason,
        request.block_lengths,
        request.error,
        request.stopper.text,
        None if request.params.logprobs is None else request.logprobs,
    )
