"""A decoder layer of the Llama shape as fused kernels over packed weights, whoever the layer belongs to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..kernels import dispatch
from .planes import Plane


@dataclass(frozen=True)
class Norm:
    """An RMS norm, measured to be one."""

    weight: Tensor  # [width]
    eps: float
    unit_offset: bool

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., width] normalised, in its own shape and dtype."""
        rows = x.reshape(-1, x.shape[-1])
        return dispatch.rms_norm(rows, self.weight, self.eps, unit_offset=self.unit_offset).view(x.shape)


class PackedLayer:
    """What a layer computes behind its first norm; the projections' own weights become views of the packed ones."""

    def __init__(
        self,
        qkv: Sequence[nn.Linear],
        out: nn.Linear,
        gate_up: Sequence[nn.Linear],
        down: nn.Linear,
        mlp_norm: Callable[[Tensor], Tensor],
        q_norm: Norm | None,
        k_norm: Norm | None,
    ) -> None:
        self.qkv_weight, self.qkv_bias = pack(qkv)
        self.gate_up_weight, self.gate_up_bias = pack(gate_up)
        self.out, self.down, self.mlp_norm, self.q_norm, self.k_norm = out, down, mlp_norm, q_norm, k_norm

    def __call__(
        self,
        residual: Tensor,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        plane: Plane,
        slot_mapping: Tensor,
        attend: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Attention over x [num_tokens, input width], then the MLP, both added to `residual` [num_tokens, hidden].

        cos and sin [num_tokens, head width]. Keys and values go to the slots of `plane`; `attend` takes queries
        [num_tokens, heads, head width] over them.
        """
        assert plane.v is not None
        q = dispatch.rope_store(
            dispatch.linear(x, self.qkv_weight, self.qkv_bias),
            cos,
            sin,
            None if self.q_norm is None else self.q_norm.weight,
            None if self.k_norm is None else self.k_norm.weight,
            0.0 if self.q_norm is None else self.q_norm.eps,
            plane.k,
            plane.v,
            slot_mapping,
        )
        states = dispatch.linear(attend(q).flatten(1), self.out.weight, self.out.bias, residual)
        gated = dispatch.gated_linear(self.mlp_norm(states), self.gate_up_weight, self.gate_up_bias)
        return dispatch.linear(gated, self.down.weight, self.down.bias, states)


@torch.no_grad()
def pack(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """One weight, and one bias where any has one, whose rows the linears' own parameters become views of."""
    sizes = [linear.out_features for linear in linears]
    weight = torch.cat([linear.weight for linear in linears])
    bias = None
    if any(linear.bias is not None for linear in linears):
        bias = torch.cat(
            [weight.new_zeros(n) if m.bias is None else m.bias for m, n in zip(linears, sizes, strict=True)]
        )
        for linear, part in zip(linears, bias.split(sizes), strict=True):
            if linear.bias is not None:
                linear.bias.data = part
    for linear, part in zip(linears, weight.split(sizes), strict=True):
        linear.weight.data = part
    return weight, bias
