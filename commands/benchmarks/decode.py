"""Plain decoding against the memory floor: what the engine's steady loop costs, and how much of it the GPU is busy.

The texts are compared with those of the same engine without graphs and fused layers, on the very prompts measured.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from ...infer.engine import Engine
from ...infer.proposers.none import NoneProposer
from ...infer.target import Target
from ..engines import build_engine
from . import attention
from .checks import same_text, texts_so_far
from .record import Check, Record
from .static_cache import StaticCache
from .steady import recorded, start, steady, stop, tokens_needed
from .targets import Source, random_prompts, weight_bytes
from .timing import Timing, copy_bandwidth, synchronize

CHECKED_STEPS = 8


class Work(NamedTuple):
    """What to decode."""

    batch_sizes: Sequence[int]  # ascending
    context: int
    steps: int
    with_transformers: bool

    @property
    def new_tokens(self) -> int:
        return tokens_needed(self.steps, 0, max(self.batch_sizes) * self.context) + CHECKED_STEPS

    @property
    def longest(self) -> int:
        return self.context + self.new_tokens


def run(record: Record, source: Source, work: Work) -> None:
    """Adds a row a batch size; raises BenchError at the first whose texts differ."""
    bandwidth = copy_bandwidth(source.device)
    model = source.build()
    num_bytes = weight_bytes(model)
    target = Target.from_model(model, max_length=work.longest)
    prompts = random_prompts(max(work.batch_sizes), work.context, target.vocab_size)
    expected = _eager_texts(target, prompts, work)
    engine, seconds = _start_engine(target, work)
    compared = StaticCache.load(source) if work.with_transformers else None
    for batch in work.batch_sizes:
        row, checks = _measure(engine, prompts[:batch], expected[:batch], work, num_bytes, bandwidth, compared)
        record.add({"batch": batch, "context": work.context, **row, "start_seconds": seconds}, checks)


def _eager_texts(target: Target, prompts: Sequence[Sequence[int]], work: Work) -> list[list[int]]:
    engine = _build(target, work, eager=True)
    start(engine, prompts, work.new_tokens)
    for _ in range(CHECKED_STEPS):
        engine.step()
    texts = texts_so_far(engine)
    stop(engine)
    return texts


def _start_engine(target: Target, work: Work) -> tuple[Engine, float]:
    """The measured engine, and the seconds it took to be ready: fused, compiled and recorded."""
    synchronize(target.device)
    begun = time.perf_counter()
    engine = _build(target, work, eager=False)
    synchronize(target.device)
    return engine, time.perf_counter() - begun


def _build(target: Target, work: Work, *, eager: bool) -> Engine:
    return build_engine(
        target,
        NoneProposer(),
        num_draft_tokens=0,
        batch_size=max(work.batch_sizes),
        longest=work.longest,
        eager=eager,
    )


def _measure(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
    work: Work,
    num_bytes: int,
    bandwidth: float,
    compared: StaticCache | None,
) -> tuple[dict[str, Any], list[Check]]:
    start(engine, prompts, work.new_tokens)
    for _ in range(CHECKED_STEPS):
        engine.step()
    checked = texts_so_far(engine)
    loop = steady(engine, work.steps)
    texts = texts_so_far(engine)
    alone = recorded(engine)
    stop(engine)
    checks = [same_text("recorded = eager", engine, prompts, expected, checked)]
    kv_bytes = len(prompts) * work.context * sum(spec.bytes_per_token for spec in engine.target.plane_specs)
    floor_ms, kv_floor_ms = 1000 * num_bytes / bandwidth, 1000 * kv_bytes / bandwidth
    gpu_ms = None if alone is None else alone.step.ms
    row: dict[str, Any] = {
        "step_ms": loop.step.ms,
        "spread": loop.step.spread,
        "floor_ms": floor_ms,
        "to_floor": loop.step.ms / floor_ms,
        "kv_floor_ms": kv_floor_ms,
        "to_floor_with_kv": loop.step.ms / (floor_ms + kv_floor_ms),
        "gpu_ms": gpu_ms,
        "host_ms_not_hidden": None if gpu_ms is None else loop.step.ms - gpu_ms,
        "host_share": None if gpu_ms is None else 1 - gpu_ms / loop.step.ms,
        "tokens_per_second": loop.tokens_per_second,
    }
    found = _attention(engine, len(prompts), work.context)
    if found is not None:
        timing, check = found
        checks.append(check)
        row |= {
            "attention_of_copy_bandwidth": kv_floor_ms / timing.ms,
            "attention_share_of_step": timing.ms / loop.step.ms,
        }
    if compared is not None:
        answer = compared.decode(prompts, min(len(text) for text in texts))
        checks.append(same_text("engine = transformers", engine, prompts, answer.texts, texts))
        row |= {
            "transformers_tokens_per_second": answer.tokens_per_second,
            "to_transformers": loop.tokens_per_second / answer.tokens_per_second,
        }
    return row, checks


def _attention(engine: Engine, batch: int, context: int) -> tuple[Timing, Check] | None:
    """Attention of all layers at this load, measured alone; None where layers differ in shape."""
    specs = {(spec.heads, spec.width_k, spec.width_v, spec.dtype) for spec in engine.target.plane_specs}
    heads, width_k, width_v, dtype = next(iter(specs))
    if len(specs) > 1 or width_k != width_v:
        return None
    config: Any = engine.target.config.get_text_config()
    shape = attention.Heads(config.num_attention_heads, heads, width_k)
    found = attention.measure(attention.Load(batch, context, 1), shape, dtype, engine.target.device)
    layers = len(engine.target.plane_specs)
    return Timing(found.timing.ms * layers, found.timing.spread), found.check
