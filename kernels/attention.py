"""Paged attention in Triton: rows into their slots, and causal attention over block tables.

One program per tile of query rows, key head and request, online softmax over key blocks (Dao et al. 2205.14135). The
query heads of a key head share its tile, so a decode step reads each key once. Long contexts with few requests are
not split over programs.
"""

# Triton gives launches and kernel bodies meanings that its own annotations do not express.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor


def store_kv(k: Tensor, v: Tensor | None, k_plane: Tensor, v_plane: Tensor | None, slot_mapping: Tensor) -> None:
    """See `reference.store_kv`; tensors on one GPU, rows dense within themselves."""
    for rows, plane in ((k, k_plane), (v, v_plane)):
        if rows is None or plane is None or not rows.numel():
            continue
        if rows.shape[1:] != plane.shape[2:] or not plane.is_contiguous():
            raise ValueError(f"rows {list(rows.shape)} do not fit a contiguous plane of {list(plane.shape)}")
        rows = rows.contiguous()
        width = rows[0].numel()
        block = min(1024, triton.next_power_of_2(width))
        grid = (rows.shape[0], triton.cdiv(width, block))
        _store_kernel[grid](rows, plane, slot_mapping, width, BLOCK=block)


def paged_attention(
    q: Tensor,
    k_plane: Tensor,
    v_plane: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    *,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `reference.paged_attention`; tensors on one GPU. Raises ValueError on shapes that do not belong together."""
    num_tokens, q_heads, width_k = q.shape
    block_size, kv_heads, width_v = v_plane.shape[1:]
    if k_plane.shape[-1] != width_k or k_plane.shape[:-1] != v_plane.shape[:-1] or q_heads % kv_heads:
        raise ValueError(
            f"planes {list(k_plane.shape)} and {list(v_plane.shape)} do not fit queries {list(q.shape)}: widths must "
            f"agree and key heads divide query heads"
        )
    q, block_tables = q.contiguous(), block_tables.contiguous()
    out = torch.empty(num_tokens, q_heads, width_v, dtype=q.dtype, device=q.device)
    if not num_tokens:
        return out
    group = q_heads // kv_heads
    padded_k, padded_v = (max(16, triton.next_power_of_2(width)) for width in (width_k, width_v))
    widest = max(padded_k, padded_v)
    block_n = 64 if widest <= 128 else 32 if widest <= 256 else 16
    block_m = 16 if max_query_len * group <= 16 or widest > 256 else 64 if widest <= 128 else 32
    grid = (triton.cdiv(max_query_len * group, block_m), kv_heads, seq_lens.shape[0])
    _paged_attention_kernel[grid](
        *(q, k_plane, v_plane, out, cu_seqlens, seq_lens, block_tables, sinks),
        *(scale, softcap, q_heads, kv_heads, block_tables.stride(0)),
        GROUP=group,
        BLOCK_SIZE=block_size,
        WINDOW=window,
        CHUNK=chunk,
        SOFTCAP=softcap > 0,
        WIDTH_K=width_k,
        WIDTH_V=width_v,
        PADDED_K=padded_k,
        PADDED_V=padded_v,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_stages=2 if widest <= 256 else 1,
    )
    return out


@triton.jit
def _store_kernel(rows, plane, slot_mapping, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(rows + row * width + offsets, mask=offsets < width)
    slot = tl.load(slot_mapping + row).to(tl.int64)
    tl.store(plane + slot * width + offsets, values.to(plane.dtype.element_ty), mask=offsets < width)


@triton.jit
def _paged_attention_kernel(
    q, k_plane, v_plane, out, cu_seqlens, seq_lens, block_tables, sinks,
    scale, softcap, q_heads, kv_heads, table_stride,
    GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr,
    WIDTH_K: tl.constexpr, WIDTH_V: tl.constexpr, PADDED_K: tl.constexpr, PADDED_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """M rows are (query token, query head of this key head) pairs, N are keys."""
    kv_head, request = tl.program_id(1), tl.program_id(2).to(tl.int64)
    first_row = tl.program_id(0) * BLOCK_M
    query_start = tl.load(cu_seqlens + request).to(tl.int64)
    query_len = tl.load(cu_seqlens + request + 1) - query_start.to(tl.int32)
    if first_row >= query_len * GROUP:
        return
    seq_len = tl.load(seq_lens + request)
    rows = first_row + tl.arange(0, BLOCK_M)
    token, head = rows // GROUP, kv_head * GROUP + rows % GROUP
    live = token < query_len
    position = seq_len - query_len + token
    first = seq_len - query_len + first_row // GROUP
    last = tl.minimum(seq_len - query_len + (first_row + BLOCK_M - 1) // GROUP, seq_len - 1)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(begin, first - WINDOW + 1)
    if CHUNK > 0:
        begin = tl.maximum(begin, first // CHUNK * CHUNK)
    begin = begin // BLOCK_N * BLOCK_N

    k_lane, v_lane = tl.arange(0, PADDED_K), tl.arange(0, PADDED_V)
    row_index = (query_start + token) * q_heads + head
    q_mask = live[:, None] & (k_lane < WIDTH_K)[None, :]
    query = tl.load(q + row_index[:, None] * WIDTH_K + k_lane[None, :], mask=q_mask, other=0.0)
    if sinks is not None:
        largest = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32)
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, PADDED_V], tl.float32)

    for start in range(begin, last + 1, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        inside = key <= last
        block = tl.load(block_tables + request * table_stride + key // BLOCK_SIZE, mask=inside, other=0)
        slot = (block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE) * kv_heads + kv_head
        k_mask = inside[None, :] & (k_lane < WIDTH_K)[:, None]
        keys = tl.load(k_plane + slot[None, :] * WIDTH_K + k_lane[:, None], mask=k_mask, other=0.0)
        score = tl.dot(query, keys.to(query.dtype), input_precision="ieee") * scale
        if SOFTCAP:
            score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)  # softcap * tanh(score / softcap)
        visible = inside[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            visible = visible & (key[None, :] > position[:, None] - WINDOW)
        if CHUNK > 0:
            visible = visible & (key[None, :] // CHUNK == position[:, None] // CHUNK)
        score = tl.where(visible, score, float("-inf"))
        largest_now = tl.maximum(largest, tl.max(score, 1))
        base = tl.where(largest_now == float("-inf"), 0.0, largest_now)
        weight = tl.exp(score - base[:, None])
        shrink = tl.exp(largest - base)
        v_mask = inside[:, None] & (v_lane < WIDTH_V)[None, :]
        values = tl.load(v_plane + slot[:, None] * WIDTH_V + v_lane[None, :], mask=v_mask, other=0.0)
        total = total * shrink + tl.sum(weight, 1)
        mixed = mixed * shrink[:, None] + tl.dot(weight.to(values.dtype), values, input_precision="ieee")
        largest = largest_now

    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    out_mask = live[:, None] & (v_lane < WIDTH_V)[None, :]
    tl.store(out + row_index[:, None] * WIDTH_V + v_lane[None, :], mixed.to(out.dtype.element_ty), mask=out_mask)
