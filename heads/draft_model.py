"""The draft model: an ordinary small language model of the target's tokenizer, in the tensor names transformers uses.

It looks at tokens alone, brings its own embeddings and output head, and starts from a model: from a few layers of the
target itself, or from all of a smaller one. Its folder loads in transformers and vLLM as any model does.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from .base import Attend, Elsewhere, HeadError, TargetFacts
from .decoder import DecoderConfig, DecoderHead, DecoderLayer
from .layers import Linear, RMSNorm, RotaryEmbedding, initialise_, nan_parameter
from .model_folder import ModelFolder
from .target_tensors import TargetTensors

Family = Literal["llama", "qwen2", "qwen3"]
"""qwen2: q, k and v have a bias; qwen3: q and k are normed per head."""

FAMILIES: dict[str, Family] = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""Model types whose layers are ours, by the family they are written as."""

ARCHITECTURES: dict[Family, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
VOCABULARY_TENSORS = ("model.embed_tokens.", "lm_head.")
SHARE_OF_LAYERS = 6
"""A draft model made of the target keeps one layer in so many, unless told otherwise."""


@dataclass(frozen=True, kw_only=True)
class DraftModelConfig(DecoderConfig):
    """Shape of a draft model, and the layers of the model it starts from.

    It drafts over the first `draft_vocab_size` ids. Those of a model that `fit` writes are all; a model that is served
    as it is may know fewer than the target, whose matrices are padded to a size of their own.
    """

    network = "spectrain.heads.draft_model:DraftModel"
    objective = "spectrain.train.objectives.draft_model:DraftModelObjective"
    proposer = "spectrain.infer.proposers.draft_model:DraftModelProposer"
    requires_final_state = True
    requires_model = True
    shares_embeddings = False

    family: Family
    tie_word_embeddings: bool
    source_layers: tuple[int, ...]  # which layers of the model it starts from, one a layer of its own

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layer_ids:
            raise HeadError(f"a draft model sees tokens alone, found head.layer_ids {list(self.layer_ids)}; drop them")
        if len(self.source_layers) != self.num_layers:
            raise HeadError(
                f"head.source_layers must name one layer for each of the {self.num_layers} of head.num_layers, found "
                f"{list(self.source_layers)}; set one of the two"
            )

    @classmethod
    def derive(cls, target: TargetFacts, settings: Mapping[str, Any]) -> Self:
        """The shape before a model is named: the target's own, as a Llama where the target is of another family."""
        family = settings.get("family") or FAMILIES.get(target.model_type, "llama")
        return cls(target=target, **cls._values(target, {**settings, "family": family}, target))

    @classmethod
    def derive_from(cls, target: TargetFacts, settings: Mapping[str, Any], model: ModelFolder) -> Self:
        _check_shape(model)
        tied = {"tie_word_embeddings": bool(getattr(model.config, "tie_word_embeddings", False))}
        return cls(target=target, **cls._values(target, {**tied, **settings}, model.facts))

    @classmethod
    def _values(cls, target: TargetFacts, settings: Mapping[str, Any], model: TargetFacts) -> dict[str, Any]:
        """Every field but `target`; `model` is what the draft model starts from."""
        wanted = {key: value for key, value in settings.items() if value is not None}
        if wanted.get("draft_vocab_size", target.vocab_size) != target.vocab_size:
            raise HeadError(
                f"a draft model drafts over the whole vocabulary of {target.vocab_size}, found head.draft_vocab_size "
                f"{wanted['draft_vocab_size']}; set it to null"
            )
        family = wanted.get("family", FAMILIES.get(model.model_type))
        if family is None:
            raise HeadError(
                f"a draft model can start from models of type {', '.join(FAMILIES)}, found {model.model_type}; give "
                f"a smaller one of these types, best of the target's tokenizer"
            )
        own = (model.num_layers, model.hidden_size) == (target.num_layers, target.hidden_size)
        if "source_layers" in wanted:
            wanted.setdefault("num_layers", len(wanted["source_layers"]))
        wanted.setdefault("num_layers", max(1, model.num_layers // SHARE_OF_LAYERS) if own else model.num_layers)
        if "source_layers" not in wanted:
            wanted["source_layers"] = spread_layers(model.num_layers, wanted["num_layers"])
        vocabulary = {"vocab_size": target.vocab_size, "draft_vocab_size": target.vocab_size}
        own_fields = {"layer_ids": (), "family": family, "tie_word_embeddings": False}
        return {**cls.implied(model), **vocabulary, **own_fields, **wanted}

    def served_as_it_is(self, num_rows: int, num_tokens: int) -> Self:
        """The config that embeds `num_rows` ids and drafts over the first `num_tokens` of them."""
        return dataclasses.replace(self, vocab_size=num_rows, draft_vocab_size=min(num_tokens, num_rows))

    def serving_config(self) -> dict[str, Any]:
        """An ordinary model's config; served with `{"method": "draft_model", "model": FOLDER}`.

        vLLM reads the method from the folder's path first: it must not contain `eagle-`, `eagle3` or `dflash`.
        """
        return {
            "architectures": [ARCHITECTURES[self.family]],
            "model_type": self.family,
            **super().serving_config(),
            "tie_word_embeddings": self.tie_word_embeddings,
        }

    def elsewhere(self) -> Elsewhere:
        return Elsewhere("method draft_model", "algorithm STANDALONE, which leaves out the first token")


class TokenRows(NamedTuple):
    """One call's input: what each row embeds and where it stands."""

    token_embeds: Tensor  # [..., hidden]
    positions: Tensor  # [...] int64; of the token itself


class Embedding(nn.Module):
    """The vocabulary's rows; a module only so that its tensor is called `embed_tokens.weight`."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.weight = nan_parameter(vocab, hidden)


class Decoder(nn.Module):
    """Embeddings, layers and final norm; a module of its own so that tensors are called `model.*`."""

    def __init__(self, config: DraftModelConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, i, qk_norm=config.family == "qwen3", qkv_bias=config.family == "qwen2")
            for i in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = RotaryEmbedding(config.head_dim, config.rope_parameters, config.max_position_embeddings)


class DraftModel(DecoderHead):
    """The network: a causal language model whose mask and cache are the caller's."""

    config: DraftModelConfig

    def __init__(self, config: DraftModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.draft_vocab_size)

    def forward(self, rows: TokenRows, attend: Attend) -> Tensor:
        """The states [..., hidden] that go into `logits`, over rows of any leading shape."""
        cos, sin = self.model.rotary(rows.positions)
        states = rows.token_embeds
        for layer in self.model.layers:
            states = layer(states, cos, sin, attend)
        return self.model.norm(states)

    def embed(self, token_ids: Tensor, target: TargetTensors) -> Tensor:
        return nn.functional.embedding(token_ids, self.model.embed_tokens.weight)

    def output_weight(self, target: TargetTensors) -> Tensor:
        if self.config.tie_word_embeddings:
            return self.model.embed_tokens.weight[: self.config.draft_vocab_size]
        return self.lm_head.weight

    def draft_to_target(self) -> Tensor | None:
        if self.config.draft_vocab_size == self.config.vocab_size:
            return None
        return torch.arange(self.config.draft_vocab_size, device=self.model.embed_tokens.weight.device)

    def initialise(self, target: TargetTensors, generator: torch.Generator) -> None:
        """Random layers; the target's embeddings, norm and output head where they have the draft model's width."""
        initialise_(self, generator)
        embeds = self.model.embed_tokens.weight
        with torch.no_grad():
            if target.embed_tokens.shape == embeds.shape:
                embeds.copy_(target.embed_tokens)
                if target.norm.kind == "rms" and target.norm.weight is not None:
                    self.model.norm.weight.copy_(target.norm.weight)
                if not self.config.tie_word_embeddings:
                    self.lm_head.weight.copy_(target.lm_head)
            else:
                embeds.copy_(torch.randn(embeds.shape, generator=generator) * 0.02)

    def start_from(self, model: ModelFolder) -> None:
        """Takes embeddings, norm, output head and the configured layers of a model.

        Rows of a larger vocabulary are cut, missing ones filled with the mean row. Raises HeadError where the model's
        layers are not of this shape.
        """
        expected = {name.split(".", 3)[3] for name in self.state_dict() if name.startswith("model.layers.0.")}
        for layer in self.config.source_layers:
            found = model.layer_tensors(layer)
            if found != expected:
                raise HeadError(
                    f"layer {layer} of {model.name} must hold exactly the tensors of a {self.config.family} layer, "
                    f"found {', '.join(sorted(found ^ expected)) or 'none'} to differ; change head.source_layers or "
                    f"--model"
                )
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                tensor = model.tensor(self._source_name(name, model))
                if name.startswith(VOCABULARY_TENSORS):
                    tensor = _with_rows(tensor, len(parameter))
                if tensor.shape != parameter.shape:
                    raise HeadError(
                        f"{name} must have shape {list(parameter.shape)}, found {list(tensor.shape)} in {model.name}; "
                        f"leave the sizes of the head section to the model"
                    )
                parameter.copy_(tensor)

    def _source_name(self, name: str, model: ModelFolder) -> str:
        if not name.startswith("model."):
            return name
        rest = name.removeprefix("model.")
        if rest.startswith("layers."):
            _, layer, rest = rest.split(".", 2)
            rest = f"layers.{self.config.source_layers[int(layer)]}.{rest}"
        return model.prefix + rest


def spread_layers(depth: int, count: int) -> tuple[int, ...]:
    """`count` layer ids of a model of `depth` layers, evenly spread, the first and the last among them."""
    if not 1 <= count <= depth:
        raise HeadError(f"head.num_layers must lie between 1 and the model's {depth}, found {count}")
    if count == 1:
        return (0,)
    return tuple(round(i * (depth - 1) / (count - 1)) for i in range(count))


def _check_shape(model: ModelFolder) -> None:
    """Refuses what tensor names do not show: another activation, biases, windows."""
    config = model.config
    activation = getattr(config, "hidden_act", "silu")
    windows = {"sliding_attention", "chunked_attention"} & set(getattr(config, "layer_types", None) or ())
    mistral = config.model_type == "mistral" and getattr(config, "sliding_window", None) is not None
    faults = {
        f"activation {activation}": activation != "silu",
        "biases in every projection": bool(getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", 0)),
        "sliding windows": bool(windows) or mistral,
    }
    for fault, there in faults.items():
        if there:
            raise HeadError(
                f"a draft model is a Llama or Qwen of full attention, found {model.name} to have {fault}; give another "
                f"one"
            )


def _with_rows(tensor: Tensor, rows: int) -> Tensor:
    if len(tensor) >= rows:
        return tensor[:rows]
    return torch.cat([tensor, tensor.float().mean(0, keepdim=True).to(tensor.dtype).expand(rows - len(tensor), -1)])
