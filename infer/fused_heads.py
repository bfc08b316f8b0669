"""The layers of a draft head by the fused kernels that the target's layers use, put in place from outside.

A head's own code is plain PyTorch, for the trainer to differentiate. Serving a draft of one row, such code spends its
time between kernels: here a layer is seven of them. Weights are packed in place, the modules' own become views. What a
head does in another way than those of `heads/`, it goes on doing itself.
"""

import torch
from torch import Tensor

from ..heads.base import Attend, DraftHead
from ..heads.decoder import LayerParts
from ..heads.layers import Attention, Linear, RMSNorm, SwiGLU
from ..heads.mlp_speculator import ShiftedRMSNorm
from ..kernels import dispatch
from .attention import PagedAttend
from .packed_layer import Norm, PackedLayer


def fuse_head(head: DraftHead) -> None:
    """Replaces the parts of a head's layers, its norms and its output product; does nothing where that is done."""
    for module in head.modules():
        if isinstance(module, LayerParts) and _is_as_written(module):
            fused = module.__dict__.get("mix")
            if not (isinstance(fused, FusedMix) and fused.is_current):
                module.__dict__["mix"] = FusedMix(module)
        elif isinstance(module, RMSNorm) and type(module) in (RMSNorm, ShiftedRMSNorm):
            module.__dict__["forward"] = FusedNorm(module)
    if type(head).project is DraftHead.project:
        vars(head)["project"] = project


def _is_as_written(layer: LayerParts) -> bool:
    """Whether a layer computes what `LayerParts` does, with the parts it makes: a subclass may change either."""
    attention, mlp = layer.self_attn, layer.mlp
    linears = (*_packed(layer), attention.o_proj, mlp.down_proj)
    norms = (attention.q_norm, attention.k_norm) if attention.has_qk_norm else ()
    return (
        type(layer).mix is LayerParts.mix
        and (type(attention), type(mlp)) == (Attention, SwiGLU)
        and all(type(linear) is Linear for linear in linears)
        and all(type(norm) is RMSNorm for norm in norms)
    )


def _packed(layer: LayerParts) -> tuple[Linear, ...]:
    """The projections whose weights are packed, in their order."""
    attention, mlp = layer.self_attn, layer.mlp
    return attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj


def _as_norm(norm: RMSNorm) -> Norm:
    return Norm(norm.weight, norm.eps, unit_offset=False)


class FusedNorm:
    """The forward of a norm by the kernel that has no gradient; where one may be asked for, its own code runs."""

    def __init__(self, norm: RMSNorm) -> None:
        self.norm = norm

    def __call__(self, x: Tensor) -> Tensor:
        norm = self.norm
        if torch.is_grad_enabled():
            return type(norm).forward(norm, x)
        out = _as_norm(norm)(x)
        return out + norm.bias if isinstance(norm, ShiftedRMSNorm) else out


class FusedMix:
    """`LayerParts.mix` over paged planes; for any other `attend`, or other weights, the layer's own code runs."""

    def __init__(self, layer: LayerParts) -> None:
        self.layer = layer
        attention, mlp = layer.self_attn, layer.mlp
        q_norm = k_norm = None
        if attention.has_qk_norm:
            q_norm, k_norm = (_as_norm(norm) for norm in (attention.q_norm, attention.k_norm))
        self.packed = PackedLayer(
            _packed(layer)[:3],
            attention.o_proj,
            _packed(layer)[3:],
            mlp.down_proj,
            layer.post_attention_layernorm,
            q_norm,
            k_norm,
        )
        self._views = [parameter.data for parameter in self._parameters()]

    @property
    def is_current(self) -> bool:
        """Whether the layer's own weights still are views of the packed ones; a move, a cast or a copy parts them."""
        pairs = zip(self._parameters(), self._views, strict=True)
        return all(own.data_ptr() == view.data_ptr() for own, view in pairs)

    def _parameters(self) -> list[Tensor]:
        return [parameter for linear in _packed(self.layer) for parameter in linear.parameters()]

    def __call__(self, residual: Tensor, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        layer, attention = self.layer, self.layer.self_attn
        if not isinstance(attend, PagedAttend) or torch.is_grad_enabled() or not self.is_current:
            return type(layer).mix(layer, residual, x, cos, sin, attend)

        def mixed(q: Tensor) -> Tensor:
            return attend.over_stored(attention.layer, q)

        plane = attend.plane(attention.layer)
        return self.packed(residual, x, cos[:, 0], sin[:, 0], plane, attend.slot_mapping, mixed)


def project(states: Tensor, weight: Tensor) -> Tensor:
    """`DraftHead.project` by the kernel of the target's output head: not rounded to half precision on the way."""
    if torch.is_grad_enabled():
        return DraftHead.project(states, weight)
    rows = states.reshape(-1, states.shape[-1])
    logits = dispatch.linear(rows, weight.to(rows.dtype), out_dtype=torch.promote_types(rows.dtype, torch.float32))
    return logits.view(*states.shape[:-1], len(weight))
