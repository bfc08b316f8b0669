"""The products of a decoder layer: the twin of `linear.py`."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .fused import silu_mul


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """x [rows, in] times weight [out, in], summed in float32, plus bias [out] and residual [rows, out]: [rows, out].

    The result has `out_dtype`, that of x when None. In half precision the kernels round once, at the end; here the
    product is rounded before the residual is added.
    """
    out = F.linear(x, weight, bias)
    if residual is not None:
        out = out.to(torch.promote_types(out.dtype, torch.float32)) + residual
    return out.to(out_dtype or x.dtype)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """silu(gate) * up [rows, width] of x [rows, in], gate and up being the halves of weight [2 * width, in]."""
    return silu_mul(linear(x, weight, bias))
