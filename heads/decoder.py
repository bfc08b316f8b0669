"""What heads made of decoder layers share: the layers' shape, by default the target's, and the layer itself."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from .base import Attend, DraftHead, HeadConfig, HeadError, TargetFacts
from .layers import Attention, RMSNorm, SwiGLU

SIZES = ("num_layers", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "max_position_embeddings")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(HeadConfig):
    """The shape of a head's decoder layers."""

    shares_embeddings: ClassVar[bool] = True
    """Whether token embeddings are the target's, so that the head must have its width."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_parameters: dict[str, Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shares_embeddings and self.hidden_size != self.target.hidden_size:
            raise HeadError(
                f"the head shares the target's embeddings, so head.hidden_size must be {self.target.hidden_size}, "
                f"found {self.hidden_size}"
            )
        for name in SIZES:
            if getattr(self, name) < 1:
                raise HeadError(f"head.{name} must be 1 or more, found {getattr(self, name)}")
        if not self.rms_norm_eps > 0:
            raise HeadError(f"head.rms_norm_eps must be above 0, found {self.rms_norm_eps}")
        if self.num_heads % self.num_kv_heads:
            raise HeadError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")

    @classmethod
    def derive(cls, target: TargetFacts, settings: Mapping[str, Any]) -> Self:
        values = cls.implied(target) | {key: value for key, value in settings.items() if value is not None}
        values["layer_ids"] = tuple(values["layer_ids"])
        values["draft_vocab_size"] = min(values["draft_vocab_size"], target.vocab_size)
        return cls(target=target, **values)

    @classmethod
    def implied(cls, target: TargetFacts) -> dict[str, Any]:
        """What a target implies where the recipe says nothing; subclasses add their own fields."""
        return {
            "vocab_size": target.vocab_size,
            "draft_vocab_size": target.vocab_size,
            "hidden_size": target.hidden_size,
            "intermediate_size": target.intermediate_size,
            "num_layers": 1,
            "num_heads": target.num_heads,
            "num_kv_heads": target.num_kv_heads,
            "head_dim": target.head_dim,
            "rms_norm_eps": target.rms_norm_eps,
            "max_position_embeddings": target.max_position_embeddings,
            "rope_parameters": target.rope_parameters,
        }

    def serving_config(self) -> dict[str, Any]:
        return {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_parameters": self.rope_parameters,
            "rope_theta": self.rope_parameters.get("rope_theta"),
            "attention_bias": False,
            "tie_word_embeddings": False,
            "vocab_size": self.vocab_size,
        }


class KeyShape(NamedTuple):
    """What an attention layer keeps of a row."""

    kv_heads: int
    width_k: int
    width_v: int


class DecoderHead(DraftHead):
    """A head that runs decoder layers over token embeddings and states; each layer keeps keys and values."""

    config: DecoderConfig

    def key_shapes(self) -> tuple[KeyShape, ...]:
        """By the layer number that `attend` is called with."""
        config = self.config
        return (KeyShape(config.num_kv_heads, config.head_dim, config.head_dim),) * config.num_layers

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype


class LayerParts(nn.Module):
    """What every decoder layer is made of behind the input of its attention, `input_size` wide."""

    def __init__(
        self, config: DecoderConfig, layer: int, input_size: int, *, qk_norm: bool, qkv_bias: bool = False
    ) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(
            layer,
            input_size,
            hidden,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            eps if qk_norm else None,
            qkv_bias,
        )
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = SwiGLU(hidden, config.intermediate_size)

    def mix(self, residual: Tensor, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Attention over `x` [..., input_size], then the MLP, both added to `residual` [..., hidden]."""
        states = residual + self.self_attn(x, cos, sin, attend)
        return states + self.mlp(self.post_attention_layernorm(states))


class DecoderLayer(LayerParts):
    """An ordinary pre-norm decoder layer; `input_norm=False` leaves out the norm before attention."""

    def __init__(
        self, config: DecoderConfig, layer: int, *, qk_norm: bool, qkv_bias: bool = False, input_norm: bool = True
    ) -> None:
        super().__init__(config, layer, config.hidden_size, qk_norm=qk_norm, qkv_bias=qkv_bias)
        self.has_input_norm = input_norm
        if input_norm:
            self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, states: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        return self.mix(states, self.input_layernorm(states) if self.has_input_norm else states, cos, sin, attend)
