"""Linear layers of a few rows in Triton: each weight is read from memory once, at the speed of the memory.

One program owns a few output columns and walks its inputs in order, with several blocks of weights on their way; its
warps share each block by inputs, so that none reads what another does. A row is padded into a tile of 16, 32 or 64
rows, which as a batch of products by slice of inputs are all given the same instruction; how the inputs are cut depends
on the weight alone. So a row's result is the same bits whatever rows stand beside it: a draft token is verified by the
very numbers that plain decoding would have computed. Large weights without a residual go to the library, always as
`MAX_ROWS` rows, to the same effect. More than `MAX_ROWS` rows go there as they are.
"""

# Triton gives launches and kernel bodies meanings that its own annotations do not express.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from . import fused
from .rows import MAX_ROWS, empty_rows, full_rows

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FILL = 96
"""Programs that keep the memory of a large GPU busy; weights that give fewer are cut over their inputs."""
LIBRARY_BYTES = 2**24
"""Weights of this size the library reads faster, where it need not add a residual."""


class Config(NamedTuple):
    """How a weight is walked. `block_k`, `warps` and `splits` cut a sum, so they must not depend on the rows."""

    block_n: int  # output columns of a program
    block_k: int  # inputs of a step
    stages: int
    warps: int  # each sums its slice of every block
    splits: int  # programs that share one output, by ranges of inputs


def config_for(num_out: int, num_in: int, dtype: torch.dtype, rows: int, *, gated: bool = False) -> Config:
    """The configuration of a weight [num_out, num_in] (of both halves, if gated) for `rows` rows."""
    programs = triton.cdiv(num_out, 16)
    splits = 1 if gated or programs >= FILL else max(1, min(triton.cdiv(FILL, programs), num_in // 1024))
    if dtype == torch.float32:
        return Config(block_n=16, block_k=64, stages=3, warps=4, splits=splits)
    block_k = min(256, max(64, triton.next_power_of_2(num_in) // 2))
    if rows <= 32:
        # narrow programs, many of them, keep more of the weight on its way
        return Config(
            block_n=16, block_k=block_k, stages=4 if gated else 8 if rows <= 16 else 5, warps=4, splits=splits
        )
    # every program reads all of x: with many rows that weighs more than the number of programs
    return Config(32 if gated or num_out < 64 * FILL else 64, block_k, stages=4, warps=4, splits=splits)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    config: Config | None = None,
) -> Tensor:
    """See its twin; tensors on one GPU. Raises ValueError on shapes that do not belong together."""
    rows, num_out = x.shape[0], weight.shape[0]
    _check(x, weight, bias, num_out)
    if residual is not None and residual.shape != (rows, num_out):
        raise ValueError(f"a residual must be [{rows}, {num_out}] like the output, found {list(residual.shape)}")
    out_dtype = out_dtype or x.dtype
    if rows > MAX_ROWS or x.dtype not in DTYPES or weight.dtype != x.dtype:
        if residual is None:
            return F.linear(x, weight, bias).to(out_dtype)
        return torch.addmm(residual if bias is None else residual + bias, x, weight.t()).to(out_dtype)
    if residual is None and _suits_library(weight):
        return _by_library(x, weight, bias, out_dtype)
    out = empty_rows(rows, num_out, dtype=out_dtype, device=x.device)
    if rows:
        config = config or config_for(num_out, x.shape[1], x.dtype, rows)
        _launch(x.contiguous(), weight, bias, None if residual is None else residual.contiguous(), out, config)
    return out


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, config: Config | None = None) -> Tensor:
    """See its twin; tensors on one GPU. Raises ValueError on shapes that do not belong together."""
    rows, num_out = x.shape[0], weight.shape[0] // 2
    _check(x, weight, bias, 2 * num_out)
    if rows > MAX_ROWS or x.dtype not in DTYPES or weight.dtype != x.dtype:
        return fused.silu_mul(F.linear(x, weight, bias))
    if _suits_library(weight):
        return fused.silu_mul(_by_library(x, weight, bias, x.dtype))
    out = empty_rows(rows, num_out, dtype=x.dtype, device=x.device)
    if rows:
        config = config or config_for(num_out, x.shape[1], x.dtype, rows, gated=True)
        _launch(x.contiguous(), weight, bias, None, out, config, gated=True)
    return out


def _suits_library(weight: Tensor) -> bool:
    return weight.dtype != torch.float32 and weight.numel() * weight.element_size() >= LIBRARY_BYTES


def _by_library(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """The product of `MAX_ROWS` rows, of which those of x are returned."""
    rows, x = x.shape[0], full_rows(x)
    if out_dtype == x.dtype:
        return F.linear(x, weight, bias)[:rows]
    out = torch.mm(x, weight.t(), out_dtype=out_dtype)[:rows]
    return out if bias is None else out + bias


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, num_out: int) -> None:
    if x.shape[1:] != weight.shape[1:] or weight.stride(1) != 1 or weight.shape[0] != num_out:
        raise ValueError(
            f"x [rows, in] and weight [out, in] must agree and the weight's rows be dense, found {list(x.shape)} and "
            f"{list(weight.shape)} with strides {list(weight.stride())}"
        )
    if bias is not None and bias.shape != (num_out,):
        raise ValueError(f"a bias must be [{num_out}], found {list(bias.shape)}")


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    config: Config,
    *,
    gated: bool = False,
) -> None:
    (rows, num_out), num_in = out.shape, x.shape[1]
    unit = max(256, config.block_k)
    split_in = triton.cdiv(num_in, config.splits * unit) * unit if config.splits > 1 else num_in
    into = out
    if config.splits > 1:
        into = torch.empty(config.splits, rows, num_out, dtype=torch.float32, device=x.device)
    _linear_kernel[triton.cdiv(num_out, config.block_n), config.splits](
        *(x, weight, into, bias, residual, rows, num_out, weight.stride(0)),
        IN=num_in,
        SPLIT_IN=split_in,
        EVEN=num_in % split_in == 0 and split_in % config.block_k == 0,
        PARTIAL=config.splits > 1,
        GATED=gated,
        BLOCK_M=max(16, triton.next_power_of_2(rows)),
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        SLICES=config.warps,
        num_stages=config.stages,
        num_warps=config.warps,
    )
    if config.splits > 1:
        _sum_kernel[rows, triton.cdiv(num_out, 512)](
            *(into, out, bias, residual, rows, num_out), SPLITS=config.splits, BLOCK=512
        )


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x, weight, out, bias, residual, rows, num_out, weight_stride,
    IN: tl.constexpr, SPLIT_IN: tl.constexpr, EVEN: tl.constexpr, PARTIAL: tl.constexpr, GATED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """M rows of x, N output columns, K inputs, of which each warp has its slice."""
    split = tl.program_id(1)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, BLOCK_M)
    lane = tl.arange(0, SLICES)[:, None] * (BLOCK_K // SLICES) + tl.arange(0, BLOCK_K // SLICES)[None, :]
    first = split * SPLIT_IN
    read = tl.minimum(column, num_out - 1)
    w_at = weight + read.to(tl.int64)[None, None, :] * weight_stride + first + lane[:, :, None]
    u_at = weight + (read + num_out).to(tl.int64)[None, None, :] * weight_stride + first + lane[:, :, None]
    x_at = x + row[None, :, None] * IN + first + lane[:, None, :]
    live = (row < rows)[None, :, None]

    acc = tl.zeros([SLICES, BLOCK_M, BLOCK_N], tl.float32)
    acc_up = acc
    for k in range(0, SPLIT_IN, BLOCK_K):
        inside = lane + k < tl.minimum(SPLIT_IN, IN - first)
        w = tl.load(w_at + k) if EVEN else tl.load(w_at + k, mask=inside[:, :, None], other=0.0)
        rows_of_x = tl.load(x_at + k, mask=live if EVEN else live & inside[:, None, :], other=0.0)
        acc = tl.dot(rows_of_x, w, acc, input_precision="ieee")
        if GATED:
            u = tl.load(u_at + k) if EVEN else tl.load(u_at + k, mask=inside[:, :, None], other=0.0)
            acc_up = tl.dot(rows_of_x, u, acc_up, input_precision="ieee")

    total, total_up = tl.sum(acc, 0), tl.sum(acc_up, 0)
    inside = column < num_out
    stored = (row < rows)[:, None] & inside[None, :]
    at = row.to(tl.int64)[:, None] * num_out + column[None, :]
    if PARTIAL:
        at += split.to(tl.int64) * rows * num_out
    if not PARTIAL:
        if bias is not None:
            total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        if residual is not None:
            total += tl.load(residual + at, mask=stored, other=0.0).to(tl.float32)
    if GATED:
        if bias is not None:
            total_up += tl.load(bias + num_out + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        dtype = x.dtype.element_ty
        gate, up = total.to(dtype).to(tl.float32), total_up.to(dtype).to(tl.float32)
        total = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * up
    tl.store(out + at, total.to(out.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["rows"])
def _sum_kernel(
    partial, out, bias, residual, rows, num_out, SPLITS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Adds the splits of a row in their order."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_out
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(SPLITS):
        total += tl.load(partial + (split * rows + row) * num_out + column, mask=inside, other=0.0)
    if bias is not None:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        total += tl.load(residual + row * num_out + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * num_out + column, total.to(out.dtype.element_ty), mask=inside)
