"""What stands between the products of a decoder layer: the twin of `fused.py`."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..records import rope_heads
from .attention import store_kv


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False) -> Tensor:
    """x [rows, width] over its root mean square, times weight [width], in the dtype of x.

    As Llama: normalised in float32 whatever the dtype, rounded, then scaled. With `unit_offset` as Gemma: scaled by
    1 + weight in float32 and rounded once.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    if unit_offset:
        return (wide * (1.0 + weight.float())).to(x.dtype)
    return (weight * wide.to(x.dtype)).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up [rows, width] of gate_up [rows, 2 * width], gates first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


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
    """Turns the queries and keys of packed rows, writes keys and values to their slots, returns the queries.

    qkv [rows, (q_heads + 2 * kv_heads) * width], heads in that order; cos and sin [rows, width] in transformers'
    half-split layout; q_norm and k_norm [width] RMS norms of each head before turning, or None; planes [num_blocks,
    block_size, kv_heads, width]; slot_mapping [rows] int64. Returns [rows, q_heads, width]. Raises ValueError on
    shapes that do not belong together.
    """
    q_heads, kv_heads, width = rope_heads(qkv, cos, sin, k_plane, v_plane)
    q, k, v = qkv.view(-1, q_heads + 2 * kv_heads, width).split((q_heads, kv_heads, kv_heads), dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    store_kv(_turn(k, cos, sin), v, k_plane, v_plane, slot_mapping)
    return _turn(q, cos, sin)


def _turn(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    turned = heads * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]
    return turned.to(heads.dtype)
