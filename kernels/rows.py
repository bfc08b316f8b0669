"""Buffers of few rows that a library can be handed as `MAX_ROWS` of them, so that it always sees the same shape.

A library chooses how to cut a product by its shape, and each cut rounds in its own way. With the shape fixed, a row's
result is the same bits whatever rows stand beside it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_ROWS = 64


def empty_rows(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised rows [shape[0], ...], with room behind them up to `MAX_ROWS`."""
    return torch.empty(max(shape[0], MAX_ROWS), *shape[1:], dtype=dtype, device=device)[: shape[0]]


def full_rows(x: Tensor) -> Tensor:
    """x [rows, width] as [MAX_ROWS, width]; behind its own rows lies whatever follows them in memory, or zeros."""
    rows, width = x.shape
    if x.is_contiguous():
        behind = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
        if behind >= MAX_ROWS * width:
            return x.as_strided((MAX_ROWS, width), (width, 1))
    return F.pad(x, (0, 0, 0, MAX_ROWS - rows))
