"""`spectrain fit` as its user meets it: options, one-line errors, exit codes."""

from pathlib import Path

import pytest

from spectrain.cli import main
from spectrain.commands.fit import fit
from spectrain.recipes.loader import load_recipe
from spectrain.tests.shard_folders import write_shards
from spectrain.tests.train.runs import arguments


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("fit") / "shards")


def invoke(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    captured = capsys.readouterr()
    return int(exit_.value.code or 0), captured.out, captured.err


def test_show_prints_the_resolved_recipe_with_origins(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fit(recipe="eagle3", show=True, overrides=["optimizer.lr=2e-4"])
    shown = capsys.readouterr().out
    (tmp_path / "shown.yaml").write_text(shown)
    assert load_recipe(str(tmp_path / "shown.yaml")).section("optimizer")["lr"] == 2e-4
    assert any("lr: 0.0002" in line and line.endswith("# --set") for line in shown.splitlines())
    assert any("steps: 7" in line and line.endswith("# eagle3.yaml") for line in shown.splitlines())


def test_a_training_prints_its_predicted_acceptance_length(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = invoke([*arguments(shards, tmp_path / "out"), "--set", "stopping.max_steps=3"], capsys)
    assert code == 0, err
    assert "predicted acceptance length" in out and "head of step 3 of 3" in out
    assert "draft vocabulary covers" in out and "held out" in err
    assert "elsewhere: vLLM, method eagle3; SGLang, algorithm EAGLE3\n" in out
    command = (tmp_path / "out/spectrain.json").read_text()
    assert str(tmp_path) not in command


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--set", "optimizer.learning_rate=1"], "unknown key optimizer.learning_rate; did you mean"),
        (["--set", "nonsense"], "--set takes section.key=value"),
        (["--set", "head.layer_ids=[1,2,7]"], "layer ids must lie between 0"),
        (["--set", "data.sequence_length=two"], "data.sequence_length has a wrong value"),
        (["--set", "data.sequence_length=2"], "data.sequence_length must be at least 4"),
        (["--set", "head.config=mypackage.heads:Config"], "cannot be imported"),
        (["--device", "tpu"], "--device must be auto, cpu or cuda"),
        (["--dtype", "float16"], "--dtype must be"),
        (["--shards", "/nowhere"], "no such folder"),
        (["--recipe", "eagle33"], "did you mean eagle3"),
    ],
)
def test_bad_input_is_one_line_and_code_two(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: list[str], message: str
) -> None:
    code, _, err = invoke([*arguments(shards, tmp_path / "out"), *extra], capsys)
    assert code == 2 and message in err
    assert len([line for line in err.splitlines() if line.startswith("spectrain: error:")]) == 1
    assert "Traceback" not in err and not (tmp_path / "out").exists()


def test_missing_options_are_named(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = invoke(["fit", "--out", "x"], capsys)
    assert code == 2 and "pass --shards DIR" in err
    code, _, err = invoke(["fit", "--shards", str(shards)], capsys)
    assert code == 2 and "pass --out DIR" in err


def test_a_truncated_shard_stops_before_any_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_shards(tmp_path / "shards", (9, 12, 14), per_shard=2)
    path = folder / "shard-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    code, _, err = invoke(arguments(folder, tmp_path / "out"), capsys)
    assert code == 2 and "shard-00001.safetensors" in err and not (tmp_path / "out").exists()
