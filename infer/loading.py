"""From a folder or hub id to a transformers model, and the plain facts of its config."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..heads.base import TargetFacts
from .probe import TargetError


def load_model(
    model: str | Path, device: torch.device, dtype: torch.dtype, revision: str | None, trust_remote_code: bool
) -> PreTrainedModel:
    """The language model in `dtype` on `device`; raises TargetError for anything short of a complete causal one.

    A model that also sees is loaded whole where its text part cannot be by itself; it is given texts alone.
    """
    source = _source(model)
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(source, **options)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise TargetError(f"no usable model config in {source}: {' '.join(str(error).split())}") from error
    try:
        result: Any = _class_for(config).from_pretrained(
            source, config=config, dtype=dtype, output_loading_info=True, **options
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise TargetError(
            f"{source} (model type {config.model_type!r}) is no causal language model that loads: {_first_line(error)}"
        ) from error
    loaded, report = result
    incomplete = sorted([*report["missing_keys"], *[key[0] for key in report["mismatched_keys"]]])
    if incomplete:
        raise TargetError(
            f"{source} must hold every tensor of {type(loaded).__name__}, found {len(incomplete)} missing or "
            f"mis-shaped (first: {incomplete[0]}); fetch the model again"
        )
    return loaded.to(device)


def _class_for(config: PreTrainedConfig) -> Any:
    seeing = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForImageTextToText if seeing else AutoModelForCausalLM


def load_tokenizer(model: str | Path, revision: str | None, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    """The tokenizer beside the model; None for a local folder that has none."""
    source = _source(model)
    if Path(source).is_dir() and not any(Path(source).glob("*token*")):
        return None
    try:
        return AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise TargetError(f"the tokenizer of {source} cannot be loaded: {_first_line(error)}") from error


def facts_of(model: PreTrainedModel) -> TargetFacts:
    """The shape facts of a model's config; raises TargetError when the config lacks one."""
    try:
        return TargetFacts.from_config(model.config)
    except AttributeError as error:
        raise TargetError(
            f"{type(model).__name__} is refused: its config lacks a fact of every decoder ({_first_line(error)}); use "
            f"a target of another family"
        ) from error


def with_vocab(facts: TargetFacts, vocab_size: int) -> TargetFacts:
    """The same facts for the number of logits the model really gives."""
    return dataclasses.replace(facts, vocab_size=vocab_size)


def context_length(model: PreTrainedModel, facts: TargetFacts, asked: int | None) -> int:
    """The longest request: what was asked for, else what the config allows; raises TargetError beyond that."""
    limit = facts.max_position_embeddings
    if "dynamic" in str(facts.rope_parameters.get("rope_type")):
        limit = int(limit * float(facts.rope_parameters.get("factor", 1.0)))
    if asked is None:
        return limit
    if not 1 <= asked <= limit:
        raise TargetError(
            f"the longest request must lie between 1 and the {limit} positions {type(model).__name__} was made for, "
            f"found {asked}; change --max-length"
        )
    return asked


def eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """Every id that ends an output: those of the generation config, the config and its text part."""
    found: set[int] = set()
    for config in (getattr(model, "generation_config", None), model.config, model.config.get_text_config()):
        ids = getattr(config, "eos_token_id", None)
        found.update([] if ids is None else [ids] if isinstance(ids, int) else ids)
    return frozenset(found)


def _source(model: str | Path) -> str:
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise TargetError(
                f"a model folder holds config.json, found none in {path}; give the folder it was saved to"
            )
        return str(path)
    text = str(model)
    if isinstance(model, Path) or path.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1:
        raise TargetError(f"expected a model folder or a hub id like owner/name, found no folder {text}; check --model")
    return text


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
