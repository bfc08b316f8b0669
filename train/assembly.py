"""Recipe and shards to the parts of a run: head, objective, target tensors, settings. Everything is checked here."""

import json
import typing
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from ..extract.shards import ShardError, ShardSet
from ..heads.base import DraftHead, HeadConfig, HeadError, TargetFacts
from ..heads.folder import load_head
from ..heads.model_folder import ModelFolder, check_same_tokens
from ..heads.resolve import resolve
from ..recipes.loader import Recipe, RecipeError, build, check_fields
from .objectives.base import Objective
from .settings import DataSettings, OptimizerSettings, ServingSettings, StoppingSettings
from .vocabulary import DraftVocabulary, forced_token_ids, select_draft_vocabulary, spare_token_id


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """A recipe resolved for the target of some shards."""

    recipe: Recipe
    config: HeadConfig
    objective: Objective
    objective_settings: Any
    optimizer: OptimizerSettings
    data: DataSettings
    stopping: StoppingSettings
    serving: ServingSettings
    allowed_packages: tuple[str, ...]
    model: ModelFolder | None  # what a fresh head starts from, where its config requires a model

    def network(self) -> DraftHead:
        """A head of this config, its parameters NaN."""
        return resolve(self.config.network, self.allowed_packages)(self.config)

    def identity(self, shards: ShardSet) -> dict[str, Any]:
        """What must not change when a run is resumed, JSON-ready."""
        data = asdict(self.data)
        # rows a forward is a matter of the machine, not of the run
        del data["micro_batch_size"]
        parts = {
            "head": self.config.to_dict(),
            "objective": asdict(self.objective_settings),
            "optimizer": asdict(self.optimizer),
            "data": data,
            "target": {"fingerprint": shards.manifest.target.fingerprint},
        }
        return json.loads(json.dumps(parts))


def assemble(
    recipe: Recipe, shards: ShardSet, allowed_packages: Collection[str] = (), model: str | Path | None = None
) -> Assembly:
    """Validates every section against its owner; raises a ValueError naming the key, the file or the class.

    `model` is what a head starts from whose config requires one.
    """
    allowed = (*allowed_packages, *own_packages(recipe))
    start = None if model is None else ModelFolder(model)
    config = head_config(recipe, target_facts(shards), allowed, start)
    _check_start(recipe, config, start, shards)
    config = _with_mask_token(config, shards)
    objective_class = resolve(config.objective, allowed)
    settings_class = typing.get_type_hints(objective_class.__init__)["settings"]
    objective_settings = build(settings_class, recipe.section("objective"), "objective")
    assembly = Assembly(
        recipe=recipe,
        config=config,
        objective=objective_class(config, objective_settings),
        objective_settings=objective_settings,
        optimizer=build(OptimizerSettings, recipe.section("optimizer"), "optimizer"),
        data=build(DataSettings, recipe.section("data"), "data"),
        stopping=build(StoppingSettings, recipe.section("stopping"), "stopping"),
        serving=build(ServingSettings, recipe.section("serving"), "serving"),
        allowed_packages=allowed,
        model=start,
    )
    wanted = set(config.layer_ids) | ({config.target.num_layers} if config.requires_final_state else set())
    shards.layer_columns(sorted(wanted))
    return assembly


def target_facts(shards: ShardSet) -> TargetFacts:
    """The target's shape from its stored config; raises ShardError where the manifest disagrees with it."""
    from transformers import AutoConfig

    folder = shards.target_folder
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ShardError(
            f"expected the target's config in {folder}, found: {' '.join(str(error).split())[:160]}; extract again"
        ) from error
    facts = TargetFacts.from_config(config)
    for field in ("hidden_size", "num_layers", "vocab_size"):
        listed, found = getattr(shards.manifest, field), getattr(facts, field)
        if listed != found:
            raise ShardError(
                f"{shards.folders[0] / 'manifest.json'}: {field} must be {found} by {folder / 'config.json'}, found "
                f"{listed}; the shards are of another target, extract again"
            )
    return facts


def new_head(assembly: Assembly, shards: ShardSet) -> DraftHead:
    """A head initialised from the recipe's seed, with its draft vocabulary."""
    head = assembly.network()
    vocabulary = draft_vocabulary(assembly.config, shards)
    if vocabulary is not None:
        head.set_draft_vocab(vocabulary.token_ids)
    head.initialise(shards.target_tensors(), torch.Generator().manual_seed(assembly.data.seed))
    if assembly.model is not None:
        head.start_from(assembly.model)
    head.assert_filled()
    return head


def continued_head(assembly: Assembly, folder: Path) -> DraftHead:
    """The head of a folder, to go on from: its weights, and its draft vocabulary, which is never chosen anew.

    Raises HeadError where the recipe asks for another head than was written.
    """
    head = load_head(folder, dtype=torch.float32, allowed_packages=assembly.allowed_packages).head
    written, asked = (json.loads(json.dumps(config.to_dict())) for config in (head.config, assembly.config))
    difference = first_difference({"head": written}, {"head": asked})
    if type(head.config) is not type(assembly.config) or difference is not None:
        key, before, after = difference or ("head.config", type(head.config).__name__, type(assembly.config).__name__)
        raise HeadError(
            f"{folder} holds a head with {key} = {before}, this recipe says {after}; go on with the recipe it was "
            f"trained with, or leave --start-from out"
        )
    return head


def draft_vocabulary(config: HeadConfig, shards: ShardSet) -> DraftVocabulary | None:
    """The vocabulary counted in the shards; None where the head drafts over all of the target's."""
    if config.draft_vocab_size == config.vocab_size:
        return None
    counts = shards.token_counts()
    forced = forced_token_ids(_tokenizer(shards.target_folder), _end_ids(shards.target_folder), counts)
    return select_draft_vocabulary(counts, config.draft_vocab_size, forced)


def _with_mask_token(config: HeadConfig, shards: ShardSet) -> HeadConfig:
    """The config with an unused id where it wants a mask token and the recipe names none."""
    if getattr(config, "mask_token_id", 0) is not None:
        return config
    folder = shards.target_folder
    spare = spare_token_id(_tokenizer(folder), _end_ids(folder), shards.token_counts())
    return replace(config, **{"mask_token_id": spare})


def coverage(head: DraftHead, shards: ShardSet) -> float:
    """The share of supervised tokens a head can draft."""
    ids, counts = head.draft_to_target(), shards.token_counts()
    return 1.0 if ids is None else int(counts[ids.cpu()].sum()) / max(1, int(counts.sum()))


def first_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """The dotted key and both values where two identities differ first; None where they are equal."""
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            inner = first_difference(before, after)
            if inner is not None:
                return f"{key}.{inner[0]}", inner[1], inner[2]
        elif before != after:
            return key, before, after
    return None


def own_packages(recipe: Recipe) -> tuple[str, ...]:
    """A recipe is the user's own file, so the package it names for its head may be imported."""
    named = recipe.section("head").get("config")
    return (named.partition(":")[0].split(".")[0],) if isinstance(named, str) else ()


def head_config(
    recipe: Recipe, facts: TargetFacts, allowed: Collection[str], model: ModelFolder | None = None
) -> HeadConfig:
    """The config a recipe's `head` section derives for a target, and for the model the head starts from.

    Classes outside spectrain only from the packages `allowed`.
    """
    settings = dict(recipe.section("head"))
    named = settings.pop("config", None)
    if not isinstance(named, str):
        raise RecipeError(f"head.config must name a config as `module:Class`, found {named!r}")
    config_class = resolve(named, allowed)
    if not (isinstance(config_class, type) and issubclass(config_class, HeadConfig)):
        raise HeadError(f"head.config must name a HeadConfig, {named!r} is none")
    names = [field.name for field in fields(config_class) if field.name not in ("target", "vocab_size")]
    given = {key: value for key, value in settings.items() if value is not None or key not in names}
    checked = check_fields(config_class, given, "head", names)
    if model is None or not (config_class.requires_model or config_class.accepts_model):
        return config_class.derive(facts, checked)
    return config_class.derive_from(facts, checked, model)


def _check_start(recipe: Recipe, config: HeadConfig, model: ModelFolder | None, shards: ShardSet) -> None:
    if config.requires_model and model is None:
        raise HeadError(
            f"recipe {recipe.name} starts from layers of a model, found no --model; give the target, or a smaller "
            f"model of its tokenizer"
        )
    if model is None:
        return
    if not (config.requires_model or config.accepts_model):
        raise HeadError(f"recipe {recipe.name} starts from no model, found --model {model.name}; leave it out")
    check_same_tokens(_tokenizer(shards.target_folder), model.tokenizer(), ("the target of the shards", model.name))


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    if not any(folder.glob("tokenizer*")):
        return None
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _end_ids(folder: Path) -> set[int]:
    """End and begin ids of the stored configs."""
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        values = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        for key in ("eos_token_id", "bos_token_id"):
            value = values.get(key)
            ids |= set(value) if isinstance(value, list) else ({value} if isinstance(value, int) else set())
    return ids
