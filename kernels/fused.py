"""The small steps between a decoder layer's matrices, one kernel each in Triton, with the roundings of transformers.

RMS norm, SiLU gate, and rotary embedding that writes keys and values straight to their slots. A program's work depends
on its own row only, so results do not change with the rows beside it.
"""

# Triton gives launches and kernel bodies meanings that its own annotations do not express.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from .records import rope_heads
from .rows import empty_rows

HEADS_PER_PROGRAM = 8


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False) -> Tensor:
    """See its twin; tensors on one GPU."""
    if x.dim() != 2 or weight.shape != x.shape[1:]:
        raise ValueError(f"x must be [rows, width] and weight [width], found {list(x.shape)} and {list(weight.shape)}")
    x, out = x.contiguous(), empty_rows(*x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        block = triton.next_power_of_2(x.shape[1])
        warps = 8 if block >= 4096 else 4
        _rms_norm_kernel[(x.shape[0],)](
            *(x, weight, out, x.shape[1], eps),
            UNIT_OFFSET=unit_offset,
            BLOCK=block,
            num_warps=warps,
        )
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """See its twin; a tensor on a GPU."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"gate and up must be [rows, 2 * width], found {list(gate_up.shape)}")
    out = empty_rows(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        block = 1024
        _silu_mul_kernel[rows, triton.cdiv(width, block)](gate_up.contiguous(), out, width, BLOCK=block)
    return out


def rope_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    k_plane: Tensor,
    v_plane: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """See its twin; tensors on one GPU, planes contiguous."""
    q_heads, kv_heads, width = rope_heads(qkv, cos, sin, k_plane, v_plane)
    if not (k_plane.is_contiguous() and v_plane.is_contiguous()):
        raise ValueError("rows are stored to contiguous planes only")
    rows = qkv.shape[0]
    q = torch.empty(rows, q_heads, width, dtype=qkv.dtype, device=qkv.device)
    if rows:
        _rope_store_kernel[rows, triton.cdiv(q_heads + 2 * kv_heads, HEADS_PER_PROGRAM)](
            *(qkv.contiguous(), cos.contiguous(), sin.contiguous(), q_norm, k_norm, q, k_plane, v_plane),
            *(slot_mapping, eps),
            Q_HEADS=q_heads,
            KV_HEADS=kv_heads,
            HALF=width // 2,
            BLOCK_H=HEADS_PER_PROGRAM,
            BLOCK=triton.next_power_of_2(width // 2),
        )
    return q


@triton.jit
def _rms_norm_kernel(
    x, weight, out, width, eps, UNIT_OFFSET: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    inside = lane < width
    at = tl.program_id(0).to(tl.int64) * width + lane
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)
    values = values * tl.rsqrt(tl.sum(values * values, 0) / width + eps)
    values = values * (1.0 + scale) if UNIT_OFFSET else values.to(out.dtype.element_ty).to(tl.float32) * scale
    tl.store(out + at, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _silu_mul_kernel(gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < width
    gate = tl.load(gate_up + row * 2 * width + lane, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + lane, mask=inside, other=0.0).to(tl.float32)
    gate = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + lane, (gate * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rope_store_kernel(
    qkv, cos, sin, q_norm, k_norm, q, k_plane, v_plane, slot_mapping, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """H heads of one row (queries, keys, values in line) by the lanes of half a head, whose partners lie HALF on."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    lane = tl.arange(0, BLOCK)
    narrow = lane < HALF
    is_q = head < Q_HEADS
    is_k = (head >= Q_HEADS) & (head < Q_HEADS + KV_HEADS)
    is_v = (head >= Q_HEADS + KV_HEADS) & (head < Q_HEADS + 2 * KV_HEADS)
    at = head[:, None] * (2 * HALF) + lane[None, :]
    inside = (head < Q_HEADS + 2 * KV_HEADS)[:, None] & narrow[None, :]
    source = qkv + row * ((Q_HEADS + 2 * KV_HEADS) * 2 * HALF) + at
    raw_a = tl.load(source, mask=inside, other=0.0)
    raw_b = tl.load(source + HALF, mask=inside, other=0.0)
    a, b = raw_a.to(tl.float32), raw_b.to(tl.float32)
    dtype = q.dtype.element_ty

    if q_norm is not None:
        shrink = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
        q_a = tl.load(q_norm + lane, mask=narrow, other=0.0).to(tl.float32)
        q_b = tl.load(q_norm + HALF + lane, mask=narrow, other=0.0).to(tl.float32)
        k_a = tl.load(k_norm + lane, mask=narrow, other=0.0).to(tl.float32)
        k_b = tl.load(k_norm + HALF + lane, mask=narrow, other=0.0).to(tl.float32)
        a = (a * shrink).to(dtype).to(tl.float32) * tl.where(is_q[:, None], q_a[None, :], k_a[None, :])
        b = (b * shrink).to(dtype).to(tl.float32) * tl.where(is_q[:, None], q_b[None, :], k_b[None, :])
        a, b = a.to(dtype).to(tl.float32), b.to(dtype).to(tl.float32)

    angle = row * (2 * HALF) + lane
    cos_a = tl.load(cos + angle, mask=narrow, other=0.0).to(tl.float32)[None, :]
    cos_b = tl.load(cos + HALF + angle, mask=narrow, other=0.0).to(tl.float32)[None, :]
    sin_a = tl.load(sin + angle, mask=narrow, other=0.0).to(tl.float32)[None, :]
    sin_b = tl.load(sin + HALF + angle, mask=narrow, other=0.0).to(tl.float32)[None, :]
    out_a = ((a * cos_a).to(dtype).to(tl.float32) - (b * sin_a).to(dtype).to(tl.float32)).to(dtype)
    out_b = ((b * cos_b).to(dtype).to(tl.float32) + (a * sin_b).to(dtype).to(tl.float32)).to(dtype)

    q_at = q + row * (Q_HEADS * 2 * HALF) + at
    tl.store(q_at, out_a, mask=is_q[:, None] & inside)
    tl.store(q_at + HALF, out_b, mask=is_q[:, None] & inside)
    slot = tl.load(slot_mapping + row).to(tl.int64) * (KV_HEADS * 2 * HALF)
    k_at = k_plane + slot + at - Q_HEADS * 2 * HALF
    tl.store(k_at, out_a.to(k_plane.dtype.element_ty), mask=is_k[:, None] & inside)
    tl.store(k_at + HALF, out_b.to(k_plane.dtype.element_ty), mask=is_k[:, None] & inside)
    v_at = v_plane + slot + at - (Q_HEADS + KV_HEADS) * 2 * HALF
    tl.store(v_at, raw_a.to(v_plane.dtype.element_ty), mask=is_v[:, None] & inside)
    tl.store(v_at + HALF, raw_b.to(v_plane.dtype.element_ty), mask=is_v[:, None] & inside)
