"""The Gemma 4 assistant: decoder layers without keys and values of their own, in the tensor names transformers uses.

A layer reads the keys and values that the target's last layer of its kind made, so all drafts of a step stand at one
position, the newest token's, over one and the same context. A checkpoint is read, not trained: shards hold no keys.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from .base import DraftHead, DraftOutput, DraftRows, Elsewhere, HeadConfig, HeadError, TargetFacts
from .draft_model import Embedding
from .folder import fill
from .layers import Linear, RMSNorm, RotaryEmbedding, SwiGLU, initialise_, nan_parameter, rotate
from .target_tensors import TargetTensors

ACTIVATION = "gelu_pytorch_tanh"
SLIDING = "sliding_attention"

Read = Callable[[int, Tensor], Tensor]
"""`read(layer, q) -> out`: q [..., heads, head_dim], RoPE applied and to be scaled by nothing; out of the same shape.
The caller holds the keys and values, and decides which of them are seen."""


class Layer(NamedTuple):
    """What one layer attends with."""

    kind: str  # as transformers calls it: sliding_attention or full_attention
    head_dim: int
    target_layer: int  # whose keys and values it reads


@dataclass(frozen=True, kw_only=True)
class Gemma4AssistantConfig(HeadConfig):
    """Shape of an assistant, and the layers of the target that it reads."""

    network = "spectrain.heads.gemma4_assistant:Gemma4Assistant"
    proposer = "spectrain.infer.proposers.gemma4_assistant:Gemma4AssistantProposer"
    requires_final_state = True

    hidden_size: int
    intermediate_size: int
    num_heads: int
    layers: tuple[Layer, ...]
    sliding_window: int  # rows that a sliding layer sees
    rms_norm_eps: float
    max_position_embeddings: int
    rope_parameters: dict[str, dict[str, Any]]  # by kind of layer
    softcap: float | None
    tie_word_embeddings: bool
    num_centroids: int  # groups of the vocabulary, of which few are scored; 0: all of it is
    centroid_top_k: int
    suppress_tokens: tuple[int, ...]  # never drafted
    served: dict[str, Any]  # the checkpoint's own config.json

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_centroids and self.vocab_size % self.num_centroids:
            raise HeadError(
                f"the {self.num_centroids} centroids of an assistant must divide its vocabulary of {self.vocab_size} "
                f"evenly; fetch the assistant again"
            )
        wrong = [token for token in self.suppress_tokens if not 0 <= token < self.vocab_size]
        if wrong:
            raise HeadError(
                f"suppress_tokens of an assistant must lie in 0..{self.vocab_size - 1}, found {wrong[0]}; mend its "
                f"generation_config.json"
            )

    @classmethod
    def derive(cls, target: TargetFacts, settings: Mapping[str, Any]) -> Self:
        """The config for a target of an assistant whose every own field is in `settings`."""
        whole = {"vocab_size": target.vocab_size, "draft_vocab_size": target.vocab_size}
        return cls(target=target, layer_ids=(target.num_layers,), **whole, **settings)

    def serving_config(self) -> dict[str, Any]:
        return self.served

    def elsewhere(self) -> Elsewhere:
        return Elsewhere("method mtp, not tried", "not tried")


class GeGLU(SwiGLU):
    """down(gelu(gate(x)) * up(x)), with the tanh form of GELU."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class QueryAttention(nn.Module):
    """Attention that makes queries only."""

    def __init__(self, config: Gemma4AssistantConfig, index: int) -> None:
        super().__init__()
        self.index, self.heads, self.head_dim = index, config.num_heads, config.layers[index].head_dim
        self.q_proj = Linear(config.hidden_size, self.heads * self.head_dim)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.o_proj = Linear(self.heads * self.head_dim, config.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, read: Read) -> Tensor:
        q = self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, self.head_dim)))
        return self.o_proj(read(self.index, rotate(q, cos, sin)).flatten(-2))


class AssistantLayer(nn.Module):
    """A norm before and after both attention and MLP, and a scale for all that leaves the layer."""

    def __init__(self, config: Gemma4AssistantConfig, index: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = QueryAttention(config, index)
        self.mlp = GeGLU(hidden, config.intermediate_size)
        self.input_layernorm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.pre_feedforward_layernorm = RMSNorm(hidden, eps)
        self.post_feedforward_layernorm = RMSNorm(hidden, eps)
        self.layer_scalar = nan_parameter(1)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, read: Read) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), cos, sin, read))
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar


class AssistantDecoder(nn.Module):
    """Output rows, layers and final norm; a module of its own so that tensors are called `model.*`."""

    def __init__(self, config: Gemma4AssistantConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(AssistantLayer(config, i) for i in range(len(config.layers)))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = nn.ModuleDict(
            {
                layer.kind: RotaryEmbedding(
                    layer.head_dim, config.rope_parameters[layer.kind], config.max_position_embeddings
                )
                for layer in config.layers
            }
        )


class MaskedEmbedding(nn.Module):
    """The vocabulary in groups of equal size, each with a centroid that says whether its tokens are worth scoring."""

    token_ordering: Tensor

    def __init__(self, config: Gemma4AssistantConfig) -> None:
        super().__init__()
        self.top_k = config.centroid_top_k
        self.centroids = Linear(config.hidden_size, config.num_centroids)
        self.register_buffer("token_ordering", torch.full((config.vocab_size,), -1))

    def forward(self, states: Tensor, weight: Tensor) -> Tensor:
        """Logits [..., vocab] float32 of states [..., hidden]: -inf outside the groups of the best centroids."""
        best = self.centroids(states).topk(self.top_k, dim=-1).indices
        ids = self.token_ordering.view(self.centroids.out_features, -1)[best].flatten(-2)
        scores = (weight[ids] @ states[..., None])[..., 0].float()
        return scores.new_full((*states.shape[:-1], len(weight)), -torch.inf).scatter_(-1, ids, scores)


class Gemma4Assistant(DraftHead):
    """The network; its attention has neither mask nor cache, only whatever `read` gives it."""

    config: Gemma4AssistantConfig
    suppressed: Tensor

    def __init__(self, config: Gemma4AssistantConfig) -> None:
        super().__init__()
        self.config = config
        backbone, hidden = config.target.hidden_size, config.hidden_size
        self.model = AssistantDecoder(config)
        self.pre_projection = Linear(2 * backbone, hidden)
        self.post_projection = Linear(hidden, backbone)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(hidden, config.vocab_size)
        if config.num_centroids:
            self.masked_embedding = MaskedEmbedding(config)
        self.register_buffer("suppressed", torch.tensor(config.suppress_tokens, dtype=torch.int64), persistent=False)

    def forward(self, rows: DraftRows, read: Read) -> DraftOutput:
        """One draft of rows of any leading shape, from the target's normed states or the feedback of the draft before.

        `rows.positions` are those of the newest token, whichever draft this is.
        """
        rotary = {kind: embedding(rows.positions) for kind, embedding in self.model.rotary.items()}
        x = self.pre_projection(torch.cat([rows.token_embeds, rows.states], dim=-1))
        for layer, facts in zip(self.model.layers, self.config.layers, strict=True):
            x = layer(x, *rotary[facts.kind], read)
        x = self.model.norm(x)
        return DraftOutput(x, self.post_projection(x))

    def embed(self, token_ids: Tensor, target: TargetTensors) -> Tensor:
        """The target's rows [..., target_hidden], scaled as the target scales them: by a factor of its own dtype."""
        rows = super().embed(token_ids, target)
        return rows * torch.tensor(self.config.target.hidden_size**0.5, dtype=rows.dtype).item()

    def output_weight(self, target: TargetTensors) -> Tensor:
        return self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    def logits(self, logits_states: Tensor, target: TargetTensors) -> Tensor:
        """Draft logits [..., vocab] float32; -inf where a token is suppressed or its group is not scored."""
        if self.config.num_centroids:
            logits = self.masked_embedding(logits_states, self.output_weight(target))
        else:
            logits = super().logits(logits_states, target)
        cap = self.config.softcap
        capped = logits if cap is None else torch.where(logits.isinf(), logits, cap * torch.tanh(logits / cap))
        return capped.index_fill(-1, self.suppressed, -torch.inf)

    def initialise(self, target: TargetTensors, generator: torch.Generator) -> None:
        """Random weights that no training improves yet; a released checkpoint is read by `load_assistant`."""
        initialise_(self, generator)
        with torch.no_grad():
            embeds = self.model.embed_tokens.weight
            embeds.copy_(torch.randn(embeds.shape, generator=generator) * 0.02)
            for name, parameter in self.named_parameters():
                if name.endswith("layer_scalar"):
                    parameter.fill_(1.0)
            if self.config.num_centroids:
                self.masked_embedding.token_ordering.copy_(torch.arange(self.config.vocab_size))


def load_assistant(folder: Path, target: TargetFacts, target_config: Any) -> Gemma4Assistant:
    """The assistant in a folder as transformers saves it, for the target of `target_config`.

    Raises HeadError naming the key or tensor that is wrong, or what in the target is not what it was made for.
    """
    head = Gemma4Assistant(read_config(folder, target, target_config))
    tied = {"lm_head.weight": "model.embed_tokens.weight"} if head.config.tie_word_embeddings else {}
    fill(head, folder / "model.safetensors", copies=tied)
    if head.config.num_centroids:
        ordering = head.masked_embedding.token_ordering.sort().values
        if not torch.equal(ordering, torch.arange(len(ordering))):
            raise HeadError(
                f"masked_embedding.token_ordering in {folder} must hold each of the {len(ordering)} tokens once, found "
                f"others; fetch the assistant again"
            )
    return head


def read_config(folder: Path, target: TargetFacts, target_config: Any) -> Gemma4AssistantConfig:
    """The config of an assistant's folder; raises HeadError as `load_assistant` does."""
    from transformers import AutoConfig

    try:
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
        served = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        generation = folder / "generation_config.json"
        suppressed = json.loads(generation.read_text(encoding="utf-8")) if generation.is_file() else {}
    except (OSError, ValueError) as error:
        raise HeadError(f"no usable assistant config in {folder}: {str(error).partition(chr(10))[0]}") from error
    text = config.get_text_config()
    for name, made, found in (
        ("hidden_size", config.backbone_hidden_size, target.hidden_size),
        ("vocab_size", text.vocab_size, target.vocab_size),
    ):
        if made != found:
            raise HeadError(
                f"{folder} assists a target of {name} {made}, found {found}; give the target it was made for"
            )
    for name, allowed in (("hidden_activation", ACTIVATION), ("attention_bias", False)):
        if getattr(text, name) != allowed:
            raise HeadError(
                f"an assistant is read with {name} {allowed}, found {getattr(text, name)} in {folder}; use another one"
            )
    return Gemma4AssistantConfig.derive(
        target,
        {
            "hidden_size": text.hidden_size,
            "intermediate_size": text.intermediate_size,
            "num_heads": text.num_attention_heads,
            "layers": _layers(text, target_config),
            "sliding_window": text.sliding_window,
            "rms_norm_eps": text.rms_norm_eps,
            "max_position_embeddings": text.max_position_embeddings,
            "rope_parameters": text.rope_parameters,
            "softcap": text.final_logit_softcapping,
            "tie_word_embeddings": config.tie_word_embeddings,
            "num_centroids": config.num_centroids if config.use_ordered_embeddings else 0,
            "centroid_top_k": config.centroid_intermediate_top_k,
            "suppress_tokens": tuple(suppressed.get("suppress_tokens") or ()),
            "served": served,
        },
    )


def _layers(text: Any, target_config: Any) -> tuple[Layer, ...]:
    """The assistant's layers, each beside the target's last layer of its kind that makes keys and values."""
    theirs = target_config.get_text_config()
    kinds: Sequence[str] = getattr(theirs, "layer_types", None) or ()
    own = kinds[: len(kinds) - (getattr(theirs, "num_kv_shared_layers", None) or 0)]
    last = {kind: i for i, kind in enumerate(own)}
    missing = sorted(set(text.layer_types) - set(last))
    if missing or not theirs.model_type.startswith("gemma4"):
        raise HeadError(
            f"an assistant reads keys and values of a Gemma 4 with layers of {', '.join(sorted(set(text.layer_types)))}"
            f", found a target of type {theirs.model_type}; give the target it was made for"
        )
    return tuple(Layer(kind, _head_dim(text, i, kind), last[kind]) for i, kind in enumerate(text.layer_types))


def _head_dim(text: Any, index: int, kind: str) -> int:
    if getattr(text, "is_heterogeneous", False):
        return text.per_layer_config[index].head_dim
    return text.head_dim if kind == SLIDING else getattr(text, "global_head_dim", None) or text.head_dim
