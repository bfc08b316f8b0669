"""Recipes: YAML files of a page, overrides on top, and where each value came from.

The loader knows sections, not their keys: each part validates its own section with `build` against its own frozen
dataclass. Nothing of ours is imported here.
"""

import dataclasses
import difflib
import math
import re
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

SECTIONS = ("head", "objective", "optimizer", "data", "stopping", "serving")
_FOLDER = Path(__file__).parent
_FLOAT = re.compile(r"^[-+]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)[eE][-+]?\d+$")

Settings = TypeVar("Settings")


class RecipeError(ValueError):
    """A recipe or an override is not what was expected; the message names the key and the nearest valid one."""


@dataclass(frozen=True)
class Recipe:
    """Sections of plain values, and the origin of each under its dotted key."""

    name: str
    sections: dict[str, dict[str, Any]]
    origins: dict[str, str]

    def section(self, name: str) -> Mapping[str, Any]:
        """The values of one section, empty where the recipe has none."""
        return self.sections.get(name, {})

    def to_dict(self) -> dict[str, Any]:
        """Name and values, JSON-ready."""
        return {"name": self.name, **self.sections}

    def to_yaml(self) -> str:
        """The resolved recipe as YAML that loads again, each value followed by its origin in a comment."""
        lines = [f"# recipe {self.name}"]
        for section in SECTIONS:
            values = self.section(section)
            if values:
                lines += ["", f"{section}:"]
                entries = [
                    (f"  {key}: {_flow(value)}", self.origins[f"{section}.{key}"]) for key, value in values.items()
                ]
                width = max(len(text) for text, _ in entries)
                lines += [f"{text:<{width}}  # {origin}" for text, origin in entries]
        return "\n".join(lines) + "\n"


def recipe_names() -> list[str]:
    """Names of the recipes that ship with spectrain."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe by name or path, its `extends` chain below it and `section.key=value` overrides above it.

    Raises RecipeError for a missing file, malformed YAML, an unknown section or a malformed override.
    """
    sections: dict[str, dict[str, Any]] = {}
    origins: dict[str, str] = {}
    for path, loaded in reversed(_chain(name_or_path)):
        for section, values in loaded.items():
            for key, value in values.items():
                sections.setdefault(section, {})[key] = value
                origins[f"{section}.{key}"] = path.name
    for override in overrides:
        section, key, value = _parse_override(override)
        sections.setdefault(section, {})[key] = value
        origins[f"{section}.{key}"] = "--set"
    return Recipe(_find(name_or_path).stem, sections, origins)


def build(cls: type[Settings], values: Mapping[str, Any], section: str) -> Settings:
    """A frozen dataclass from one section; raises RecipeError for unknown, missing and ill-typed keys."""
    fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    checked = check_fields(cls, values, section, [field.name for field in fields])
    required = [f.name for f in fields if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING]
    missing = [f"{section}.{name}" for name in required if name not in checked]
    if missing:
        raise RecipeError(f"the recipe must set {', '.join(missing)}; add it or pass --set {missing[0]}=VALUE")
    return cls(**checked)


def check_fields(cls: type, values: Mapping[str, Any], section: str, allowed: Collection[str]) -> dict[str, Any]:
    """`values` converted to the annotated types of `cls`; only `allowed` names may occur. Raises RecipeError."""
    from pydantic import TypeAdapter, ValidationError

    hints = typing.get_type_hints(cls)
    checked: dict[str, Any] = {}
    for key, value in values.items():
        if key not in allowed:
            raise RecipeError(unknown_key(f"{section}.{key}", [f"{section}.{name}" for name in allowed]))
        try:
            # only an exact match makes a truth value: `true` is no number
            checked[key] = TypeAdapter(hints[key]).validate_python(value, strict=isinstance(value, bool) or None)
        except ValidationError as error:
            detail = error.errors()[0]["msg"].lower()
            raise RecipeError(f"{section}.{key} has a wrong value, found {value!r}: {detail}") from error
        if isinstance(checked[key], float) and not math.isfinite(checked[key]):
            raise RecipeError(f"{section}.{key} has a wrong value, found {value!r}: input should be a finite number")
    return checked


def unknown_key(key: str, valid: Iterable[str]) -> str:
    """The message for a key nobody reads, with the nearest valid one."""
    names = sorted(valid)
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.0)
    suggestion = f"did you mean {near[0]}?" if near else "no key is valid here"
    return f"unknown key {key}; {suggestion} Valid: {', '.join(names)}"


def parse_yaml(text: str, source: str) -> Any:
    """YAML to plain values; `1e-4` is a number and a key given twice is refused. Raises RecipeError naming `source`."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            doubled = next((key for key in keys if keys.count(key) > 1), None)
            if doubled is not None:
                raise yaml.YAMLError(f"key {doubled!r} is given twice")
            return super().construct_mapping(node, deep)

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise RecipeError(f"{source} is not valid YAML: {' '.join(str(error).split())}") from error


def _chain(name_or_path: str) -> list[tuple[Path, dict[str, dict[str, Any]]]]:
    """The recipe and those it extends, nearest first."""
    chain: list[tuple[Path, dict[str, dict[str, Any]]]] = []
    following: str | None = name_or_path
    while following is not None:
        path = _find(following, chain[-1][0].parent if chain else None)
        if any(path == seen for seen, _ in chain):
            raise RecipeError(f"{path} extends itself; remove the `extends` line that closes the circle")
        loaded = _read(path)
        following = loaded.pop("extends", None)
        chain.append((path, loaded))
    return chain


def _find(name_or_path: str, beside: Path | None = None) -> Path:
    given = Path(name_or_path)
    candidates = [_FOLDER / f"{name_or_path}.yaml", given]
    if beside is not None:
        candidates.append(beside / given)
    for path in candidates:
        if path.is_file():
            return path.resolve()
    names = recipe_names()
    near = difflib.get_close_matches(name_or_path, names, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise RecipeError(
        f"no recipe {name_or_path!r}: {hint}expected one of {', '.join(names)} or the path of a YAML file"
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} must be UTF-8 text, found {error.reason} at byte {error.start}") from error
    loaded = parse_yaml(text, str(path)) or {}
    if not isinstance(loaded, dict):
        raise RecipeError(f"{path} must hold sections ({', '.join(SECTIONS)}), found {type(loaded).__name__}")
    for section, values in loaded.items():
        if section == "extends":
            continue
        if section not in SECTIONS:
            raise RecipeError(f"{path}: {unknown_key(str(section), SECTIONS)}")
        if not isinstance(values, dict):
            raise RecipeError(f"{path}: section {section} must hold keys and values, found {values!r}")
    return loaded


def _parse_override(override: str) -> tuple[str, str, Any]:
    dotted, equals, text = override.partition("=")
    section, dot, key = dotted.strip().partition(".")
    if not equals or not dot or not key:
        raise RecipeError(f"--set takes section.key=value, such as optimizer.lr=2e-4, found {override!r}")
    if section not in SECTIONS:
        raise RecipeError(f"--set {override}: {unknown_key(section, SECTIONS)}")
    return section, key, parse_yaml(text, f"--set {override}")


def _flow(value: Any) -> str:
    import yaml

    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")
