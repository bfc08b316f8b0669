"""Requests in, outputs and statistics out: continuous batching around one target and one proposer.

Plain decoding is a proposer that proposes nothing; it runs in the same loop as every method.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .planes import BlockPool, Planes, PlaneSpec
from .proposers.base import Proposer
from .request import FinishReason, Request, RequestOutput
from .runner import Runner, StepResult, Stopwatch
from .sampling import SamplingParams
from .scheduler import ScheduledRequest, Scheduler
from .statistics import EngineStatistics
from .target import Target


class EngineError(ValueError):
    """A request or setting the engine cannot honour; the message says what would work."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes of an engine. `num_blocks` None takes what memory allows, up to what the batch could ever use."""

    num_draft_tokens: int = 0
    num_blocks: int | None = None
    block_size: int = 16
    max_batch_tokens: int = 2048
    max_batch_size: int = 64
    max_length: int | None = None  # None: the target's
    prefix_cache: bool = True  # requests share the blocks of a common beginning
    memory_share: float = 0.8  # of what is free when the engine is built; used where num_blocks is None

    def __post_init__(self) -> None:
        for name in ("block_size", "max_batch_tokens", "max_batch_size"):
            if getattr(self, name) < 1:
                raise EngineError(f"{name} must be at least 1, found {getattr(self, name)}")
        if self.num_draft_tokens < 0:
            raise EngineError(f"num_draft_tokens must be 0 or more, found {self.num_draft_tokens}")


class Engine:
    """Continuous batching over a paged cache. `step` until `has_unfinished` is False, or call `generate`."""

    def __init__(self, target: Target, proposer: Proposer, config: EngineConfig) -> None:
        self.target, self.proposer, self.config = target, proposer, config
        self.max_length = min(config.max_length or target.max_length, target.max_length)
        if config.num_draft_tokens >= self.max_length:
            raise EngineError(
                f"drafts must be shorter than the context: {config.num_draft_tokens} draft tokens, context "
                f"{self.max_length}; lower --num-draft-tokens"
            )
        requirements = proposer.requirements
        target.capture(requirements.layer_ids)
        specs = (*target.plane_specs, *requirements.planes)
        num_blocks = config.num_blocks or self._num_blocks(specs)
        self.pool = BlockPool(
            num_blocks, config.block_size, prefix_cache=config.prefix_cache, next_token=requirements.next_token
        )
        planes = Planes(specs, num_blocks, config.block_size, target.device)
        target.bind(planes)
        proposer.bind(planes)
        self.scheduler = Scheduler(self.pool, config.max_batch_tokens, config.max_batch_size)
        self.runner = Runner(target, proposer, self.pool, config.num_draft_tokens)
        self.statistics = EngineStatistics()
        self._next_id = 0

    def add_request(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> int:
        """Queues a prompt and returns its request id; raises EngineError if it can never run."""
        prompt = [int(token) for token in prompt_token_ids]
        if not prompt:
            raise EngineError("a prompt must hold at least one token, found none")
        wrong = [token for token in prompt if not 0 <= token < self.target.vocab_size]
        if wrong:
            raise EngineError(f"prompt tokens must lie in 0..{self.target.vocab_size - 1}, found {wrong[0]}")
        if len(prompt) >= self.max_length:
            raise EngineError(
                f"a prompt must leave room for one token in the context of {self.max_length}, found {len(prompt)} "
                f"tokens; shorten it or raise --max-length"
            )
        longest = min(len(prompt) + params.max_tokens, self.max_length)
        if longest > self.pool.capacity:
            raise EngineError(
                f"a request of up to {longest} tokens needs {self.pool.blocks_for(longest)} blocks, the cache has "
                f"{self.pool.num_blocks - 1}; raise --num-blocks or lower --max-new-tokens"
            )
        seed = secrets.randbits(63) if params.seed is None else params.seed
        request = Request(self._next_id, prompt, params, seed)
        self._next_id += 1
        self.scheduler.add(request)
        return request.request_id

    def has_unfinished(self) -> bool:
        """Whether any request still runs or waits."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    def cancel(self, request_id: int) -> RequestOutput | None:
        """Ends a request now; None if it is unknown or already finished."""
        for request in (*self.scheduler.running, *self.scheduler.waiting):
            if request.request_id == request_id:
                request.finish_reason = FinishReason.CANCELLED
                return self._finish(request)
        return None

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Computes one batch; returns the requests that finished in it."""
        watch = Stopwatch(self.target.device)
        scheduled, preempted = self.scheduler.schedule()
        for request in preempted:
            self.proposer.release(request.request_id, finished=False)
            self.scheduler.requeue(request)
            self.statistics.num_preemptions += 1
        if not scheduled:
            assert preempted or not self.has_unfinished(), "requests wait and nothing can run: blocks were lost"
            return []
        result = self.runner.run_target(scheduled)
        kept = [self._commit(rows, result, i) for i, rows in enumerate(scheduled)]
        target_seconds = watch.lap()
        self.runner.observe(scheduled, result, kept)
        for rows in scheduled:
            self.scheduler.register(rows.request)
        outputs = [self._finish(rows.request) for rows in scheduled if rows.request.finish_reason]
        running = [rows.request for rows in scheduled if not rows.request.finish_reason and rows.request.is_decoding]
        if self.config.num_draft_tokens:
            self.runner.propose(running, self.max_length)
        drafted = any(rows.num_drafts for rows in scheduled)
        prompts = any(rows.num_tokens - rows.num_drafts > 1 or not rows.samples for rows in scheduled)
        self.statistics.count_step(
            "prefill" if prompts else "verify" if drafted else "decode",
            target_seconds=target_seconds,
            draft_seconds=watch.lap(),
        )
        return outputs

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        on_finish: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Runs prompts to the end; outputs in the order of the prompts."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        ids = [self.add_request(prompt, p) for prompt, p in zip(prompts, each, strict=True)]
        watch = Stopwatch(self.target.device)
        outputs: dict[int, RequestOutput] = {}
        while self.has_unfinished():
            for output in self.step():
                outputs[output.request_id] = output
                if on_finish is not None:
                    on_finish(output)
        self.statistics.wall_seconds += watch.lap()
        return [outputs[request_id] for request_id in ids]

    def _commit(self, rows: ScheduledRequest, result: StepResult, i: int) -> int:
        """Appends what was emitted up to the first stop; returns how many tokens were kept."""
        request = rows.request
        request.num_computed = rows.start + rows.num_tokens
        if not rows.samples:
            return 0
        request.drop_drafts()
        if result.failed[i]:
            request.finish_reason = FinishReason.ERROR
            request.error = f"the target's logits were not finite after token {len(request.token_ids)}"
            return 0
        emitted, kept = result.emitted[i], 0
        ends = self.runner.end_token_ids(request.params)
        for token in emitted:
            request.token_ids.append(token)
            kept += 1
            request.finish_reason = self._stop_reason(request, token, ends)
            if request.finish_reason:
                break
        request.block_lengths.append(kept)
        request.num_computed = rows.start + rows.num_tokens - rows.num_drafts + kept - 1
        self.statistics.count_request(drafted=rows.num_drafts, accepted=len(emitted) - 1, emitted=kept)
        return kept

    def _stop_reason(self, request: Request, token: int, ends: frozenset[int]) -> FinishReason | None:
        if token in ends and request.num_output_tokens >= request.params.min_tokens:
            return FinishReason.STOP
        if request.num_output_tokens >= request.params.max_tokens or len(request.token_ids) >= self.max_length:
            return FinishReason.LENGTH
        return None

    def _finish(self, request: Request) -> RequestOutput:
        assert request.finish_reason is not None
        self.proposer.release(request.request_id, finished=request.finish_reason is not FinishReason.CANCELLED)
        self.scheduler.finish(request)
        self.statistics.count_prompt(len(request.prompt_token_ids), cached=request.num_cached)
        return RequestOutput(
            request.request_id,
            request.prompt_token_ids,
            request.output_token_ids,
            request.finish_reason,
            request.block_lengths,
            request.error,
        )

    def _num_blocks(self, specs: Sequence[PlaneSpec]) -> int:
        """Blocks for a full batch of full contexts, or as many as the free memory holds."""
        block_bytes = sum(spec.bytes_per_token for spec in specs) * self.config.block_size
        free = _free_memory(self.target.device)
        wanted = self.config.max_batch_size * -(-self.max_length // self.config.block_size) + 1
        return max(2, min(wanted, int(free * self.config.memory_share) // block_bytes))


def _free_memory(device: torch.device) -> int:
    """Bytes a new allocation can take, what torch has reserved and does not use included."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    import psutil

    return psutil.virtual_memory().available
