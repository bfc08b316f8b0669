"""EAGLE-3 (arXiv 2503.01840) and EAGLE-3.1 (arXiv 2605.09992): one network, in the tensor names vLLM loads.

The first layer attends over the concatenation of the normed token embedding and the normed state; further layers are
ordinary decoder layers. `norm_output` and `fc_norm` make it EAGLE-3.1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from .base import (
    Attend,
    DraftHead,
    DraftOutput,
    DraftRows,
    HeadConfig,
    HeadError,
    TargetFacts,
    check_draft_vocab,
    default_aux_layer_ids,
)
from .layers import Attention, Linear, RMSNorm, RotaryEmbedding, SwiGLU, initialise_, nan_parameter
from .target_tensors import TargetTensors


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(HeadConfig):
    """Shape and alignment flags of an EAGLE-3 head."""

    network = "spectrain.heads.eagle3:Eagle3Head"
    objective = "spectrain.train.objectives.eagle3:Eagle3Objective"
    proposer = "spectrain.infer.proposers.eagle3:Eagle3Proposer"
    requires_final_state = True

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_parameters: dict[str, Any]
    layer_style: Literal["llama", "qwen3"]  # qwen3: q and k are normed per head
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_size != self.target.hidden_size:
            raise HeadError(
                f"the head shares the target's embeddings, so head.hidden_size must be {self.target.hidden_size}, "
                f"found {self.hidden_size}"
            )
        if self.num_heads % self.num_kv_heads:
            raise HeadError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")

    @classmethod
    def derive(cls, target: TargetFacts, settings: Mapping[str, Any]) -> Self:
        wanted = {key: value for key, value in settings.items() if value is not None}
        implied: dict[str, Any] = {
            "layer_ids": None,
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
            "layer_style": "llama",
            "norm_before_residual": False,
            "norm_before_fc": False,
            "fc_norm": False,
            "norm_output": False,
        }
        values = implied | wanted
        values["layer_ids"] = tuple(values["layer_ids"] or default_aux_layer_ids(target.num_layers))
        values["draft_vocab_size"] = min(values["draft_vocab_size"], target.vocab_size)
        return cls(target=target, **values)

    def serving_config(self) -> dict[str, Any]:
        qwen3 = self.layer_style == "qwen3"
        return {
            "architectures": ["Eagle3Qwen3ForCausalLM" if qwen3 else "LlamaForCausalLMEagle3"],
            "model_type": "qwen3" if qwen3 else "llama",
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
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.target.hidden_size,
            "num_aux_hidden_states": len(self.layer_ids),
            "eagle_aux_hidden_state_layer_ids": list(self.layer_ids),
            "norm_before_residual": self.norm_before_residual,
            "norm_before_fc": self.norm_before_fc,
            "fc_norm": self.fc_norm,
            "norm_output": self.norm_output,
            "eagle_config": {
                "use_aux_hidden_state": True,
                "norm_before_fc": self.norm_before_fc,
                "eagle_aux_hidden_state_layer_ids": list(self.layer_ids),
            },
        }


class Eagle3Layer(nn.Module):
    """A decoder layer; the first one takes the token embedding beside the state."""

    def __init__(self, config: Eagle3Config, layer: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.first = layer == 0
        self.norm_before_residual = config.norm_before_residual
        if self.first:
            self.hidden_norm = RMSNorm(hidden, eps)
        self.input_layernorm = RMSNorm(hidden, eps)
        self.self_attn = Attention(
            layer,
            2 * hidden if self.first else hidden,
            hidden,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            eps if config.layer_style == "qwen3" else None,
        )
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = SwiGLU(hidden, config.intermediate_size)

    def forward(self, embeds: Tensor, states: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        if self.first:
            normed = self.hidden_norm(states)
            residual = normed if self.norm_before_residual else states
            x = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        else:
            residual, x = states, self.input_layernorm(states)
        states = residual + self.self_attn(x, cos, sin, attend)
        return states + self.mlp(self.post_attention_layernorm(states))


class OutputHead(nn.Module):
    """The draft vocabulary's output matrix; a module only so that its tensor is called `lm_head.weight`."""

    def __init__(self, draft_vocab: int, hidden: int) -> None:
        super().__init__()
        self.weight = nan_parameter(draft_vocab, hidden)


class Eagle3Head(DraftHead):
    """The EAGLE-3 network; tensor names are those of the checkpoint."""

    config: Eagle3Config
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        hidden, wide = config.hidden_size, len(config.layer_ids) * config.target.hidden_size
        if config.norm_before_fc:
            self.input_norm = RMSNorm(wide, config.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                RMSNorm(config.target.hidden_size, config.rms_norm_eps) for _ in config.layer_ids
            )
        self.fc = Linear(wide, hidden)
        self.layers = nn.ModuleList(Eagle3Layer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = OutputHead(config.draft_vocab_size, hidden)
        self.rotary = RotaryEmbedding(config.head_dim, config.rope_parameters, config.max_position_embeddings)
        if config.draft_vocab_size < config.vocab_size:
            # -1 marks a map nobody has set; `set_draft_vocab` or a load fills it
            self.register_buffer("d2t", torch.full((config.draft_vocab_size,), -1, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))

    def forward(self, rows: DraftRows, attend: Attend) -> DraftOutput:
        """One step over rows of any leading shape."""
        cos, sin = self.rotary(rows.positions)
        states = rows.states
        for layer in self.layers:
            states = layer(rows.token_embeds, states, cos, sin, attend)
        normed = self.norm(states)
        return DraftOutput(normed, normed if self.config.norm_output else states)

    def combine(self, aux_states: Tensor) -> Tensor:
        if self.config.fc_norm:
            aux_states = torch.stack([norm(aux_states[..., i, :]) for i, norm in enumerate(self.fc_norm)], dim=-2)
        flat = aux_states.flatten(-2)
        return self.fc(self.input_norm(flat) if self.config.norm_before_fc else flat)

    def output_weight(self, target: TargetTensors) -> Tensor:
        return self.lm_head.weight

    def draft_to_target(self) -> Tensor | None:
        if self.config.draft_vocab_size == self.config.vocab_size:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def initialise(self, target: TargetTensors, generator: torch.Generator) -> None:
        """Random layers between the target's own ends.

        fc passes the highest layer's state through, the final norm and the output head are the target's (the head cut
        to the draft vocabulary): training starts from features that already lie in the head's space. With a reduced
        vocabulary call `set_draft_vocab` first.
        """
        initialise_(self, generator)
        with torch.no_grad():
            ids = self.draft_to_target()
            self.lm_head.weight.copy_(target.lm_head if ids is None else target.lm_head[ids])
            self.fc.weight.zero_()
            self.fc.weight[:, -self.config.hidden_size :].fill_diagonal_(1.0)
            if target.norm.kind == "rms" and target.norm.weight is not None:
                self.norm.weight.copy_(target.norm.weight)

    def set_draft_vocab(self, token_ids: Tensor) -> None:
        """Stores the target ids [draft_vocab] int64 that can be drafted, ascending, as `d2t` offsets and `t2d`."""
        check_draft_vocab(token_ids, self.config)
        self.d2t.copy_(token_ids - torch.arange(len(token_ids)))
        self.t2d.zero_()
        self.t2d[token_ids] = True
