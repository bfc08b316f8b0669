"""What `bench heads` was asked for: the heads, the runs of each, and what is the same for all of them.

Every head is trained on the same rows in the same order up to the same number of tokens, so the settings that decide
about them are the benchmark's own and no recipe's.
"""

import dataclasses
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ....heads.resolve import resolve
from ....recipes.loader import Recipe, load_recipe, recipe_names
from ....train.assembly import own_packages
from ..record import BenchError, numbers

SMALL_MODEL = "draft_model"
"""The recipe that makes a small language model of the target; others that need one start from its head."""

COMMON = {
    "data.sequence_length": "--sequence-length",
    "data.seed": "--seed and --seeds",
    "data.validation_share": "the benchmark",
    "data.max_validation_documents": "the benchmark",
    "stopping.epochs": "--token-budget",
    "stopping.max_steps": "--token-budget",
    "stopping.patience": "--token-budget",
}
"""Keys that no recipe and no --set decides here, since they make heads comparable, and the option that does."""

EVALUATIONS = 4
"""Times a run looks at the held-out documents; it is saved as often."""


class Run(NamedTuple):
    """One training of one head; its folder and its files are called `name`."""

    head: "Head"
    seed: int

    @property
    def name(self) -> str:
        return f"{self.head.label}-{self.seed}"


@dataclass(frozen=True, kw_only=True)
class Head:
    """A row of the table: a recipe, perhaps with overrides, under a label."""

    label: str
    recipe: str
    overrides: tuple[str, ...]
    seeds: tuple[int, ...]
    measured: bool  # False: trained only because another one starts from it
    needs_model: bool
    drafts_in_one_pass: bool

    @property
    def is_small_model(self) -> bool:
        return self.recipe == SMALL_MODEL

    def resolved(self, plan: "Plan", seed: int, *more: str) -> Recipe:
        """The recipe with the benchmark's own settings, then the user's, then `more`."""
        common = (
            f"data.sequence_length={plan.sequence_length}",
            f"data.batch_size={plan.rows_a_step}",
            "data.validation_share=0.02",
            "data.max_validation_documents=512",
            f"data.seed={seed}",
            "stopping.patience=null",
            "stopping.keep_last=1",
        )
        recipe = load_recipe(self.recipe, [*common, *self.overrides, *more])
        return dataclasses.replace(recipe, name=self.label)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that was asked for."""

    model: str
    shards: tuple[Path, ...]
    prompts: dict[str, Path]
    work: Path
    heads: tuple[Head, ...]
    only: tuple[str, ...] | None  # labels this call works on; None: all
    token_budget: int
    sequence_length: int
    rows_a_step: int
    num_draft_tokens: tuple[int, ...]
    more_draft_tokens: tuple[int, ...]  # of heads that draft all tokens in one pass
    batch_sizes: tuple[int, ...]
    temperatures: tuple[float, ...]
    num_prompts: int
    max_new_tokens: int
    max_length: int | None = None
    seed: int = 0
    eager: bool = False
    device: str = "auto"
    dtype: str = "auto"
    packages: tuple[str, ...] = ()
    time_limit: float | None = None  # seconds

    def draft_tokens(self, head: Head, seed: int | None = None) -> tuple[int, ...]:
        """The numbers of draft tokens a head is measured at; `more_draft_tokens` with its first seed alone."""
        has_more = head.drafts_in_one_pass and seed in (None, head.seeds[0])
        more = self.more_draft_tokens if has_more else ()
        return tuple(dict.fromkeys((*self.num_draft_tokens, *more)))

    def runs(self) -> list[Run]:
        """All trainings, first seeds first; those of this call only."""
        rounds = max(len(head.seeds) for head in self.heads)
        everything = [Run(head, head.seeds[i]) for i in range(rounds) for head in self.heads if i < len(head.seeds)]
        return [run for run in everything if self.only is None or run.head.label in self.only]

    def starts_from(self, run: Run) -> Run | None:
        """The run whose head this one starts from, where it starts from a small model."""
        if not run.head.needs_model or run.head.is_small_model:
            return None
        small = next(head for head in self.heads if head.is_small_model)
        return Run(small, run.seed)


def parse_heads(
    names: str | None,
    overrides: Sequence[str],
    seeds: tuple[int, ...],
    seeded: Sequence[str],
    most_draft_tokens: int,
    packages: Sequence[str],
) -> tuple[Head, ...]:
    """The heads of `a,b,label=recipe`; None takes every recipe that stands for a head of its own.

    Raises a ValueError of one line for a name, a label or an override that does not fit.
    """
    pairs = [_pair(text) for text in names.split(",")] if names is not None else [(n, n) for n in head_recipes()]
    labels = [label for label, _ in pairs]
    doubled = next((label for label in labels if labels.count(label) > 1), None)
    if doubled is not None:
        raise BenchError(f"every head needs a label of its own, found {doubled} twice; write label=recipe")
    settings = [_setting(text) for text in overrides]
    check_labels("--seeded", seeded, labels)
    heads = []
    for label, recipe in pairs:
        head = _head(label, recipe, _of(label, settings), seeds if label in seeded else seeds[:1], packages)
        heads.append(_long_enough(head, most_draft_tokens))
    if any(head.needs_model and not head.is_small_model for head in heads):
        heads = _with_small_model(heads, _of(SMALL_MODEL, settings), packages)
    named = [setting.label for setting in settings if setting.label is not None]
    check_labels("--set", named, [head.label for head in heads])
    return tuple(heads)


def head_recipes() -> list[str]:
    """The recipes that stand for a head each; the others are settings of one of these."""
    return [name for name in recipe_names() if load_recipe(name).origins.get("head.config") == f"{name}.yaml"]


def check_labels(option: str, given: Sequence[str], labels: Sequence[str]) -> None:
    """Raises BenchError where an option names a head that is not in the table."""
    for label in given:
        if label not in labels:
            near = difflib.get_close_matches(label, labels, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise BenchError(f"{option} {label}: {hint}expected some of {', '.join(labels)}")


def parse_prompts(given: Sequence[str]) -> dict[str, Path]:
    """Prompt files by set name, from `name=path`, paths, or a folder of JSONL files; raises BenchError."""
    from ...prompt_sets import set_names

    found: dict[str, Path] = {}
    for text in given:
        name, equals, path = text.partition("=")
        if equals and not Path(text).exists():
            pairs = {name: Path(path)}
        elif Path(text).is_dir():
            files = sorted(p for p in Path(text).iterdir() if p.name.endswith((".jsonl", ".jsonl.gz")))
            if not files:
                raise BenchError(f"expected prompt files (*.jsonl, *.jsonl.gz) in {text}, found none")
            pairs = dict(zip(set_names(files), files, strict=True))
        else:
            pairs = {Path(text).name.split(".")[0]: Path(text)}
        for name, file in pairs.items():
            if not file.is_file():
                raise BenchError(f"prompt set {name}: expected a JSONL file at {file}, found none; give name=path")
            if name in found:
                raise BenchError(f"prompt set {name} is given twice; name them apart as name=path")
            if not name or set(name) & set("/ "):
                raise BenchError(
                    f"a prompt set needs a name without blanks and slashes, found {name!r}; give name=path"
                )
            found[name] = file
    return found


def parse_temperatures(text: str) -> tuple[float, ...]:
    """The temperatures of `0,1`; raises BenchError."""
    try:
        values = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        values = (-1.0,)
    if not all(0 <= value < float("inf") for value in values):
        raise BenchError(f"--temperatures takes numbers of at least 0 between commas, found {text!r}")
    return values


def parse_counts(text: str, option: str) -> tuple[int, ...]:
    """Ascending whole numbers of at least 1, each once; raises BenchError for anything else."""
    return tuple(sorted(set(numbers(text, option))))


def names(text: str) -> tuple[str, ...]:
    """The names of `a,b`; empty text gives none."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _pair(text: str) -> tuple[str, str]:
    label, equals, recipe = text.strip().partition("=")
    recipe = recipe if equals else label
    label = label if equals else Path(recipe).stem
    if not label or not label.replace("_", "").replace("-", "").replace(".", "").isalnum():
        raise BenchError(f"--recipes takes recipe or label=recipe between commas, found {text!r}")
    return label, recipe


class _Setting(NamedTuple):
    """One --set: `label:section.key=value` for one head, `section.key=value` for all."""

    label: str | None
    override: str


def _setting(text: str) -> _Setting:
    before, equals, value = text.partition("=")
    label, colon, key = before.rpartition(":")
    key = key.strip()
    if key in COMMON:
        raise BenchError(f"--set {text}: {key} is the same for every head and set by {COMMON[key]}; leave it out")
    return _Setting(label if colon else None, f"{key}{equals}{value}")


def _of(label: str, settings: Sequence[_Setting]) -> tuple[str, ...]:
    return tuple(setting.override for setting in settings if setting.label in (None, label))


def _head(label: str, recipe: str, overrides: tuple[str, ...], seeds: tuple[int, ...], packages: Sequence[str]) -> Head:
    loaded = load_recipe(recipe, overrides)
    named: Any = loaded.section("head").get("config")
    if not isinstance(named, str):
        raise BenchError(f"recipe {recipe} names no head: head.config must be `module:Class`, found {named!r}")
    config = resolve(named, (*packages, *own_packages(loaded)))
    fields = {field.name for field in dataclasses.fields(config)}
    return Head(
        label=label,
        recipe=recipe,
        overrides=overrides,
        seeds=seeds,
        measured=True,
        needs_model=config.requires_model,
        # what stands for tokens nobody knows yet is what lets a head draft beyond the next one at once
        drafts_in_one_pass="mask_token_id" in fields,
    )


def _long_enough(head: Head, num_draft_tokens: int) -> Head:
    """The head with a module for every draft it is asked for, where it has one for each."""
    recipe = load_recipe(head.recipe, head.overrides)
    own = recipe.section("head").get("num_heads")
    if not isinstance(own, int) or own >= num_draft_tokens:
        return head
    if recipe.origins["head.num_heads"] == "--set":
        raise BenchError(
            f"{head.label} must draft {num_draft_tokens} tokens, one a head, found head.num_heads={own}; raise it"
        )
    return dataclasses.replace(head, overrides=(f"head.num_heads={num_draft_tokens}", *head.overrides))


def _with_small_model(heads: list[Head], overrides: tuple[str, ...], packages: Sequence[str]) -> list[Head]:
    """The heads with the small model that some of them start from, trained for all their seeds."""
    seeds = max((head.seeds for head in heads if head.needs_model), key=len)
    there = next((head for head in heads if head.is_small_model), None)
    if there is not None:
        return [dataclasses.replace(head, seeds=seeds) if head is there else head for head in heads]
    if any(head.label == SMALL_MODEL for head in heads):
        raise BenchError(
            f"{SMALL_MODEL} is the label of the small model that others start from, found it on another recipe; "
            f"choose another label"
        )
    small = _head(SMALL_MODEL, SMALL_MODEL, overrides, seeds, packages)
    return [*heads, dataclasses.replace(small, measured=False)]
