"""Building blocks shared by draft networks: RMSNorm, rotary embedding, SwiGLU, attention projections.

Parameters are created as NaN; `initialise_` fills them. No mask and no cache here: attention is the caller's `attend`.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from .base import Attend, HeadError


def nan_parameter(*shape: int) -> nn.Parameter:
    """A parameter nobody has filled yet."""
    return nn.Parameter(torch.full(shape, math.nan))


class Linear(nn.Linear):
    """`nn.Linear`, by default without bias, that starts as NaN instead of random."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias, device="meta")
        self.weight = nan_parameter(out_features, in_features)
        if bias:
            self.bias = nan_parameter(out_features)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nan_parameter(size)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight.float()).to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Rotary position embedding (half-split layout) of any kind transformers computes from positions alone."""

    frequencies: Tensor  # [head_dim]

    def __init__(self, head_dim: int, rope_parameters: dict[str, Any], max_position_embeddings: int) -> None:
        super().__init__()
        rope_type = rope_parameters.get("rope_type", "default")
        if head_dim % 2:
            raise HeadError(f"rotary embedding turns pairs of values, so head.head_dim must be even, found {head_dim}")
        if "rope_theta" not in rope_parameters:
            raise HeadError(f"head.rope_parameters must hold rope_theta, found {sorted(rope_parameters)}")
        if rope_type == "default":
            exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
            self.scaling = 1.0
            inv_freq = 1.0 / rope_parameters["rope_theta"] ** exponents
        else:
            from transformers import LlamaConfig
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            if rope_type not in ROPE_INIT_FUNCTIONS:
                known = ", ".join(("default", *ROPE_INIT_FUNCTIONS))
                raise HeadError(f"head.rope_parameters: rope_type must be one of {known}, found {rope_type!r}")
            config = LlamaConfig(
                hidden_size=head_dim,
                num_attention_heads=1,
                head_dim=head_dim,
                max_position_embeddings=max_position_embeddings,
                rope_parameters=dict(rope_parameters),
            )
            inv_freq, self.scaling = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
        self.register_buffer("frequencies", torch.cat([inv_freq, inv_freq]), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [..., 1, head_dim] float32 for positions [...]."""
        angles = positions[..., None, None].float() * self.frequencies.float()
        cos, sin = angles.cos(), angles.sin()
        return (cos, sin) if self.scaling == 1.0 else (cos * self.scaling, sin * self.scaling)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies a rotary embedding to x [..., heads, head_dim]."""
    low, high = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat([-high, low], dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention projections around the caller's `attend`; q and k may be normed per head.

    `qkv_bias` gives the three input projections a bias.
    """

    def __init__(
        self,
        layer: int,
        input_size: int,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        qk_norm_eps: float | None,
        qkv_bias: bool = False,
    ) -> None:
        super().__init__()
        self.layer, self.heads, self.kv_heads, self.head_dim = layer, heads, kv_heads, head_dim
        self.q_proj = Linear(input_size, heads * head_dim, qkv_bias)
        self.k_proj = Linear(input_size, kv_heads * head_dim, qkv_bias)
        self.v_proj = Linear(input_size, kv_heads * head_dim, qkv_bias)
        self.o_proj = Linear(heads * head_dim, hidden)
        if qk_norm_eps is not None:
            self.q_norm = RMSNorm(head_dim, qk_norm_eps)
            self.k_norm = RMSNorm(head_dim, qk_norm_eps)
        self.has_qk_norm = qk_norm_eps is not None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (self.heads, self.head_dim))
        if self.has_qk_norm:
            q = self.q_norm(q)
        out = attend(self.layer, rotate(q, cos, sin), *self.keys_values(x, cos, sin))
        return self.o_proj(out.flatten(-2))

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Keys, RoPE applied, and values [..., kv_heads, head_dim] of x [..., input_size]."""
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        if self.has_qk_norm:
            k = self.k_norm(k)
        return rotate(k, cos, sin), self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, intermediate)
        self.up_proj = Linear(hidden, intermediate)
        self.down_proj = Linear(intermediate, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


@torch.no_grad()
def initialise_(module: nn.Module, generator: torch.Generator) -> None:
    """Fills linear weights with N(0, 1/fan_in) clipped to the usual 0.02, biases with zero, norm weights with one."""
    for part in module.modules():
        if isinstance(part, Linear):
            std = min(0.02, part.in_features**-0.5)
            part.weight.copy_(torch.randn(part.weight.shape, generator=generator) * std)
            if part.bias is not None:
                part.bias.zero_()
        elif isinstance(part, RMSNorm):
            part.weight.fill_(1.0)
