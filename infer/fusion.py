"""Decoder layers of the Llama shape as a few fused kernels, put in place from outside the model.

A layer is recognised by what it is made of, never by its name: four attention projections, perhaps norms of query and
key heads, a SiLU-gated MLP, two RMS norms, and nothing else that holds a number. Whether it also computes what such
layers compute is for the caller to check (`parity.py`). Weights are packed in place, the modules' own become views.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels import dispatch
from .attention import SITE, AttentionSite, attend
from .packed_layer import Norm, PackedLayer
from .probe import AttentionLayer

EPS_NAMES = ("variance_epsilon", "eps")


class FusionError(ValueError):
    """A model whose layers cannot be fused; the message says why."""


@dataclass(frozen=True)
class LayerParts:
    """The modules of one decoder layer, before anything is changed."""

    layer: nn.Module
    attention: AttentionLayer
    qkv: tuple[nn.Linear, nn.Linear, nn.Linear]
    out: nn.Linear
    gate_up: tuple[nn.Linear, nn.Linear]
    down: nn.Linear
    input_norm: Norm
    mlp_norm: Norm
    q_norm: Norm | None
    k_norm: Norm | None


class FusedLayer:
    """The forward of one decoder layer: hidden states [1, num_tokens, hidden] in and out, like the one it replaces."""

    def __init__(self, parts: LayerParts) -> None:
        self.parts = parts
        self.packed = PackedLayer(
            parts.qkv, parts.out, parts.gate_up, parts.down, parts.mlp_norm, parts.q_norm, parts.k_norm
        )

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **passive: Any,
    ) -> Tensor:
        parts = self.parts
        site: AttentionSite = getattr(parts.attention.module, SITE)
        batch, plane = site.step.batch, site.plane
        if attention_mask is not None or batch is None or plane is None or plane.v is None:
            raise ValueError(f"{site.name} is fused: run it through Target.forward with planes bound, or unfuse it")
        if position_embeddings is None:
            raise FusionError(f"{site.name} is given no rotary embeddings")
        x = hidden_states[0]
        cos, sin = (table.expand(1, len(x), -1)[0] for table in position_embeddings)
        attention = parts.attention

        def mixed(q: Tensor) -> Tensor:
            return attend(
                plane, batch, q, scale=attention.scale, window=site.window, chunk=site.chunk, softcap=attention.softcap
            )

        return self.packed(x, parts.input_norm(x), cos, sin, plane, batch.slot_mapping, mixed)[None]

    def __deepcopy__(self, memo: dict[int, Any]) -> "FusedLayer":
        return FusedLayer(copy.deepcopy(self.parts, memo))  # copied parameters are no views: they are packed again

    def release(self) -> None:
        """Gives each projection its own weights again."""
        for linear in (*self.parts.qkv, *self.parts.gate_up):
            for parameter in linear.parameters():
                parameter.data = parameter.data.clone()


class FusedHead:
    """The forward of the output head: logits in float32, not rounded to half precision on their way."""

    def __init__(self, head: nn.Linear) -> None:
        self.head = head

    def __call__(self, hidden_states: Tensor) -> Tensor:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        wide = torch.promote_types(rows.dtype, torch.float32)
        logits = dispatch.linear(rows, self.head.weight, self.head.bias, out_dtype=wide)
        return logits.view(*hidden_states.shape[:-1], self.head.out_features)


FUSED = (FusedLayer, FusedHead, Norm)


def is_fused(model: nn.Module) -> bool:
    """Whether `fuse_layers` was applied to this model and not undone."""
    return any(isinstance(module.__dict__.get("forward"), FusedLayer) for module in model.modules())


def fuse_layers(
    model: nn.Module, layers: nn.ModuleList, attention: Sequence[AttentionLayer], head: nn.Module | None
) -> None:
    """Replaces the forward of every layer, of the output head and of the norm beside the layers.

    The head and the norm stay as they are where they are not of a kind known here. Raises FusionError, with nothing
    changed, when one of the layers is not of the Llama shape.
    """
    parts = [match_layer(layer, own) for layer, own in zip(layers, attention, strict=True)]
    norm = _find_final_norm(model, layers, parts[0].input_norm.weight.shape[0])
    for own in parts:
        _replace_forward(own.layer, FusedLayer(own))
        if own.out.weight.is_cuda:
            torch.cuda.empty_cache()  # the unpacked weights would stay reserved, in pieces too small for packed ones
    if norm is not None:
        _replace_forward(*norm)
    if type(head) is nn.Linear and not _is_touched(head):
        _replace_forward(head, FusedHead(head))


def unfuse(model: nn.Module) -> None:
    """Undoes `fuse_layers`; does nothing to a model that is not fused."""
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, FUSED):
            del module.__dict__["forward"]
            if isinstance(forward, FusedLayer):
                forward.release()


def match_layer(layer: nn.Module, attention: AttentionLayer) -> LayerParts:
    """The parts of a decoder layer of the Llama shape; raises FusionError saying what is missing or too much."""
    where = f"layer {getattr(attention.module, 'layer_idx', '?')} ({type(layer).__name__})"
    module, width = attention.module, attention.width_k
    mlp = next((child for child in layer.children() if _has(child, "gate_proj", "up_proj", "down_proj")), None)
    if mlp is None or not _has(module, "q_proj", "k_proj", "v_proj", "o_proj") or attention.width_v != width:
        raise FusionError(f"{where} is not made of q, k, v and o projections and a gated MLP of three matrices")
    if attention.sinks:
        raise FusionError(f"{where} has attention sinks")
    qkv = tuple(_linear(where, module, name) for name in ("q_proj", "k_proj", "v_proj"))
    gate, up, down = (_linear(where, mlp, name) for name in ("gate_proj", "up_proj", "down_proj"))
    out, hidden = _linear(where, module, "o_proj"), qkv[0].in_features
    if qkv[1].out_features != attention.kv_heads * width or qkv[0].out_features % width or gate.in_features != hidden:
        raise FusionError(f"{where} projects to other widths than its attention is called with")
    activation = getattr(mlp, "act_fn", None)
    ramp = torch.linspace(-9, 9, 64)
    if not isinstance(activation, nn.Module) or not torch.allclose(activation(ramp), F.silu(ramp), atol=1e-6):
        raise FusionError(f"{where} has an MLP that is not gated by SiLU")
    norms: dict[str, Norm | None] = {
        name: _norm(where, parent, name, size)
        for parent, name, size in (
            (layer, "input_layernorm", hidden),
            (layer, "post_attention_layernorm", hidden),
            (module, "q_norm", width),
            (module, "k_norm", width),
        )
    }
    input_norm, mlp_norm = norms["input_layernorm"], norms["post_attention_layernorm"]
    q_norm, k_norm = norms["q_norm"], norms["k_norm"]
    if input_norm is None or mlp_norm is None:
        raise FusionError(f"{where} has no RMS norm before its attention or its MLP")
    if (q_norm is None) != (k_norm is None) or (q_norm and k_norm and q_norm.eps != k_norm.eps):
        raise FusionError(f"{where} norms queries and keys differently")
    if (q_norm and q_norm.unit_offset) or (k_norm and k_norm.unit_offset):
        raise FusionError(f"{where} norms query heads by 1 + weight")
    linears = (*qkv, out, gate, up, down)
    known = {id(p) for linear in linears for p in linear.parameters()}
    known |= {id(norm.weight) for norm in norms.values() if norm is not None}
    extra = [name for name, tensor in (*layer.named_parameters(), *layer.named_buffers()) if id(tensor) not in known]
    if extra:
        raise FusionError(f"{where} holds {extra[0]}, which layers of the Llama shape do not")
    if any(_is_touched(child) for child in layer.modules() if child is not layer) or "forward" in layer.__dict__:
        raise FusionError(f"{where} has hooks or replaced forwards inside, which fusing would skip")
    return LayerParts(
        layer, attention, (qkv[0], qkv[1], qkv[2]), out, (gate, up), down, input_norm, mlp_norm, q_norm, k_norm
    )


def _replace_forward(module: nn.Module, forward: Any) -> None:
    module.__dict__["forward"] = forward


def _has(module: nn.Module, *names: str) -> bool:
    return all(isinstance(getattr(module, name, None), nn.Module) for name in names)


def _is_touched(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def _linear(where: str, parent: nn.Module, name: str) -> nn.Linear:
    linear = getattr(parent, name)
    if type(linear) is not nn.Linear or not linear.weight.is_floating_point():
        raise FusionError(f"{where} has a {name} that is no plain linear layer but {type(linear).__name__}")
    return linear


def _norm(where: str, parent: nn.Module, name: str, width: int) -> Norm | None:
    module = getattr(parent, name, None)
    if not isinstance(module, nn.Module):
        return None
    norm = measure_rms_norm(module, width)
    if norm is None:
        raise FusionError(f"{where} has a {name} that is no RMS norm over {width} values")
    return norm


@torch.no_grad()
def measure_rms_norm(module: nn.Module, width: int) -> Norm | None:
    """The RMS norm a module computes, found by its outputs on inputs as small as its eps and larger; None if none."""
    parameters = dict(module.named_parameters())
    eps = next((getattr(module, name) for name in EPS_NAMES if isinstance(getattr(module, name, None), float)), None)
    weight = parameters.get("weight")
    if len(parameters) != 1 or weight is None or weight.shape != (width,) or eps is None or any(module.buffers()):
        return None
    sizes = torch.tensor([[eps**0.5], [1.0], [30.0]])
    rows = (sizes * torch.randn(3, width, generator=torch.Generator().manual_seed(0))).to(weight.device, weight.dtype)
    expected = module(rows)
    for unit_offset in (False, True):
        norm = Norm(weight, eps, unit_offset)
        tolerance = 4 * max(torch.finfo(weight.dtype).eps, torch.finfo(torch.float32).eps)
        if torch.allclose(norm(rows), expected, rtol=tolerance, atol=tolerance * 1e-2):
            return norm
    return None


def _find_final_norm(model: nn.Module, layers: nn.ModuleList, hidden: int) -> tuple[nn.Module, Norm] | None:
    """The one RMS norm that stands beside the layers, with its measure."""
    parent = next(module for module in model.modules() if any(child is layers for child in module.children()))
    found = [(child, measure_rms_norm(child, hidden)) for child in parent.children() if not _is_touched(child)]
    norms = [(child, norm) for child, norm in found if norm is not None]
    return norms[0] if len(norms) == 1 else None
