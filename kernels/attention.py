"""Paged attention in Triton: rows into their slots, and causal attention over block tables.

Online softmax over key blocks (Dao et al. 2205.14135); the query heads of a key head share a tile, so each key is read
once. The keys of a request fall into pieces whose bounds are absolute positions. A piece starts from an empty softmax,
pieces are merged in order, and a key that a row does not see changes none of its bits: what a short query (decoding,
verification) gets depends neither on its neighbours nor on which programs took which piece. Few requests are spread
over programs piece by piece and merged by a second kernel, many take one program each; either way a fixed number of
programs walks the work that the lengths on the device leave, so a bound far above them costs nothing.
"""

# Triton gives launches a meaning that its own annotations do not express.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false

import functools
import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from .attention_kernels import attend_kernel, merge_kernel, store_kernel
from .records import AttentionInputs

SHORT_QUERY = 64  # rows of a request up to which its bits do not depend on how many rows there are
WORKSPACE_BYTES = 256 * 2**20
AHEAD = 8  # pieces that the merge reads at a time
FILLING = 2  # programs a multiprocessor that need no help


class Pieces(NamedTuple):
    """Where keys are cut: `num_first` pieces of `first` keys, then pieces of `rest`; multiples of every key block."""

    num_first: int
    first: int
    rest: int

    def up_to(self, num_keys: int) -> int:
        """How many pieces hold that many keys."""
        edge = self.num_first * self.first
        return -(-min(num_keys, edge) // self.first) + -(-max(num_keys - edge, 0) // self.rest)


class Tiling(NamedTuple):
    """How one program works; `programs` is a multiple of the multiprocessors."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs: int


PIECES = Pieces(4, 256, 1024)


def short_tiling(group: int, widest: int, itemsize: int) -> Tiling:
    """The tiling of short queries: a function of the model alone, never of a batch, so that bits are."""
    block_m = min(max(16, triton.next_power_of_2(8 * group)), 32)
    if widest <= 128 and itemsize <= 2:
        return Tiling(block_m, 64, 4, 3, 2)
    return Tiling(min(block_m, 32 if widest <= 256 else 16), 32 if widest <= 256 else 16, 4, 2, 2)


def long_tiling(widest: int, itemsize: int) -> Tiling:
    """The tiling of prompt chunks, which are bound by arithmetic."""
    if itemsize <= 2:
        if widest <= 128:
            return Tiling(128, 64, 8, 3, 2)
        return Tiling(32, 32, 4, 2, 2) if widest <= 256 else Tiling(32, 16, 8, 2, 2)
    return Tiling(32, 32, 8, 2, 2) if widest <= 128 else Tiling(16, 16, 8, 2 if widest <= 256 else 1, 2)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; a few where the interpreter runs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def store_kv(k: Tensor, v: Tensor | None, k_plane: Tensor, v_plane: Tensor | None, slot_mapping: Tensor) -> None:
    """See its twin; tensors on one GPU. Raises ValueError when rows do not fit a contiguous plane."""
    for rows, plane in ((k, k_plane), (v, v_plane)):
        if rows is not None and plane is not None and (rows.shape[1:] != plane.shape[2:] or not plane.is_contiguous()):
            raise ValueError(f"rows {list(rows.shape)} do not fit a contiguous plane of {list(plane.shape)}")
    if not k.numel():
        return
    k, v = _dense_rows(k), None if v is None or v_plane is None else _dense_rows(v)
    heads, width_k = k.shape[1:]
    width_v = 0 if v is None else v.shape[2]
    block = min(1024, triton.next_power_of_2(heads * max(width_k, width_v)))
    grid = (k.shape[0], triton.cdiv(heads * max(width_k, width_v), block))
    k_strides, v_strides = k.stride()[:2], (0, 0) if v is None else v.stride()[:2]
    store_kernel[grid](
        *(k, v, k_plane, v_plane, slot_mapping, *k_strides, *v_strides, heads),
        WIDTH_K=width_k,
        WIDTH_V=width_v,
        BLOCK=block,
    )


def _dense_rows(rows: Tensor) -> Tensor:
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def paged_attention(inputs: AttentionInputs) -> Tensor:
    """See its twin; tensors on one GPU. Raises ValueError on shapes that do not fit.

    The maxima are upper bounds and nothing is read back, so that a launch can be captured. Rows of queries of up to
    `SHORT_QUERY` rows are bit-equal whatever else is in the batch and however many rows stand beside them.
    """
    q, k_plane, v_plane = inputs.q, inputs.k_plane, inputs.v_plane
    num_tokens, q_heads, width_k = q.shape
    _, kv_heads, width_v = v_plane.shape[1:]
    if k_plane.shape[-1] != width_k or k_plane.shape[:-1] != v_plane.shape[:-1] or q_heads % kv_heads:
        raise ValueError(
            f"planes {list(k_plane.shape)} and {list(v_plane.shape)} do not fit queries {list(q.shape)}: widths must "
            f"agree and key heads divide query heads"
        )
    if not (k_plane.is_contiguous() and v_plane.is_contiguous()):
        raise ValueError("planes must be contiguous, found strided ones; pass them as they were allocated")
    out = torch.empty(num_tokens, q_heads, width_v, dtype=q.dtype, device=q.device)
    if not num_tokens or not inputs.seq_lens.shape[0]:
        return out
    window, chunk = (0 if size >= inputs.max_seq_len else size for size in (inputs.window, inputs.chunk))
    tables = inputs.block_tables.contiguous()
    call = _Call(inputs._replace(q=_dense_rows(q), block_tables=tables, window=window, chunk=chunk), out)
    _attend_short(call, min(inputs.max_query_len, SHORT_QUERY))
    if inputs.max_query_len > SHORT_QUERY:
        tiling = long_tiling(call.widest, k_plane.element_size())
        _launch(call, tiling, call.num_tiles(inputs.max_query_len, tiling), short=False)
    return out


class _Call(NamedTuple):
    inputs: AttentionInputs
    out: Tensor

    @property
    def batch(self) -> int:
        return self.inputs.seq_lens.shape[0]

    @property
    def widest(self) -> int:
        return max(self.inputs.k_plane.shape[3], self.inputs.v_plane.shape[3])

    @property
    def group(self) -> int:
        return self.inputs.q.shape[1] // self.inputs.k_plane.shape[2]

    def num_tiles(self, rows: int, tiling: Tiling) -> int:
        """Tiles of all key heads, if every request had that many query rows."""
        return self.batch * self.inputs.k_plane.shape[2] * triton.cdiv(rows * self.group, tiling.block_m)

    def pieces(self) -> dict[str, int]:
        width_v = self.inputs.v_plane.shape[3]
        return {
            "WINDOW": self.inputs.window,
            "CHUNK": self.inputs.chunk,
            "NUM_FIRST": PIECES.num_first,
            "FIRST": PIECES.first,
            "REST": PIECES.rest,
            "WIDTH_V": width_v,
            "PADDED_V": max(16, triton.next_power_of_2(width_v)),
        }


def _attend_short(call: _Call, max_rows: int) -> None:
    """Queries of up to `max_rows` rows: a program a request where they fill the GPU, else a program a piece."""
    inputs = call.inputs
    q_heads, width_v, device = inputs.q.shape[1], inputs.v_plane.shape[3], inputs.q.device
    tiling = short_tiling(call.group, call.widest, inputs.k_plane.element_size())
    tiles, pieces = call.num_tiles(max_rows, tiling), PIECES.up_to(inputs.max_seq_len)
    rows = call.batch * max_rows * q_heads * pieces
    fills = tiles >= FILLING * multiprocessors(device)
    if pieces == 1 or fills or rows * width_v * 4 > WORKSPACE_BYTES:
        _launch(call, tiling, tiles, short=True)
        return
    mixed = torch.empty(rows, width_v, dtype=torch.float32, device=device)
    stats = torch.empty(rows, 2, dtype=torch.float32, device=device)
    _launch(call, tiling, tiles * pieces, short=True, partial=(mixed, stats), limits=(max_rows, pieces))
    merge_kernel[(max_rows, q_heads, call.batch)](
        *(mixed, stats, call.out, inputs.cu_seqlens, inputs.seq_lens, inputs.sinks, q_heads, max_rows, pieces),
        **call.pieces(),
        AHEAD=AHEAD,
        num_warps=1 if width_v <= 128 else 4,
    )


def _launch(
    call: _Call,
    tiling: Tiling,
    most: int,
    *,
    short: bool,
    partial: tuple[Tensor | None, Tensor | None] = (None, None),
    limits: tuple[int, int] = (0, 0),
) -> None:
    """Programs for `most` items at most; `limits` are the rows and pieces a request has in the partial buffers."""
    inputs = call.inputs
    q, width_k = inputs.q, inputs.k_plane.shape[3]
    main_k = max(16, triton.next_power_of_2(width_k + 1) // 2)
    attend_kernel[(min(most, tiling.programs * multiprocessors(q.device)),)](
        *(q, inputs.k_plane, inputs.v_plane, call.out, inputs.cu_seqlens, inputs.seq_lens, inputs.block_tables),
        *(inputs.sinks, *partial, inputs.scale * math.log2(math.e), inputs.softcap),
        *(call.batch, q.shape[1], inputs.k_plane.shape[2]),
        *(inputs.block_tables.stride(0), q.stride(0), q.stride(1), *limits),
        **call.pieces(),
        REQUESTS=256 if call.batch <= 256 else triton.next_power_of_2(call.batch),
        GROUP=call.group,
        BLOCK_SIZE=inputs.k_plane.shape[1],
        SOFTCAP=inputs.softcap > 0,
        WIDTH_K=width_k,
        MAIN_K=main_k,
        TAIL_K=max(16, triton.next_power_of_2(width_k - main_k)) if width_k > main_k else 0,
        SHORT=short,
        SHORT_QUERY=SHORT_QUERY,
        CAUSAL=inputs.causal,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
