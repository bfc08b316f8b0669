"""Recipes: merging, origins, and keys nobody reads."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from spectrain.recipes.loader import RecipeError, build, check_fields, load_recipe, parse_yaml, recipe_names


@dataclass(frozen=True, kw_only=True)
class Settings:
    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    steps: int | None = None
    kind: Literal["a", "b"] = "a"

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError("lr must be above 0")


def test_a_later_layer_wins_and_every_value_knows_its_origin(tmp_path: Path) -> None:
    base, child = tmp_path / "base.yaml", tmp_path / "child.yaml"
    base.write_text("optimizer:\n  lr: 1e-4\n  eps: 1e-8\ndata:\n  seed: 3\n")
    child.write_text("extends: base.yaml\noptimizer:\n  lr: 2e-4\n")
    recipe = load_recipe(str(child), ["data.seed=5"])
    assert recipe.sections == {"optimizer": {"lr": 2e-4, "eps": 1e-8}, "data": {"seed": 5}}
    assert recipe.origins == {"optimizer.lr": "child.yaml", "optimizer.eps": "base.yaml", "data.seed": "--set"}


def test_shown_yaml_loads_to_the_same_values(tmp_path: Path) -> None:
    recipe = load_recipe("smollm2_quickstart", ["optimizer.lr=3e-4", "head.layer_ids=[1,2,3]", "stopping.patience=2"])
    path = tmp_path / "again.yaml"
    path.write_text(recipe.to_yaml())
    assert load_recipe(str(path)).sections == recipe.sections
    assert "  # --set" in recipe.to_yaml() and "# eagle3.yaml" in recipe.to_yaml()


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.5e+2", ".5e3", "-2e-1"])
def test_scientific_notation_without_a_dot_is_a_number(text: str) -> None:
    assert parse_yaml(text, "test") == float(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [("a=b", "a=b"), ("null", None), ("[1, 2]", [1, 2]), ("true", True), ("07e", "07e"), ("1e", "1e")],
)
def test_overrides_are_typed_as_yaml(text: str, value: object) -> None:
    assert load_recipe("eagle3", [f"data.x={text}"]).section("data")["x"] == value


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lr=1", "section.key=value"),
        ("optimizer.lr", "section.key=value"),
        ("optimiser.lr=1", "did you mean optimizer"),
        ("optimizer.lr=[1", "not valid YAML"),
    ],
)
def test_malformed_overrides_say_what_is_expected(override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe("eagle3", [override])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optimiser:\n  lr: 1\n", "did you mean optimizer"),
        ("optimizer: 3\n", "optimizer must hold"),
        ("- a\n", "must hold sections"),
        ("optimizer: {lr: 1, lr: 2}\n", "'lr' is given twice"),
        ("a: [\n", "not valid YAML"),
        ("extends: bad.yaml\n", "extends itself"),
        ("extends: nowhere\n", "no recipe 'nowhere'"),
    ],
)
def test_bad_files_are_named_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=message) as error:
        load_recipe(str(path))
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_bytes(b"head:\n  config: \xff\n")
    with pytest.raises(RecipeError, match="UTF-8"):
        load_recipe(str(tmp_path / "bad.yaml"))


def test_an_unknown_recipe_suggests_the_nearest() -> None:
    with pytest.raises(RecipeError, match="did you mean eagle3"):
        load_recipe("eagle33")


def test_build_converts_and_refuses() -> None:
    assert build(Settings, {"lr": 1, "betas": [0.8, 0.9], "steps": None}, "s") == Settings(lr=1.0, betas=(0.8, 0.9))
    with pytest.raises(RecipeError, match=r"unknown key s.beta; did you mean s.betas\?"):
        build(Settings, {"lr": 1, "beta": 2}, "s")
    with pytest.raises(RecipeError, match="must set s.lr"):
        build(Settings, {}, "s")
    for values in ({"lr": "fast"}, {"lr": 1, "betas": [1]}, {"lr": 1, "kind": "c"}, {"lr": 1, "steps": 1.5}):
        with pytest.raises(RecipeError, match=r"s\.(lr|betas|kind|steps) has a wrong value"):
            build(Settings, values, "s")
    with pytest.raises(ValueError, match="above 0"):
        build(Settings, {"lr": -1}, "s")


@pytest.mark.parametrize("values", [{"lr": True}, {"lr": 1, "steps": True}, {"lr": math.inf}, {"lr": math.nan}])
def test_truth_values_and_infinities_are_no_numbers(values: dict[str, object]) -> None:
    with pytest.raises(RecipeError, match=r"s\.(lr|steps) has a wrong value"):
        build(Settings, values, "s")


def test_check_fields_takes_only_allowed_names() -> None:
    assert check_fields(Settings, {"steps": 2}, "s", ["steps"]) == {"steps": 2}
    with pytest.raises(RecipeError, match="unknown key s.lr"):
        check_fields(Settings, {"lr": 2.0}, "s", ["steps"])


@pytest.mark.parametrize("name", recipe_names())
def test_shipped_recipes_load_into_the_settings_that_read_them(name: str) -> None:
    import typing
    from dataclasses import fields

    from spectrain.heads.resolve import resolve
    from spectrain.train.settings import DataSettings, OptimizerSettings, ServingSettings, StoppingSettings

    recipe = load_recipe(name)
    config = resolve(recipe.section("head")["config"])
    objective = resolve(config.objective)
    classes = {
        "objective": typing.get_type_hints(objective.__init__)["settings"],
        "optimizer": OptimizerSettings,
        "data": DataSettings,
        "stopping": StoppingSettings,
        "serving": ServingSettings,
    }
    for section, cls in classes.items():
        build(cls, recipe.section(section), section)
    assert recipe.section("head").keys() - {"config"} <= {field.name for field in fields(config)}
