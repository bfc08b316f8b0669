"""What every draft head is made of: its config, its network and the names their tensors go by.

Glossary, used throughout the project:
    target          the model being made faster; a draft head is trained for exactly one target
    row t           the token x_t, its loss mask and the target's hidden states after x_t was consumed
    layer id i      the residual stream entering decoder layer i; 0 = embeddings, L = after the last layer and
                    before the final norm
    aux states      the hidden states a head is conditioned on, [..., num_layer_ids, target_hidden]
    draft id        an index into the draft vocabulary; `draft_to_target` turns it into a target id
    num_tokens      rows of a packed batch;  batch, seq: a padded one

A network holds no mask, no cache, no draft loop and no loss. Those belong to its callers: the trainer, the engine,
or a test.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from .target_tensors import TargetTensors

if TYPE_CHECKING:
    from .model_folder import ModelFolder

Attend = Callable[..., Tensor]
"""`attend(layer, q, k, v) -> out`: q [..., heads, head_dim], k and v [..., kv_heads, head_dim], RoPE already applied;
out [..., heads, head_dim]. The caller decides what each row sees and where k and v are kept. v, and out with it, may be
of another width than k. A layer that has them adds `window=`, the rows it sees, itself included, and `sinks=` [heads].
"""


class HeadError(ValueError):
    """A head, its folder or its config is not what was expected; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """The shape of a target, as far as a draft head is derived from it."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_parameters: dict[str, Any]

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """Reads a transformers config (of a composite model: its text part)."""
        text = config.get_text_config()
        if getattr(text, "is_heterogeneous", False):  # such a config refuses to give what differs between layers
            text = text.per_layer_config[0]
        hidden, heads = text.hidden_size, text.num_attention_heads
        latent = getattr(text, "kv_lora_rank", None) is not None
        rope = getattr(text, "rope_parameters", None) or {}
        if "rope_type" not in rope and any(isinstance(value, Mapping) for value in rope.values()):
            rope = rope.get("full_attention") or next(v for v in rope.values() if isinstance(v, Mapping))
        return cls(
            model_type=text.model_type,
            hidden_size=hidden,
            intermediate_size=getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * hidden,
            num_layers=text.num_hidden_layers,
            num_heads=heads,
            num_kv_heads=heads if latent else (getattr(text, "num_key_value_heads", None) or heads),
            head_dim=hidden // heads if latent else (getattr(text, "head_dim", None) or hidden // heads),
            vocab_size=text.vocab_size,
            rms_norm_eps=getattr(text, "rms_norm_eps", None) or 1e-6,
            max_position_embeddings=getattr(text, "max_position_embeddings", None) or 2048,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, **rope},
        )


class No(NamedTuple):
    """Another engine does not serve a head, or would serve it wrongly."""

    why: str

    def __str__(self) -> str:
        return f"no: {self.why}"


class Elsewhere(NamedTuple):
    """What other engines are told to serve a head's folder."""

    vllm: str | No = No("it knows no such head")
    sglang: str | No = No("it knows no such head")


@dataclass(frozen=True, kw_only=True)
class HeadConfig(ABC):
    """Everything needed to build a network and serve it; subclasses add their fields and the three class paths.

    `network`, `objective` and `proposer` are `module:Class` strings, resolved only when used, so that no import runs
    from heads to train or infer and a head may live in another package.
    """

    network: ClassVar[str]
    objective: ClassVar[str]
    proposer: ClassVar[str]
    requires_final_state: ClassVar[bool]
    """Whether training needs id L beside `layer_ids` (for soft labels or as the head's own input)."""
    requires_model: ClassVar[bool] = False
    """Whether a fresh head starts from layers of a model, which `fit --model` then names."""
    accepts_model: ClassVar[bool] = False
    """Whether it starts from layers of a model where `fit --model` names one, and from nothing where not."""

    target: TargetFacts
    layer_ids: tuple[int, ...]
    vocab_size: int
    draft_vocab_size: int

    def __post_init__(self) -> None:
        last = self.target.num_layers
        wrong = [i for i in self.layer_ids if not 0 <= i <= last]
        if wrong:
            raise HeadError(
                f"layer ids must lie between 0 (embeddings) and {last} (after the last layer) for this target, found "
                f"{', '.join(map(str, wrong))}; change head.layer_ids"
            )
        if list(self.layer_ids) != sorted(set(self.layer_ids)):
            raise HeadError(
                f"layer ids must be ascending and distinct, because serving engines concatenate them in ascending "
                f"order, found {list(self.layer_ids)}; change head.layer_ids"
            )
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise HeadError(
                f"the draft vocabulary must hold between 1 and the target's {self.vocab_size} tokens, found "
                f"{self.draft_vocab_size}; change head.draft_vocab_size"
            )

    @classmethod
    @abstractmethod
    def derive(cls, target: TargetFacts, settings: Mapping[str, Any]) -> Self:
        """The config for a target: `settings` (a recipe's `head` section) win over what the target implies."""

    @classmethod
    def derive_from(cls, target: TargetFacts, settings: Mapping[str, Any], model: "ModelFolder") -> Self:
        """As `derive`, for a head that starts from `model`: the target's own folder, or a smaller model's."""
        return cls.derive(target, settings)

    @abstractmethod
    def serving_config(self) -> dict[str, Any]:
        """The `config.json` other engines read."""

    def elsewhere(self) -> Elsewhere:
        """What vLLM and SGLang do with the folder."""
        return Elsewhere()

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, the inverse of `from_dict`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Raises HeadError for fields that are unknown, missing or of another type than was written."""
        _check_fields(cls, values)
        # JSON knows no tuples
        plain = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
        try:
            _check_fields(TargetFacts, values["target"])
            return cls(**{**plain, "target": TargetFacts(**values["target"])})
        except TypeError as error:
            raise HeadError(
                f"a field of {cls.__name__} is of a wrong type ({error}); restore spectrain.json, or train again"
            ) from error


def _check_fields(cls: type, values: Mapping[str, Any]) -> None:
    fields = {field.name for field in dataclasses.fields(cls)}
    unknown, missing = sorted(set(values) - fields), sorted(fields - set(values))
    if unknown or missing:
        raise HeadError(
            f"{cls.__name__} takes exactly its own fields; unknown {unknown}, missing {missing}: the head was "
            f"written by another version, train it again or use that version"
        )


class DraftRows(NamedTuple):
    """One call's input: what each row embeds, is conditioned on, and where it stands."""

    token_embeds: Tensor  # [..., hidden]
    states: Tensor  # [..., hidden]; combined aux states at the first step, the head's own feedback afterwards
    positions: Tensor  # [...] int64; the position of the state, not of the token beside it
    step: int = 0  # which draft of the row this call makes; heads whose steps are all alike do not look


class DraftOutput(NamedTuple):
    """One call's output."""

    logits_states: Tensor  # [..., hidden]; goes into `logits`
    feedback: Tensor  # [..., hidden]; the next step's `states`


class DraftHead(nn.Module, ABC):
    """A draft network. Parameters are NaN until `initialise` or a strict load fills them."""

    config: HeadConfig

    @abstractmethod
    def initialise(self, target: TargetTensors, generator: torch.Generator) -> None:
        """Fills every parameter for training from scratch; the same generator gives the same weights."""

    def embed(self, token_ids: Tensor, target: TargetTensors) -> Tensor:
        """Token embeddings [..., hidden] of target ids [...]; the target's own unless a head has others."""
        return nn.functional.embedding(token_ids, target.embed_tokens)

    def combine(self, aux_states: Tensor, target: TargetTensors) -> Tensor:
        """Aux states [..., num_layer_ids, target_hidden] to the first step's states [..., hidden].

        Raises HeadError where the head is conditioned on none.
        """
        raise HeadError(f"{type(self).__name__} is conditioned on no aux states; do not combine any")

    @abstractmethod
    def output_weight(self, target: TargetTensors) -> Tensor:
        """The matrix [draft_vocab, hidden] that turns `logits_states` into draft logits."""

    def draft_to_target(self) -> Tensor | None:
        """Target ids [draft_vocab] int64 of the draft ids; None where the vocabularies are one."""
        return None

    def set_draft_vocab(self, token_ids: Tensor) -> None:
        """Stores the target ids [draft_vocab] int64, ascending, that can be drafted; before `initialise`."""
        raise HeadError(f"{type(self).__name__} drafts over the whole vocabulary; set head.draft_vocab_size to null")

    def start_from(self, model: "ModelFolder") -> None:
        """Fills the parameters that come from a model; after `initialise`, for heads whose config requires one."""
        raise HeadError(f"{type(self).__name__} starts from no model; leave --model out")

    def logits(self, logits_states: Tensor, target: TargetTensors) -> Tensor:
        """Draft logits [..., draft_vocab] float32."""
        return self.project(logits_states, self.output_weight(target))

    @staticmethod
    def project(states: Tensor, weight: Tensor) -> Tensor:
        """States [..., hidden] times an output matrix [draft_vocab, hidden], as float32."""
        return nn.functional.linear(states, weight.to(states.dtype)).float()

    def assert_filled(self) -> None:
        """Raises HeadError if a parameter still holds the NaN it was created with."""
        empty = [name for name, p in self.named_parameters() if not torch.isfinite(p).all()]
        if empty:
            raise HeadError(f"every parameter must be finite, found NaN or infinity in {', '.join(empty)}")


def check_draft_vocab(token_ids: Tensor, config: HeadConfig) -> None:
    """Raises HeadError unless these are the config's number of target ids, ascending."""
    expected, last = config.draft_vocab_size, config.vocab_size - 1
    if len(token_ids) != expected or not (token_ids.diff() > 0).all() or token_ids[0] < 0 or token_ids[-1] > last:
        raise HeadError(
            f"a draft vocabulary is {expected} ascending target ids from 0 to {last}, found {len(token_ids)} from "
            f"{int(token_ids.min())} to {int(token_ids.max())}"
        )


def check_mask_token(token_id: int | None, vocab_size: int) -> None:
    """Raises HeadError unless a mask token is one of the target's rows; None is one that `fit` has yet to choose."""
    if token_id is not None and not 0 <= token_id < vocab_size:
        raise HeadError(
            f"head.mask_token_id must be one of the target's {vocab_size} rows, found {token_id}; choose one that no "
            f"text uses, or null"
        )


def check_whole_vocabulary(config: HeadConfig, method: str) -> None:
    """Raises HeadError where a head would draft over a part of the vocabulary that its method drafts over all of."""
    if config.draft_vocab_size != config.vocab_size:
        raise HeadError(
            f"{method} drafts with the target's output matrix over all {config.vocab_size} tokens, found "
            f"head.draft_vocab_size {config.draft_vocab_size}; set it to null"
        )


def check_plain_logits(target: TargetTensors, method: str) -> None:
    """Raises HeadError unless the target's logits are a product with its output matrix and nothing more."""
    shaped = {
        "a bias in its output head": target.lm_head_bias is not None,
        f"logits scaled by {target.logit_scale}": target.logit_scale != 1.0,
        f"logits capped at {target.softcap}": target.softcap is not None,
    }
    found = [name for name, present in shaped.items() if present]
    if found:
        raise HeadError(
            f"{method} drafts with the target's output matrix alone, but this target has {' and '.join(found)}; "
            f"train eagle3, which has an output head of its own"
        )


def chosen_mask_token(token_id: int | None) -> int:
    """The mask token of a network; raises HeadError where none was chosen."""
    if token_id is None:
        raise HeadError("the head needs a mask token, found none; set head.mask_token_id to an id that no text uses")
    return token_id


def default_aux_layer_ids(num_layers: int) -> tuple[int, ...]:
    """EAGLE-3's ids 2, L//2, L-3, made distinct, ascending and smaller than L for shallow targets.

    A target of fewer than three layers has fewer than three ids below L to give and is refused.
    """
    if num_layers < 3:
        raise HeadError(
            f"the default of three aux layers needs a target of at least 3 layers, found {num_layers}; set "
            f"head.layer_ids (or --layers) by hand"
        )
    low, high = min(2, num_layers - 3), max(num_layers - 3, min(2, num_layers - 3) + 2)
    middle = min(max(num_layers // 2, low + 1), high - 1)
    return low, middle, high
