"""Paged attention in Triton: rows into their slots, and causal attention over block tables.

Online softmax over key blocks (Dao et al. 2205.14135); the query heads of a key head share a tile, so each key is read
once. The keys of a request fall into pieces whose bounds are absolute positions. A piece starts from an empty softmax,
pieces are merged in order, and a key that a row does not see changes none of its bits: what a short query (decoding,
verification) gets depends neither on its neighbours nor on which programs took which piece. Few requests are spread
over programs piece by piece and merged by a second kernel, many take one program each; either way a fixed number of
programs walks the work that the lengths on the device leave, so a bound far above them costs nothing.
"""

# Triton gives launches and kernel bodies meanings that its own annotations do not express.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

SHORT_QUERY = 64  # rows of a request up to which its bits do not depend on how many rows there are
WORKSPACE_BYTES = 256 * 2**20


class Pieces(NamedTuple):
    """Where keys are cut: `count` pieces of `first` keys, then pieces of `rest`; multiples of every key block."""

    count: int
    first: int
    rest: int

    def up_to(self, num_keys: int) -> int:
        """How many pieces hold that many keys."""
        edge = self.count * self.first
        return -(-min(num_keys, edge) // self.first) + -(-max(num_keys - edge, 0) // self.rest)


class Tiling(NamedTuple):
    """How one program works; `programs` is a multiple of the multiprocessors."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs: int


PIECES = Pieces(4, 256, 512)


def short_tiling(group: int, widest: int, itemsize: int) -> Tiling:
    """The tiling of short queries: a function of the model alone, never of a batch, so that bits are."""
    block_m = min(max(16, triton.next_power_of_2(8 * group)), 32)
    if widest <= 128 and itemsize <= 2:
        return Tiling(block_m, 64, 4, 4, 3)
    return Tiling(min(block_m, 32 if widest <= 256 else 16), 32 if widest <= 256 else 16, 4, 2, 2)


def long_tiling(widest: int, itemsize: int) -> Tiling:
    """The tiling of prompt chunks, which are bound by arithmetic."""
    if widest <= 128 and itemsize <= 2:
        return Tiling(128, 64, 8, 3, 2)
    if widest <= 256:
        return Tiling(64 if widest <= 128 else 32, 32, 4, 2, 2)
    return Tiling(16, 16, 4, 1, 2)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; a few where the interpreter runs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def store_kv(k: Tensor, v: Tensor | None, k_plane: Tensor, v_plane: Tensor | None, slot_mapping: Tensor) -> None:
    """See `reference.store_kv`; tensors on one GPU. Raises ValueError when rows do not fit a contiguous plane."""
    if v is None or v_plane is None:
        v, v_plane = None, None
    pairs = ((k, k_plane),) if v is None or v_plane is None else ((k, k_plane), (v, v_plane))
    for rows, plane in pairs:
        if rows.shape[1:] != plane.shape[2:] or not plane.is_contiguous():
            raise ValueError(f"rows {list(rows.shape)} do not fit a contiguous plane of {list(plane.shape)}")
    if not k.numel():
        return
    k, v = _dense_rows(k), None if v is None else _dense_rows(v)
    heads, width_k = k.shape[1:]
    width_v = 0 if v is None else v.shape[2]
    block = min(1024, triton.next_power_of_2(heads * max(width_k, width_v)))
    grid = (k.shape[0], triton.cdiv(heads * max(width_k, width_v), block))
    k_strides, v_strides = k.stride()[:2], (0, 0) if v is None else v.stride()[:2]
    _store_kernel[grid](
        *(k, v, k_plane, v_plane, slot_mapping, *k_strides, *v_strides, heads),
        WIDTH_K=width_k,
        WIDTH_V=width_v,
        BLOCK=block,
    )


def _dense_rows(rows: Tensor) -> Tensor:
    return rows if rows.stride(-1) == 1 else rows.contiguous()


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
    """See `reference.paged_attention`; tensors on one GPU. Raises ValueError on shapes that do not belong together.

    The maxima are upper bounds and nothing is read back, so that a launch can be captured. Rows of queries of up to
    `SHORT_QUERY` rows are bit-equal whatever else is in the batch and however many rows stand beside them.
    """
    num_tokens, q_heads, width_k = q.shape
    block_size, kv_heads, width_v = v_plane.shape[1:]
    if k_plane.shape[-1] != width_k or k_plane.shape[:-1] != v_plane.shape[:-1] or q_heads % kv_heads:
        raise ValueError(
            f"planes {list(k_plane.shape)} and {list(v_plane.shape)} do not fit queries {list(q.shape)}: widths must "
            f"agree and key heads divide query heads"
        )
    if not (k_plane.is_contiguous() and v_plane.is_contiguous()):
        raise ValueError("planes must be contiguous, found strided ones; pass them as they were allocated")
    q, block_tables = _dense_rows(q), block_tables.contiguous()
    out = torch.empty(num_tokens, q_heads, width_v, dtype=q.dtype, device=q.device)
    batch = seq_lens.shape[0]
    if not num_tokens or not batch:
        return out
    tensors = (q, k_plane, v_plane, out, cu_seqlens, seq_lens, block_tables, sinks)
    numbers = (scale * math.log2(math.e), softcap, batch, q_heads, kv_heads)
    strides = (block_tables.stride(0), q.stride(0), q.stride(1))
    group, widest, itemsize = q_heads // kv_heads, max(width_k, width_v), k_plane.element_size()
    main_k = max(16, triton.next_power_of_2(width_k + 1) // 2)
    shape = {
        "REQUESTS": 256 if batch <= 256 else triton.next_power_of_2(batch),
        "GROUP": group,
        "BLOCK_SIZE": block_size,
        "WINDOW": 0 if window >= max_seq_len else window,
        "CHUNK": 0 if chunk >= max_seq_len else chunk,
        "SOFTCAP": softcap > 0,
        "WIDTH_K": width_k,
        "WIDTH_V": width_v,
        "MAIN_K": main_k,
        "TAIL_K": max(16, triton.next_power_of_2(width_k - main_k)) if width_k > main_k else 0,
        "PADDED_V": max(16, triton.next_power_of_2(width_v)),
    }
    _attend_short(tensors, numbers, strides, shape, min(max_query_len, SHORT_QUERY), max_seq_len, itemsize)
    if max_query_len > SHORT_QUERY:
        tiling = long_tiling(widest, itemsize)
        most = batch * kv_heads * triton.cdiv(max_query_len * group, tiling.block_m)
        _launch(tensors, (None, None), numbers, strides, (0, 0), shape, tiling, most, SHORT=False)
    return out


def _attend_short(
    tensors: tuple[Tensor | None, ...],
    numbers: tuple[float, ...],
    strides: tuple[int, ...],
    shape: dict[str, int],
    max_rows: int,
    max_seq_len: int,
    itemsize: int,
) -> None:
    """Queries of up to `max_rows` rows: a program a request where they fill the GPU, else a program a piece."""
    q, out = tensors[0], tensors[3]
    assert q is not None and out is not None
    _, _, batch, q_heads, kv_heads = (int(number) for number in numbers)
    tiling = short_tiling(shape["GROUP"], max(shape["WIDTH_K"], shape["WIDTH_V"]), itemsize)
    tiles = batch * kv_heads * triton.cdiv(max_rows * shape["GROUP"], tiling.block_m)
    pieces = PIECES.up_to(max_seq_len)
    rows = batch * max_rows * q_heads * pieces
    split = pieces > 1 and tiles < 2 * multiprocessors(q.device) and rows * shape["WIDTH_V"] * 4 <= WORKSPACE_BYTES
    if not split:
        _launch(tensors, (None, None), numbers, strides, (0, 0), shape, tiling, tiles, SHORT=True)
        return
    mixed = torch.empty(rows, shape["WIDTH_V"], dtype=torch.float32, device=q.device)
    stats = torch.empty(rows, 2, dtype=torch.float32, device=q.device)
    limits = (max_rows, pieces)
    _launch(tensors, (mixed, stats), numbers, strides, limits, shape, tiling, tiles * pieces, SHORT=True)
    cu_seqlens, seq_lens, sinks = tensors[4], tensors[5], tensors[7]
    _merge_kernel[(max_rows, q_heads, batch)](
        *(mixed, stats, out, cu_seqlens, seq_lens, sinks, q_heads, *limits),
        WINDOW=shape["WINDOW"],
        CHUNK=shape["CHUNK"],
        COUNT=PIECES.count,
        FIRST=PIECES.first,
        REST=PIECES.rest,
        WIDTH_V=shape["WIDTH_V"],
        PADDED_V=shape["PADDED_V"],
        AHEAD=8,
        num_warps=max(1, min(4, shape["PADDED_V"] // 32)),
    )


def _launch(
    tensors: tuple[Tensor | None, ...],
    partial: tuple[Tensor | None, Tensor | None],
    numbers: tuple[float, ...],
    strides: tuple[int, ...],
    limits: tuple[int, int],
    shape: dict[str, int],
    tiling: Tiling,
    most: int,
    SHORT: bool,
) -> None:
    seq_lens = tensors[5]
    assert seq_lens is not None
    programs = min(most, tiling.programs * multiprocessors(seq_lens.device))
    _attend_kernel[(programs,)](
        *(*tensors, *partial, *numbers, *strides, *limits),
        **shape,
        SHORT=SHORT,
        SHORT_QUERY=SHORT_QUERY,
        COUNT=PIECES.count,
        FIRST=PIECES.first,
        REST=PIECES.rest,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )


@triton.jit
def _store_kernel(
    k, v, k_plane, v_plane, slot_mapping, k_row, k_head, v_row, v_head, heads,
    WIDTH_K: tl.constexpr, WIDTH_V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slot_mapping + row).to(tl.int64)
    inside = lane < heads * WIDTH_K
    values = tl.load(k + row * k_row + lane // WIDTH_K * k_head + lane % WIDTH_K, mask=inside)
    tl.store(k_plane + slot * heads * WIDTH_K + lane, values.to(k_plane.dtype.element_ty), mask=inside)
    if v is not None:
        inside = lane < heads * WIDTH_V
        values = tl.load(v + row * v_row + lane // WIDTH_V * v_head + lane % WIDTH_V, mask=inside)
        tl.store(v_plane + slot * heads * WIDTH_V + lane, values.to(v_plane.dtype.element_ty), mask=inside)


@triton.jit
def _piece_of(key, COUNT: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr):
    EDGE: tl.constexpr = COUNT * FIRST
    return tl.minimum(key, EDGE - 1) // FIRST + tl.maximum(key - EDGE + REST, 0) // REST


@triton.jit
def _piece_start(piece, COUNT: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr):
    return tl.minimum(piece, COUNT) * FIRST + tl.maximum(piece - COUNT, 0) * REST


@triton.jit
def _first_key(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(first, position - WINDOW + 1)
    if CHUNK > 0:
        first = tl.maximum(first, position // CHUNK * CHUNK)
    return first


@triton.jit
def _finite(largest):
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def _merge(largest, total, mixed, piece_largest, piece_total, piece_mixed):
    """Joins a piece to those before it. The products are fused by hand: a compiler's choice could differ by caller."""
    both = tl.maximum(largest, piece_largest)
    ours, theirs = tl.exp2(largest - _finite(both)), tl.exp2(piece_largest - _finite(both))
    total = tl.fma(total, ours, piece_total * theirs)
    mixed = tl.fma(mixed, tl.broadcast_to(ours[:, None], mixed.shape), piece_mixed * theirs[:, None])
    return both, total, mixed


@triton.jit
def _finish(largest, total, mixed, sink):
    """The mean of values; `sink` (or minus infinity) is a key without a value."""
    both = tl.maximum(largest, sink)
    shrink = tl.exp2(largest - _finite(both))
    total = tl.fma(total, shrink, tl.exp2(sink - _finite(both)))
    total = tl.where(total == 0.0, 1.0, total)
    return mixed * shrink[:, None] / total[:, None]


@triton.jit
def _attend_keys(
    query, query_tail, largest, total, mixed, position, begin, end, last,
    k_plane, v_plane, table, kv_head, kv_heads, scale, softcap,
    MASKED: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr,
    WIDTH_K: tl.constexpr, WIDTH_V: tl.constexpr, MAIN_K: tl.constexpr, TAIL_K: tl.constexpr, PADDED_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Walks keys begin to end (a multiple of BLOCK_N onwards); without MASKED every row must see all of them."""
    k_lane, tail_lane, v_lane = tl.arange(0, MAIN_K), MAIN_K + tl.arange(0, max(TAIL_K, 16)), tl.arange(0, PADDED_V)
    last = tl.maximum(last, 0)
    near = tl.minimum(begin + tl.arange(0, BLOCK_N), last)  # past the end the last key is read again, and not seen
    block = tl.load(table + near // BLOCK_SIZE)
    for start in range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        slot = (block.to(tl.int64) * BLOCK_SIZE + near % BLOCK_SIZE) * kv_heads + kv_head
        near = tl.minimum(key + BLOCK_N, last)
        block = tl.load(table + near // BLOCK_SIZE)  # a step ahead, so that rows are not waited for twice
        k_rows = k_plane + slot[:, None] * WIDTH_K
        if MAIN_K <= WIDTH_K:
            keys = tl.load(k_rows + k_lane[None, :])
        else:
            keys = tl.load(k_rows + k_lane[None, :], mask=(k_lane < WIDTH_K)[None, :], other=0.0)
        score = tl.dot(query, tl.trans(keys.to(query.dtype)), input_precision="ieee")
        if TAIL_K > 0:
            tail = tl.load(k_rows + tail_lane[None, :], mask=(tail_lane < WIDTH_K)[None, :], other=0.0)
            score = tl.dot(query_tail, tl.trans(tail.to(query.dtype)), score, input_precision="ieee")
        score = score * scale  # in units of log2
        if SOFTCAP:
            cap = softcap * 1.4426950408889634
            score = cap * (2.0 * tl.sigmoid(2.0 * score / cap) - 1.0)  # cap * tanh(score / cap)
        if MASKED:
            visible = key[None, :] <= position[:, None]
            if WINDOW > 0:
                visible = visible & (key[None, :] > position[:, None] - WINDOW)
            if CHUNK > 0:
                visible = visible & (key[None, :] // CHUNK == position[:, None] // CHUNK)
            score = tl.where(visible, score, float("-inf"))
        largest_now = tl.maximum(largest, tl.max(score, 1))
        base = _finite(largest_now)
        weight = tl.exp2(score - base[:, None])
        shrink = tl.exp2(largest - base)
        v_rows = v_plane + slot[:, None] * WIDTH_V
        if PADDED_V == WIDTH_V:
            values = tl.load(v_rows + v_lane[None, :])
        else:
            values = tl.load(v_rows + v_lane[None, :], mask=(v_lane < WIDTH_V)[None, :], other=0.0)
        total = total * shrink + tl.sum(weight, 1)
        mixed = tl.dot(weight.to(values.dtype), values, mixed * shrink[:, None], input_precision="ieee")
        largest = largest_now
    return largest, total, mixed


@triton.jit
def _attend_kernel(
    q, k_plane, v_plane, out, cu_seqlens, seq_lens, block_tables, sinks, partial_mixed, partial_stats,
    scale, softcap, batch, q_heads, kv_heads, table_stride, q_row, q_head, max_rows, max_pieces,
    REQUESTS: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr, WIDTH_K: tl.constexpr, WIDTH_V: tl.constexpr, MAIN_K: tl.constexpr, TAIL_K: tl.constexpr,
    PADDED_V: tl.constexpr, SHORT: tl.constexpr, SHORT_QUERY: tl.constexpr,
    COUNT: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Rows of a tile are (query token, query head of this key head) pairs; an item is a tile, a key head and a piece.

    With partial buffers an item covers one piece and leaves its softmax there, else it covers all and writes `out`.
    """
    lane = tl.arange(0, REQUESTS)
    ends = tl.load(cu_seqlens + lane + 1, mask=lane < batch, other=0)
    query_lens = ends - tl.load(cu_seqlens + lane, mask=lane < batch, other=0)
    items = (query_lens * GROUP + BLOCK_M - 1) // BLOCK_M * kv_heads
    items = tl.where((query_lens <= SHORT_QUERY) == SHORT, items, 0)
    if partial_mixed is not None:
        lens = tl.load(seq_lens + lane, mask=lane < batch, other=1)
        lowest = _piece_of(_first_key(tl.maximum(lens - query_lens, 0), WINDOW, CHUNK), COUNT, FIRST, REST)
        items *= _piece_of(tl.maximum(lens - 1, 0), COUNT, FIRST, REST) - lowest + 1
    bounds = tl.cumsum(items, 0)
    num_items = tl.max(bounds, 0)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        request = tl.sum((bounds <= item).to(tl.int32), 0).to(tl.int64)
        inner = item - tl.max(tl.where(bounds <= item, bounds, 0), 0)
        query_start = tl.load(cu_seqlens + request).to(tl.int64)
        query_len = tl.load(cu_seqlens + request + 1) - query_start.to(tl.int32)
        seq_len = tl.load(seq_lens + request)
        kv_head, inner = inner % kv_heads, inner // kv_heads
        tiles = (query_len * GROUP + BLOCK_M - 1) // BLOCK_M
        first_row = inner % tiles * BLOCK_M
        rows = first_row + tl.arange(0, BLOCK_M)
        token, head = rows // GROUP, kv_head * GROUP + rows % GROUP
        live = token < query_len
        past = seq_len - query_len
        position = past + token
        first = past + first_row // GROUP
        last = tl.minimum(past + (first_row + BLOCK_M - 1) // GROUP, seq_len - 1)
        begin = _first_key(first, WINDOW, CHUNK)
        piece = _piece_of(_first_key(tl.maximum(past, 0), WINDOW, CHUNK), COUNT, FIRST, REST) + inner // tiles

        k_lane, tail_lane, v_lane = tl.arange(0, MAIN_K), MAIN_K + tl.arange(0, max(TAIL_K, 16)), tl.arange(0, PADDED_V)
        q_rows = q + (query_start + token)[:, None] * q_row + head[:, None] * q_head
        query = tl.load(q_rows + k_lane[None, :], mask=live[:, None] & (k_lane < WIDTH_K)[None, :], other=0.0)
        query_tail = query
        if TAIL_K > 0:
            query_tail = tl.load(
                q_rows + tail_lane[None, :], mask=live[:, None] & (tail_lane < WIDTH_K)[None, :], other=0.0
            )
        table = block_tables + request * table_stride
        largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        mixed = tl.zeros([BLOCK_M, PADDED_V], tl.float32)
        if SHORT and partial_mixed is None:
            for p in range(piece, _piece_of(tl.maximum(last, 0), COUNT, FIRST, REST) + 1):
                start = tl.maximum(begin, _piece_start(p, COUNT, FIRST, REST)) // BLOCK_N * BLOCK_N
                end = tl.minimum(last + 1, _piece_start(p + 1, COUNT, FIRST, REST))
                piece_largest, piece_total, piece_mixed = _attend_keys(
                    query, query_tail, tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32),
                    tl.zeros([BLOCK_M, PADDED_V], tl.float32), position, start, end, last,
                    k_plane, v_plane, table, kv_head, kv_heads, scale, softcap,
                    True, BLOCK_SIZE, WINDOW, CHUNK, SOFTCAP, WIDTH_K, WIDTH_V, MAIN_K, TAIL_K, PADDED_V, BLOCK_N,
                )  # fmt: skip
                largest, total, mixed = _merge(largest, total, mixed, piece_largest, piece_total, piece_mixed)
        else:
            start = begin // BLOCK_N * BLOCK_N
            end = last + 1
            if SHORT:
                start = tl.maximum(start, _piece_start(piece, COUNT, FIRST, REST))
                end = tl.minimum(end, _piece_start(piece + 1, COUNT, FIRST, REST))
            elif WINDOW == 0 and CHUNK == 0:
                full = (first + 1) // BLOCK_N * BLOCK_N
                largest, total, mixed = _attend_keys(
                    query, query_tail, largest, total, mixed, position, start, full, last,
                    k_plane, v_plane, table, kv_head, kv_heads, scale, softcap,
                    False, BLOCK_SIZE, WINDOW, CHUNK, SOFTCAP, WIDTH_K, WIDTH_V, MAIN_K, TAIL_K, PADDED_V, BLOCK_N,
                )  # fmt: skip
                start = full
            largest, total, mixed = _attend_keys(
                query, query_tail, largest, total, mixed, position, start, end, last,
                k_plane, v_plane, table, kv_head, kv_heads, scale, softcap,
                True, BLOCK_SIZE, WINDOW, CHUNK, SOFTCAP, WIDTH_K, WIDTH_V, MAIN_K, TAIL_K, PADDED_V, BLOCK_N,
            )  # fmt: skip

        lane_mask = live[:, None] & (v_lane < WIDTH_V)[None, :]
        if partial_mixed is not None:
            row = ((request * max_rows + token) * q_heads + head) * max_pieces + piece
            tl.store(partial_stats + row * 2, largest, mask=live)
            tl.store(partial_stats + row * 2 + 1, total, mask=live)
            tl.store(partial_mixed + row[:, None] * WIDTH_V + v_lane[None, :], mixed, mask=lane_mask)
        else:
            sink = tl.full([BLOCK_M], float("-inf"), tl.float32)
            if sinks is not None:
                sink = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
            mean = _finish(largest, total, mixed, sink).to(out.dtype.element_ty)
            row = (query_start + token) * q_heads + head
            tl.store(out + row[:, None] * WIDTH_V + v_lane[None, :], mean, mask=lane_mask)


@triton.jit
def _merge_kernel(
    partial_mixed, partial_stats, out, cu_seqlens, seq_lens, sinks, q_heads, max_rows, max_pieces,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, COUNT: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
    WIDTH_V: tl.constexpr, PADDED_V: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One program a query token and head: its pieces in order, AHEAD of them read at a time."""
    token, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    query_start = tl.load(cu_seqlens + request).to(tl.int64)
    query_len = tl.load(cu_seqlens + request + 1) - query_start.to(tl.int32)
    if (token >= query_len) | (query_len > max_rows):
        return
    seq_len = tl.load(seq_lens + request)
    low = _piece_of(_first_key(tl.maximum(seq_len - query_len, 0), WINDOW, CHUNK), COUNT, FIRST, REST)
    high = _piece_of(tl.maximum(seq_len - 1, 0), COUNT, FIRST, REST) + 1
    v_lane = tl.arange(0, PADDED_V)
    row = ((request * max_rows + token) * q_heads + head) * max_pieces
    one = tl.arange(0, 1)
    largest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    mixed = tl.zeros([1, PADDED_V], tl.float32)
    for begin in range(low, high, AHEAD):
        for ahead in tl.static_range(AHEAD):
            piece = begin + ahead + one
            there = piece < high
            part_largest = tl.load(partial_stats + (row + piece) * 2, mask=there, other=float("-inf"))
            part_total = tl.load(partial_stats + (row + piece) * 2 + 1, mask=there, other=0.0)
            lane_mask = there[:, None] & (v_lane < WIDTH_V)[None, :]
            part_rows = partial_mixed + (row + piece)[:, None] * WIDTH_V
            part_mixed = tl.load(part_rows + v_lane[None, :], mask=lane_mask, other=0.0)
            largest, total, mixed = _merge(largest, total, mixed, part_largest, part_total, part_mixed)
    sink = tl.full([1], float("-inf"), tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head + one).to(tl.float32) * 1.4426950408889634
    mean = _finish(largest, total, mixed, sink).to(out.dtype.element_ty)
    row = (query_start + token) * q_heads + head
    tl.store(out + row * WIDTH_V + v_lane[None, :], mean, mask=(v_lane < WIDTH_V)[None, :])
