"""The kernels of paged attention; `attention` launches them and says how work is cut.

Capitals are compile-time constants: M rows of a tile are (query token, query head of one key head) pairs, N are keys.
"""

# Triton gives kernel bodies meanings that its own annotations do not express.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def store_kernel(
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
def _piece_of(key, NUM_FIRST: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr):
    EDGE: tl.constexpr = NUM_FIRST * FIRST
    return tl.minimum(key, EDGE - 1) // FIRST + tl.maximum(key - EDGE + REST, 0) // REST


@triton.jit
def _piece_start(piece, NUM_FIRST: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr):
    return tl.minimum(piece, NUM_FIRST) * FIRST + tl.maximum(piece - NUM_FIRST, 0) * REST


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
    query, query_tail, largest, total, mixed, position, reach, begin, end, last,
    k_plane, v_plane, table, kv_head, kv_heads, scale, softcap,
    MASKED: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr,
    WIDTH_K: tl.constexpr, WIDTH_V: tl.constexpr, MAIN_K: tl.constexpr, TAIL_K: tl.constexpr, PADDED_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Walks keys begin to end (a multiple of BLOCK_N onwards); without MASKED every row must see all of them.

    A row sees keys up to its `reach`; window and chunk count from its position.
    """
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
            cap = softcap * LOG2_E
            score = cap * (2.0 * tl.sigmoid(2.0 * score / cap) - 1.0)  # cap * tanh(score / cap)
        if MASKED:
            visible = key[None, :] <= reach[:, None]
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


@triton.jit(do_not_specialize=["batch", "table_stride", "max_rows", "max_pieces"])
def attend_kernel(
    q, k_plane, v_plane, out, cu_seqlens, seq_lens, block_tables, sinks, partial_mixed, partial_stats,
    scale, softcap, batch, q_heads, kv_heads, table_stride, q_row, q_head, max_rows, max_pieces,
    REQUESTS: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr, WIDTH_K: tl.constexpr, WIDTH_V: tl.constexpr, MAIN_K: tl.constexpr, TAIL_K: tl.constexpr,
    PADDED_V: tl.constexpr, SHORT: tl.constexpr, SHORT_QUERY: tl.constexpr, CAUSAL: tl.constexpr,
    NUM_FIRST: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
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
        lowest = _piece_of(_first_key(tl.maximum(lens - query_lens, 0), WINDOW, CHUNK), NUM_FIRST, FIRST, REST)
        items *= _piece_of(tl.maximum(lens - 1, 0), NUM_FIRST, FIRST, REST) - lowest + 1
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
        reach = position
        if not CAUSAL:
            last = seq_len - 1
            reach = position * 0 + last
        begin = _first_key(first, WINDOW, CHUNK)
        piece = _piece_of(_first_key(tl.maximum(past, 0), WINDOW, CHUNK), NUM_FIRST, FIRST, REST) + inner // tiles

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
            for p in range(piece, _piece_of(tl.maximum(last, 0), NUM_FIRST, FIRST, REST) + 1):
                start = tl.maximum(begin, _piece_start(p, NUM_FIRST, FIRST, REST)) // BLOCK_N * BLOCK_N
                end = tl.minimum(last + 1, _piece_start(p + 1, NUM_FIRST, FIRST, REST))
                piece_largest, piece_total, piece_mixed = _attend_keys(
                    query, query_tail, tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32),
                    tl.zeros([BLOCK_M, PADDED_V], tl.float32), position, reach, start, end, last,
                    k_plane, v_plane, table, kv_head, kv_heads, scale, softcap,
                    True, BLOCK_SIZE, WINDOW, CHUNK, SOFTCAP, WIDTH_K, WIDTH_V, MAIN_K, TAIL_K, PADDED_V, BLOCK_N,
                )  # fmt: skip
                largest, total, mixed = _merge(largest, total, mixed, piece_largest, piece_total, piece_mixed)
        else:
            start = begin // BLOCK_N * BLOCK_N
            end = last + 1
            if SHORT:
                start = tl.maximum(start, _piece_start(piece, NUM_FIRST, FIRST, REST))
                end = tl.minimum(end, _piece_start(piece + 1, NUM_FIRST, FIRST, REST))
            elif WINDOW == 0 and CHUNK == 0:
                full = (first + 1) // BLOCK_N * BLOCK_N
                largest, total, mixed = _attend_keys(
                    query, query_tail, largest, total, mixed, position, reach, start, full, last,
                    k_plane, v_plane, table, kv_head, kv_heads, scale, softcap,
                    False, BLOCK_SIZE, WINDOW, CHUNK, SOFTCAP, WIDTH_K, WIDTH_V, MAIN_K, TAIL_K, PADDED_V, BLOCK_N,
                )  # fmt: skip
                start = full
            largest, total, mixed = _attend_keys(
                query, query_tail, largest, total, mixed, position, reach, start, end, last,
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
                sink = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * LOG2_E
            mean = _finish(largest, total, mixed, sink).to(out.dtype.element_ty)
            row = (query_start + token) * q_heads + head
            tl.store(out + row[:, None] * WIDTH_V + v_lane[None, :], mean, mask=lane_mask)


@triton.jit(do_not_specialize=["max_rows", "max_pieces"])
def merge_kernel(
    partial_mixed, partial_stats, out, cu_seqlens, seq_lens, sinks, q_heads, max_rows, max_pieces,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, NUM_FIRST: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
    WIDTH_V: tl.constexpr, PADDED_V: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One program a query token and head: its pieces in order, AHEAD of them read at a time."""
    token, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    query_start = tl.load(cu_seqlens + request).to(tl.int64)
    query_len = tl.load(cu_seqlens + request + 1) - query_start.to(tl.int32)
    if (token >= query_len) | (query_len > max_rows):
        return
    seq_len = tl.load(seq_lens + request)
    low = _piece_of(_first_key(tl.maximum(seq_len - query_len, 0), WINDOW, CHUNK), NUM_FIRST, FIRST, REST)
    high = _piece_of(tl.maximum(seq_len - 1, 0), NUM_FIRST, FIRST, REST) + 1
    v_lane = tl.arange(0, PADDED_V)
    row = ((request * max_rows + token) * q_heads + head) * max_pieces
    one = tl.arange(0, 1)
    largest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    mixed = tl.zeros([1, PADDED_V], tl.float32)
    for begin in range(low, high, AHEAD):
        parts = ()
        for ahead in tl.static_range(AHEAD):  # all loads before the first use, which they would else wait for in turn
            piece = begin + ahead + one
            there = piece < high
            part_largest = tl.load(partial_stats + (row + piece) * 2, mask=there, other=float("-inf"))
            part_total = tl.load(partial_stats + (row + piece) * 2 + 1, mask=there, other=0.0)
            part_rows = partial_mixed + (row + piece)[:, None] * WIDTH_V + v_lane[None, :]
            part_mixed = tl.load(part_rows, mask=there[:, None] & (v_lane < WIDTH_V)[None, :], other=0.0)
            parts = parts + (part_largest, part_total, part_mixed)
        for ahead in tl.static_range(AHEAD):
            part_largest, part_total, part_mixed = parts[3 * ahead], parts[3 * ahead + 1], parts[3 * ahead + 2]
            largest, total, mixed = _merge(largest, total, mixed, part_largest, part_total, part_mixed)
    sink = tl.full([1], float("-inf"), tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head + one).to(tl.float32) * LOG2_E
    mean = _finish(largest, total, mixed, sink).to(out.dtype.element_ty)
    row = (query_start + token) * q_heads + head
    tl.store(out + row * WIDTH_V + v_lane[None, :], mean, mask=(v_lane < WIDTH_V)[None, :])
