"""Drawing tokens in Triton: statistics of each block of a row, counter-based noise, and the race in two levels.

A block of VOCAB_BLOCK ids is drawn by its mass, then an id by its share of that block, both as Gumbel races. The law is
that of one race over the row, but the noise, dearer than reading the row, is computed for one block of it only.
Legend: B requests, V vocabulary.
"""

# Triton gives launches and kernel bodies meanings that its own annotations do not express.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .noise import BLOCK_COUNTERS, GOLDEN, LARGEST_UNIFORM, MIX_1, MIX_2
from .records import VOCAB_BLOCK, Stream

STATS_WARPS = 8
DRAW_WARPS = 8

_GOLDEN = tl.constexpr(GOLDEN)
_MIX_1 = tl.constexpr(MIX_1)
_MIX_2 = tl.constexpr(MIX_2)
_ULP = tl.constexpr(2.0**-53)
_LARGEST = tl.constexpr(LARGEST_UNIFORM)
_BLOCK_COUNTERS = tl.constexpr(BLOCK_COUNTERS)


class BlockStats(NamedTuple):
    """What one pass over the rows leaves behind, per row and block of VOCAB_BLOCK ids: each [num_rows, num_blocks]."""

    maximum: Tensor  # float32; +inf where the block holds NaN or +inf
    total: Tensor  # float32; sum of exp(logit - maximum)
    top: Tensor  # int32; the lowest id that has the maximum


def block_stats(logits: Tensor) -> BlockStats:
    """Reads each row of logits [num_rows, vocab], whose ids lie next to each other, once."""
    num_rows, vocab = logits.shape
    num_blocks = triton.cdiv(vocab, VOCAB_BLOCK)
    maximum, total = torch.empty(2, num_rows, num_blocks, dtype=torch.float32, device=logits.device)
    top = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=logits.device)
    _block_stats_kernel[(num_rows * num_blocks,)](
        *(logits, maximum, total, top, logits.stride(0), vocab, num_blocks), BLOCK=VOCAB_BLOCK, num_warps=STATS_WARPS
    )
    return BlockStats(maximum, total, top)


def sample(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    stream: Stream,
    *,
    fp64_gumbel: bool = False,
) -> Tensor:
    """See its twin; tensors on one GPU."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    batch, vocab = logits.shape
    token_ids = torch.empty(batch, dtype=torch.int64, device=logits.device)
    if batch:
        stats = block_stats(logits)
        num_blocks = stats.total.shape[1]
        _sample_kernel[(batch,)](
            *(logits, temperature.contiguous(), seeds.contiguous(), positions.contiguous(), *stats, token_ids),
            *(logits.stride(0), vocab, num_blocks),
            STREAM=int(stream),
            FP64=fp64_gumbel,
            NUM_BLOCKS=triton.next_power_of_2(num_blocks),
            BLOCK=VOCAB_BLOCK,
            num_warps=DRAW_WARPS,
        )
    return token_ids


def argmax(logits: Tensor) -> Tensor:
    """See its twin; a tensor on a GPU."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    batch, vocab = logits.shape
    token_ids = torch.empty(batch, dtype=torch.int64, device=logits.device)
    if batch:
        stats = block_stats(logits)
        num_blocks = stats.top.shape[1]
        _argmax_kernel[(batch,)](
            *(stats.maximum, stats.top, token_ids, vocab, num_blocks), NUM_BLOCKS=triton.next_power_of_2(num_blocks)
        )
    return token_ids


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return z ^ (z >> 31)


@triton.jit
def noise_key(seed, position, STREAM: tl.constexpr):
    key = _mix(seed.to(tl.uint64) + _GOLDEN)
    key = _mix((key ^ position.to(tl.uint64)) + _GOLDEN)
    return _mix((key ^ STREAM) + _GOLDEN)


@triton.jit
def uniform(key, counter, FP64: tl.constexpr):
    bits = (_mix(key + (counter.to(tl.uint64) + 1) * _GOLDEN) >> 11).to(tl.int64)
    if FP64:
        return (bits.to(tl.float64) + 0.5) * _ULP
    else:
        return tl.minimum((bits.to(tl.float32) + 0.5) * _ULP, _LARGEST)


@triton.jit
def _gumbel(key, counter, FP64: tl.constexpr):
    """-log(-log(1 - u)); small u by series in float32, because they win the race and 1 - u would round them off."""
    u = uniform(key, counter, FP64)
    if FP64:
        return -tl.log(-tl.log(1.0 - u))
    else:
        series = u * (1.0 + u * (0.5 + u * (0.33333333 + u * (0.25 + u * 0.2))))
        return -tl.log(tl.where(u < 0.0625, series, -tl.log(1.0 - u)))


@triton.jit
def log_sum_exp(values):
    largest = tl.max(values, 0)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    return base + tl.log(tl.sum(tl.exp(values - base), 0))


@triton.jit
def block_log_masses(maximum, total, row, blocks, num_blocks):
    """log of the sum of exp(logit) over each block of a row; -inf past the last block."""
    where = row * num_blocks + blocks
    largest = tl.load(maximum + where, mask=blocks < num_blocks, other=float("-inf"))
    return largest + tl.log(tl.load(total + where, mask=blocks < num_blocks, other=0.0))


@triton.jit
def draw_block(log_mass, key, blocks, FP64: tl.constexpr):
    noise = _gumbel(key, blocks.to(tl.int64) + _BLOCK_COUNTERS, FP64)
    return tl.argmax(log_mass.to(noise.dtype) + noise, 0)


@triton.jit
def draw_token(score, key, block, token, V, BLOCK: tl.constexpr, FP64: tl.constexpr):
    """The id drawn among the tokens [BLOCK] of a block; within the vocabulary whatever the scores."""
    noise = _gumbel(key, token, FP64)
    total = tl.where(token < V, score.to(noise.dtype) + noise, float("-inf"))
    return tl.minimum(block * BLOCK + tl.argmax(total, 0), V - 1).to(tl.int64)


@triton.jit
def _block_stats_kernel(logits, maximum, total, top, row_stride, V, num_blocks, BLOCK: tl.constexpr):
    out = tl.program_id(0)
    row, block = (out // num_blocks).to(tl.int64), out % num_blocks
    token = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row * row_stride + token, mask=token < V, other=float("-inf")).to(tl.float32)
    largest = tl.max(values, 0)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    # one NaN, or a +inf less itself, makes the sum NaN
    mass = tl.sum(tl.exp(values - base), 0)
    tl.store(maximum + out, tl.where(mass == mass, largest, float("inf")))
    tl.store(total + out, mass)
    tl.store(top + out, tl.min(tl.where(values == largest, token, V - 1), 0))


@triton.jit
def lowest_top(maximum, top, row, blocks, V, num_blocks):
    """The lowest id that has the maximum of a row."""
    where = row * num_blocks + blocks
    maxima = tl.load(maximum + where, mask=blocks < num_blocks, other=float("-inf"))
    tops = tl.load(top + where, mask=blocks < num_blocks, other=V - 1)
    return tl.min(tl.where(maxima == tl.max(maxima, 0), tops, V - 1), 0)


@triton.jit
def _argmax_kernel(maximum, top, token_ids, V, num_blocks, NUM_BLOCKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = lowest_top(maximum, top, row, tl.arange(0, NUM_BLOCKS), V, num_blocks)
    tl.store(token_ids + row, token)


@triton.jit
def _sample_kernel(
    logits, temperature, seeds, positions, maximum, total, top, token_ids,
    row_stride, V, num_blocks,
    STREAM: tl.constexpr, FP64: tl.constexpr, NUM_BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token of one row; at temperature 0 the lowest id of the maximum."""
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, NUM_BLOCKS)
    if tl.load(temperature + row) == 0.0:
        tl.store(token_ids + row, lowest_top(maximum, top, row, blocks, V, num_blocks))
        return
    key = noise_key(tl.load(seeds + row), tl.load(positions + row), STREAM)
    block = draw_block(block_log_masses(maximum, total, row, blocks, num_blocks), key, blocks, FP64)
    token = block * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(logits + row * row_stride + token, mask=token < V, other=float("-inf")).to(tl.float32)
    tl.store(token_ids + row, draw_token(score, key, block, token, V, BLOCK, FP64))
