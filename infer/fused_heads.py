"""The layers of a draft head by the fused kernels that the target's layers use, put in place from outside.

A head's own code is plain PyTorch, for the trainer to differentiate, and still runs wherever gradients are recorded.
Serving a draft of one row, such code spends its time between kernels: here a layer is seven of them. Weights are packed
in place, the modules' own become views.
"""

from functools import partial

import torch
from torch import Tensor

from ..heads.base import Attend, DraftHead
from ..heads.decoder import LayerParts
from ..heads.layers import RMSNorm
from ..kernels import dispatch
from .attention import PagedAttend
from .fusion import pack


def fuse_head(head: DraftHead) -> None:
    """Replaces the parts of a head's layers, its norms and its output product; does nothing where that is done."""
    for module in head.modules():
        if isinstance(module, LayerParts):
            fused = module.__dict__.get("mix")
            if not (isinstance(fused, FusedMix) and fused.is_current):
                module.__dict__["mix"] = FusedMix(module)
        elif isinstance(module, RMSNorm):
            module.__dict__["forward"] = FusedNorm(module)
    vars(head)["project"] = partial(project, head)


class FusedNorm:
    """The forward of an RMS norm, with a shift where the module has one."""

    def __init__(self, norm: RMSNorm) -> None:
        self.norm = norm

    def __call__(self, x: Tensor) -> Tensor:
        norm = self.norm
        if torch.is_grad_enabled():
            return type(norm).forward(norm, x)
        out = dispatch.rms_norm(x.reshape(-1, x.shape[-1]), norm.weight, norm.eps).view(x.shape)
        shift = getattr(norm, "bias", None)
        return out if shift is None else out + shift


class FusedMix:
    """`LayerParts.mix` over paged planes; for any other `attend`, the layer's own code runs."""

    def __init__(self, layer: LayerParts) -> None:
        self.layer = layer
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv_weight, self.qkv_bias = pack((attention.q_proj, attention.k_proj, attention.v_proj))
        self.gate_up_weight, self.gate_up_bias = pack((mlp.gate_proj, mlp.up_proj))

    @property
    def is_current(self) -> bool:
        """Whether the layer's own weights still are views of the packed ones; a move to a device parts them."""
        attention, mlp = self.layer.self_attn, self.layer.mlp
        return (
            attention.q_proj.weight.data_ptr() == self.qkv_weight.data_ptr()
            and mlp.gate_proj.weight.data_ptr() == self.gate_up_weight.data_ptr()
        )

    def __call__(self, residual: Tensor, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        layer, attention = self.layer, self.layer.self_attn
        if not isinstance(attend, PagedAttend) or torch.is_grad_enabled():
            return type(layer).mix(layer, residual, x, cos, sin, attend)
        plane = attend.plane(attention.layer)
        assert plane.v is not None
        q_norm, k_norm = (attention.q_norm, attention.k_norm) if attention.has_qk_norm else (None, None)
        q = dispatch.rope_store(
            dispatch.linear(x, self.qkv_weight, self.qkv_bias),
            cos[:, 0],
            sin[:, 0],
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            0.0 if q_norm is None else q_norm.eps,
            plane.k,
            plane.v,
            attend.slot_mapping,
        )
        mixed = attend.over_stored(attention.layer, q)
        states = dispatch.linear(mixed.flatten(1), attention.o_proj.weight, attention.o_proj.bias, residual)
        gated = dispatch.gated_linear(layer.post_attention_layernorm(states), self.gate_up_weight, self.gate_up_bias)
        return dispatch.linear(gated, layer.mlp.down_proj.weight, layer.mlp.down_proj.bias, states)


def project(head: DraftHead, states: Tensor, weight: Tensor) -> Tensor:
    """`DraftHead.project` by the kernel of the target's output head: not rounded to half precision on the way."""
    if torch.is_grad_enabled():
        return type(head).project(head, states, weight)
    rows = states.reshape(-1, states.shape[-1])
    logits = dispatch.linear(rows, weight.to(rows.dtype), out_dtype=torch.promote_types(rows.dtype, torch.float32))
    return logits.view(*states.shape[:-1], len(weight))
