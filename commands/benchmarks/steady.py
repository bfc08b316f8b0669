"""An engine's steady loop: a full batch that only decodes, timed from outside and against its own recorded calls."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ...infer.engine import Engine
from ...infer.graphs import GraphCache, GraphKey
from ...infer.sampling import SamplingParams
from ...infer.statistics import EngineStatistics
from ..engines import STEP_TOKENS
from .timing import Timing, synchronize, time_once

WARMUP_STEPS = 20
REPEATS = 5
CYCLES = 10  # replays a repeat, where recorded calls are timed alone
TARGET_CALLS = ("select", "target", "verify")
"""The recorded calls that are the target's and verification's; the others are the proposer's."""


class Steady(NamedTuple):
    """What the loop did."""

    step: Timing  # wall time of `Engine.step`, everything included
    tokens_per_second: float
    statistics: EngineStatistics  # of the timed steps

    @property
    def target_ms(self) -> float | None:
        """Target and verification of a step, between marks in the device's queue."""
        return self.statistics.verify_ms if self.statistics.num_draft_steps else self.statistics.decode_ms


class Recorded(NamedTuple):
    """A step's recorded calls, replayed without the host."""

    step: Timing
    target: Timing  # target and verification


def tokens_needed(steps: int, num_draft_tokens: int, prompt_tokens: int) -> int:
    """New tokens a request must be allowed, so that none ends while it is measured.

    The first requests decode already while the last of `prompt_tokens`, those of all requests, are computed.
    """
    per_step = num_draft_tokens + 1
    waiting = -(-prompt_tokens // STEP_TOKENS)
    return (waiting + WARMUP_STEPS + steps * REPEATS + 2 * CYCLES * (REPEATS + 1) + 8) * per_step


def start(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int, first_seed: int = 0) -> None:
    """Adds requests that decode greedily past end tokens, and steps until all of them decode.

    Their seeds count up from `first_seed`; with synthetic verification the same seeds keep the same drafts.
    """
    for seed, prompt in enumerate(prompts, start=first_seed):
        engine.add_request(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=seed))
    scheduler = engine.scheduler
    while scheduler.waiting or any(not request.is_decoding for request in scheduler.running):
        engine.step()


def steady(engine: Engine, steps: int, warmup: int = WARMUP_STEPS) -> Steady:
    """Times `steps` engine steps, several times over, after `warmup` that are not counted."""
    device = engine.target.device
    for _ in range(warmup):
        engine.step()
    engine.statistics = EngineStatistics()

    def some_steps() -> None:
        for _ in range(steps):
            engine.step()

    times = [_wall_ms(some_steps, device) for _ in range(REPEATS)]
    seconds = sum(times) / 1000
    return Steady(Timing.of([ms / steps for ms in times]), engine.statistics.output_tokens / seconds, engine.statistics)


def recorded(engine: Engine) -> Recorded | None:
    """Times the recorded calls of the engine's present step; None where nothing is recorded.

    Replaying leaves the requests' texts in disorder: cancel them after.
    """
    keys = _keys_of_a_step(engine)
    if keys is None:
        return None
    own = [key for key in keys if key[0] in TARGET_CALLS]
    return Recorded(_replay(engine, keys), _replay(engine, own))


def stop(engine: Engine, *, forget: bool = True) -> None:
    """Ends all requests; `forget` False leaves their prompts in the prefix cache."""
    for request in [*engine.scheduler.running, *engine.scheduler.waiting]:
        engine.cancel(request.request_id)
    engine.step()  # lands what was launched ahead
    if forget:
        engine.pool.forget()


class _Listener(GraphCache):
    """Notes the keys of the calls that go through it."""

    def __init__(self, inner: GraphCache) -> None:
        self.inner, self.keys = inner, list[GraphKey]()

    def run(self, key: GraphKey, function: Callable[..., Any], *arguments: Any) -> Any:
        self.keys.append(key)
        return self.inner.run(key, function, *arguments)


def _keys_of_a_step(engine: Engine) -> list[GraphKey] | None:
    """The recorded calls of the next step that is launched, in order."""
    graphs = engine.runner.graphs
    if graphs is None:
        return None
    listener = _Listener(graphs)
    engine.runner.graphs = listener
    try:
        engine.step()
    finally:
        engine.runner.graphs = graphs
    return listener.keys or None


def _replay(engine: Engine, keys: Sequence[GraphKey]) -> Timing:
    graphs, table, device = engine.runner.graphs, engine.table, engine.target.device
    assert graphs is not None

    def cycles() -> None:
        for _ in range(CYCLES):
            for key in keys:
                graphs.replay(key)

    known, drafts = table.num_known.clone(), table.num_drafts.clone()
    times = []
    for _ in range(REPEATS + 1):
        synchronize(device)
        times.append(time_once(cycles, device) / CYCLES)
        # verification appends what it emits: the next repeat starts from the same texts
        table.num_known.copy_(known)
        table.num_drafts.copy_(drafts)
    return Timing.of(times[1:])


def _wall_ms(function: Callable[[], object], device: torch.device) -> float:
    """Milliseconds on the host's clock until the device is done."""
    synchronize(device)
    begun = time.perf_counter()
    function()
    synchronize(device)
    return 1000 * (time.perf_counter() - begun)
