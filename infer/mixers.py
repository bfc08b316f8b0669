"""The kinds of recurrent layers that are known, recognised by the parts they are made of, never by their name.

A module of the same parts may still compute something else: the load-time check of the whole target decides.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from .batch import RequestRows
from .gated_scan import ScanInputs, causal_conv, gated_scan
from .recurrent import LayerState, Mixer, StateSpec


@dataclass(frozen=True)
class RecurrentLayer:
    """One recurrent module of a target."""

    module: nn.Module
    path: str
    index: int  # of its decoder layer
    mixer: Mixer


def find_recurrent_layers(model: nn.Module) -> tuple[RecurrentLayer, ...]:
    """The recurrent modules of known kinds, in the order of their layers."""
    return tuple(sorted(_matches(model), key=lambda layer: layer.index))


class GatedDeltaNet:
    """Qwen3-Next, Qwen3.5, OLMo hybrid: queries, keys and values convolved, then the gated delta rule by value head."""

    def __init__(self, module: Any) -> None:
        self.module, self.activation = module, ACT2FN[module.activation]

    @classmethod
    def match(cls, module: nn.Module) -> Self | None:
        """The mixer of a module that projects to q, k, v, z, b and a, in two matrices, in four or in six."""
        own = {"conv1d.weight", "dt_bias", "A_log"}
        grouped = {"in_proj_qkvz.weight", "in_proj_ba.weight", "norm.weight", "out_proj.weight"}
        separate = {*(f"in_proj_{name}.weight" for name in ("qkv", "z", "b", "a")), "norm.weight", "out_proj.weight"}
        single = {*(f"{name}_proj.weight" for name in "qkvgbao"), "o_norm.weight"}
        named = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "activation")
        known = _tensors(module) in (own | grouped, own | separate, own | single)
        return cls(module) if known and _has(module, *named) else None

    def spec(self, name: str) -> StateSpec:
        m = self.module
        return _spec(name, m.conv1d, (m.num_v_heads, m.head_k_dim, m.head_v_dim))

    def mix(self, x: Tensor, state: LayerState, rows: RequestRows) -> Tensor:
        assert state.recurrent is not None
        m, wide = self.module, state.recurrent.dtype
        qkv, z, b, a = self._project(x)
        qkv = self.activation(_conv(m.conv1d, qkv, state, rows)).to(wide)
        keys, heads = m.num_k_heads * m.head_k_dim, m.num_v_heads
        q, k, v = qkv.split([keys, keys, heads * m.head_v_dim], dim=-1)
        q, k = (_unit(part.unflatten(-1, (m.num_k_heads, -1))) for part in (q, k))
        log_decay = -m.A_log.to(wide).exp() * F.softplus(a.to(wide) + m.dt_bias.to(wide))
        beta = b.sigmoid().to(wide) * (2 if getattr(m, "allow_neg_eigval", False) else 1)
        inputs = ScanInputs(q * m.head_k_dim**-0.5, k, v.unflatten(-1, (heads, -1)), log_decay, beta)
        out = gated_scan(inputs, state.recurrent, rows)
        norm, project = (m.norm, m.out_proj) if _has(m, "norm") else (m.o_norm, m.o_proj)
        normed = norm(out.to(x.dtype).reshape(-1, m.head_v_dim), z.reshape(-1, m.head_v_dim))
        return project(normed.view(len(x), -1))

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k and v in one [num_tokens, channels], z, and b and a [num_tokens, value heads]."""
        m = self.module
        if _has(m, "q_proj"):
            qkv = torch.cat([m.q_proj(x), m.k_proj(x), m.v_proj(x)], dim=-1)
            return qkv, m.g_proj(x), m.b_proj(x), m.a_proj(x)
        if _has(m, "in_proj_qkv"):
            return m.in_proj_qkv(x), m.in_proj_z(x), m.in_proj_b(x), m.in_proj_a(x)
        share = m.num_v_heads // m.num_k_heads  # value heads of a key head stand beside it
        qkvz = m.in_proj_qkvz(x).unflatten(-1, (m.num_k_heads, -1))
        *qkv, z = qkvz.split([m.head_k_dim, m.head_k_dim, share * m.head_v_dim, share * m.head_v_dim], dim=-1)
        b, a = m.in_proj_ba(x).unflatten(-1, (m.num_k_heads, -1)).split([share, share], dim=-1)
        return torch.cat([part.flatten(1) for part in qkv], dim=-1), z, b.flatten(1), a.flatten(1)


class Mamba2:
    """Nemotron-H, Bamba, Granite, Falcon-H1: Mamba-2, a scan whose decay and writes both go by the time step."""

    def __init__(self, module: Any) -> None:
        self.module, self.activation = module, ACT2FN[module.activation]

    @classmethod
    def match(cls, module: nn.Module) -> Self | None:
        """The mixer of a module with one input projection, a gate or gated norm behind the scan, and a skip D."""
        own = {"in_proj.weight", "conv1d.weight", "dt_bias", "A_log", "D", "out_proj.weight"}
        named = ("num_heads", "head_dim", "n_groups", "ssm_state_size", "intermediate_size", "activation")
        known = _tensors(module) - _BIASES - {"norm.weight", "mup_vector"} == own
        return cls(module) if known and _has(module, *named, "time_step_limit") else None

    def spec(self, name: str) -> StateSpec:
        m = self.module
        return _spec(name, m.conv1d, (m.num_heads, m.ssm_state_size, m.head_dim))

    def mix(self, x: Tensor, state: LayerState, rows: RequestRows) -> Tensor:
        assert state.recurrent is not None
        m, wide = self.module, state.recurrent.dtype
        width, channels = m.intermediate_size, m.conv1d.in_channels
        projected = m.in_proj(x * getattr(m, "ssm_in_multiplier", 1.0)) * getattr(m, "mup_vector", 1.0)
        gate, mixed, dt = projected.view(len(x), -1).split([width, channels, m.num_heads], dim=-1)
        mixed = self.activation(_conv(m.conv1d, mixed, state, rows)).to(wide)
        groups = m.n_groups * m.ssm_state_size
        values, k, q = mixed.split([width, groups, groups], dim=-1)
        q, k = (part.unflatten(-1, (m.n_groups, -1)) for part in (q, k))
        values = values.unflatten(-1, (m.num_heads, -1))
        dt = F.softplus(dt.to(wide) + m.dt_bias.to(wide)).clamp(*m.time_step_limit)
        inputs = ScanInputs(q, k, values * dt[..., None], -m.A_log.to(wide).exp() * dt, None)
        out = (gated_scan(inputs, state.recurrent, rows) + m.D.to(wide)[:, None] * values).flatten(1)
        gated = m.norm(out, gate) if isinstance(getattr(m.norm, "weight", None), Tensor) else out * F.silu(gate)
        return m.out_proj(gated.to(x.dtype))


class Mamba1:
    """Jamba: Mamba, whose decay differs by channel and by dimension of its state."""

    def __init__(self, module: Any) -> None:
        self.module, self.activation = module, ACT2FN[module.activation]

    @classmethod
    def match(cls, module: nn.Module) -> Self | None:
        """The mixer of a module that projects channels to time step, B and C, with or without norms of them."""
        own = {f"{name}.weight" for name in ("in_proj", "conv1d", "x_proj", "dt_proj", "out_proj")} | {"A_log", "D"}
        norms = {f"{name}_layernorm.weight" for name in ("dt", "b", "c")}
        known = _tensors(module) - _BIASES in (own, own | norms)
        return cls(module) if known and _has(module, "activation", "time_step_rank", "ssm_state_size") else None

    def spec(self, name: str) -> StateSpec:
        m = self.module
        return _spec(name, m.conv1d, (m.conv1d.in_channels, m.ssm_state_size, 1))

    def mix(self, x: Tensor, state: LayerState, rows: RequestRows) -> Tensor:
        assert state.recurrent is not None
        m, wide = self.module, state.recurrent.dtype
        values, gate = m.in_proj(x).chunk(2, dim=-1)
        values = self.activation(_conv(m.conv1d, values, state, rows))
        parts = m.x_proj(values).split([m.time_step_rank, m.ssm_state_size, m.ssm_state_size], dim=-1)
        if _has(m, "dt_layernorm"):
            parts = m.dt_layernorm(parts[0]), m.b_layernorm(parts[1]), m.c_layernorm(parts[2])
        dt, k, q = F.linear(parts[0], m.dt_proj.weight).to(wide), parts[1].to(wide), parts[2].to(wide)
        dt = F.softplus(dt if m.dt_proj.bias is None else dt + m.dt_proj.bias.to(wide))
        values, log_decay = values.to(wide), dt[..., None] * -m.A_log.to(wide).exp()
        inputs = ScanInputs(q[:, None], k[:, None], (dt * values)[..., None], log_decay, None)
        out = gated_scan(inputs, state.recurrent, rows)[..., 0] + m.D.to(wide) * values
        return m.out_proj((out * self.activation(gate.to(wide))).to(x.dtype))


class ShortConv:
    """LFM2: a convolution between two gates, and no recurrent state."""

    def __init__(self, module: Any) -> None:
        self.module = module

    @classmethod
    def match(cls, module: nn.Module) -> Self | None:
        """The mixer of a module that projects to three parts of its own width and convolves one."""
        conv, own = getattr(module, "conv", None), {"in_proj.weight", "conv.weight", "out_proj.weight"}
        if _tensors(module) - _BIASES != own or not isinstance(conv, nn.Conv1d):
            return None
        projected = getattr(getattr(module, "in_proj", None), "out_features", None)
        return cls(module) if projected == 3 * conv.in_channels else None

    def spec(self, name: str) -> StateSpec:
        return _spec(name, self.module.conv, None)

    def mix(self, x: Tensor, state: LayerState, rows: RequestRows) -> Tensor:
        m = self.module
        before, after, values = m.in_proj(x).chunk(3, dim=-1)
        return m.out_proj(after * _conv(m.conv, before * values, state, rows))


_BIASES = {"in_proj.bias", "conv1d.bias", "conv.bias", "dt_proj.bias", "out_proj.bias"}
_KINDS: tuple[Callable[[nn.Module], Mixer | None], ...] = (
    GatedDeltaNet.match,
    Mamba2.match,
    Mamba1.match,
    ShortConv.match,
)


def _matches(model: nn.Module) -> Iterator[RecurrentLayer]:
    for path, module in model.named_modules():
        index = getattr(module, "layer_idx", None)
        mixer = next((mixer for match in _KINDS if (mixer := match(module)) is not None), None)
        if isinstance(index, int) and mixer is not None:
            yield RecurrentLayer(module, path, index, mixer)


def _tensors(module: nn.Module) -> set[str]:
    return {name for name, _ in (*module.named_parameters(), *module.named_buffers())}


def _has(module: nn.Module, *names: str) -> bool:
    return all(hasattr(module, name) for name in names)


def _spec(name: str, conv: nn.Conv1d, shape: tuple[int, ...] | None) -> StateSpec:
    wide = torch.promote_types(conv.weight.dtype, torch.float32)
    return StateSpec(name, conv.in_channels, conv.kernel_size[0], conv.weight.dtype, shape, wide)


def _conv(conv: nn.Conv1d, x: Tensor, state: LayerState, rows: RequestRows) -> Tensor:
    return causal_conv(x, conv.weight[:, 0], conv.bias, state.conv, rows)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
