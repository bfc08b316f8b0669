"""Paged attention against the copy of the keys and values it must read, checked against its PyTorch twin."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels import dispatch, reference
from ...kernels.records import AttentionInputs
from .record import BenchError, Check, Record
from .timing import Timing, copies_for, copy_bandwidth, time_calls

BLOCK_SIZE = 16
LARGEST_ERROR = {torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 2e-2}


class Heads(NamedTuple):
    """Of one attention layer."""

    query: int
    key: int
    width: int


class Load(NamedTuple):
    """`batch` requests of `context` tokens, the last `rows` of which are computed."""

    batch: int
    context: int
    rows: int

    @classmethod
    def parse(cls, text: str) -> "Load":
        """`32x4096x6`; raises BenchError for anything else."""
        parts = text.split("x")
        if len(parts) != 3 or not all(part.strip().isdigit() and int(part) for part in parts):
            raise BenchError(f"--loads takes BATCHxCONTEXTxROWS between commas, as 32x4096x6; found {text!r}")
        load = cls(*map(int, parts))
        if load.rows > load.context:
            raise BenchError(f"--loads computes at most as many rows as the context holds tokens, found {text!r}")
        return load


class Attended(NamedTuple):
    """One measured load."""

    timing: Timing
    kv_bytes: int
    check: Check


def run(record: Record, heads: Heads, loads: Sequence[Load], dtype: torch.dtype) -> None:
    """Adds a row a load; raises BenchError at the first that differs from its twin."""
    bandwidth = copy_bandwidth(record.device)
    for load in loads:
        found = measure(load, heads, dtype, record.device)
        record.require(found.check)
        row: dict[str, Any] = {
            **load._asdict(),
            "us": found.timing.ms * 1000,
            "spread": found.timing.spread,
            "kv_mb": found.kv_bytes / 1e6,
            "of_copy_bandwidth": found.kv_bytes / (found.timing.ms / 1000) / bandwidth,
            "copy_tb_per_s": bandwidth / 1e12,
        }
        record.add(row, [found.check])


def measure(load: Load, heads: Heads, dtype: torch.dtype, device: torch.device) -> Attended:
    """Times one layer's attention; blocks lie scattered, and planes too large for a cache are used in turn."""
    batch, context, rows = load
    blocks = batch * -(-context // BLOCK_SIZE)
    kv_bytes = 2 * batch * context * heads.key * heads.width * dtype.itemsize
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    plane = (blocks + 1, BLOCK_SIZE, heads.key, heads.width)
    planes = [(normal(*plane), normal(*plane)) for _ in range(copies_for(kv_bytes, device))]
    q = normal(batch * rows, heads.query, heads.width)
    cu_seqlens = torch.arange(batch + 1, device=device, dtype=torch.int32) * rows
    seq_lens = torch.full((batch,), context, device=device, dtype=torch.int32)
    tables = (torch.randperm(blocks, device=device, generator=generator) + 1).int().view(batch, -1)
    scale = heads.width**-0.5
    inputs = [AttentionInputs(q, *pair, cu_seqlens, seq_lens, tables, rows, context, scale) for pair in planes]
    wide = inputs[0]._replace(q=q.float(), k_plane=planes[0][0].float(), v_plane=planes[0][1].float())
    expected = reference.attention.paged_attention(wide)
    found = dispatch.paged_attention(inputs[0])
    error = float((found.float() - expected).abs().max())
    check = Check(
        f"attention {batch}x{context}x{rows} = twin",
        error <= LARGEST_ERROR[dtype],
        f"largest difference {error:.2g}, at most {LARGEST_ERROR[dtype]:.2g} allowed",
    )
    if not check.passed:
        return Attended(Timing(0.0, 0.0), kv_bytes, check)
    calls = [partial(dispatch.paged_attention, each) for each in inputs]
    timing = time_calls(calls, device, calls=max(len(planes), 24))
    return Attended(timing, kv_bytes, check)
