"""A run killed anywhere and resumed ends with the bytes of the unbroken run."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from spectrain.tests.models import rand_llama
from spectrain.tests.shard_folders import random_documents, write_shards
from spectrain.tests.train.runs import Recorder, arguments, environment, launch, run
from spectrain.train import checkpoint, trainer
from spectrain.train.checkpoint import CheckpointError, CheckpointFolder
from spectrain.train.log import read_metrics
from spectrain.train.run import without_paths
from spectrain.train.settings import SettingsError
from spectrain.train.trainer import TrainingError

STEPS = 6  # of the small recipe on these shards
EVENTS = 30  # fsyncs and renames of its checkpoints, at least


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("resume") / "shards")


@pytest.fixture(scope="module")
def unbroken(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("resume") / "unbroken"
    assert run(shards, out).result.step == STEPS
    return out


def checkpoints(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "run" / "checkpoints").iterdir())


def assert_same_run(out: Path, expected: Path) -> None:
    """Head folder, last masters and moments, kept checkpoints, rates and losses: all equal, bit for bit."""
    last = f"run/checkpoints/step-{STEPS:08d}"
    for name in ("model.safetensors", f"{last}/head.safetensors", f"{last}/optimizer.safetensors"):
        found, wanted = load_file(out / name), load_file(expected / name)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted), name
    assert (out / "config.json").read_text() == (expected / "config.json").read_text()
    assert checkpoints(out) == checkpoints(expected)
    for key in ("step", "lr", "loss", "grad_norm"):
        found, wanted = ([line.get(key) for line in read_metrics(folder / "run")] for folder in (out, expected))
        assert found == wanted, key
    assert json.loads((out / "run/evaluations.json").read_text()) == json.loads(
        (expected / "run/evaluations.json").read_text()
    )


def killed(work: Callable[[], object]) -> None:
    """Runs `work` in a forked child that is expected to die by SIGKILL."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train_and_die_at_event(shards: Path, out: Path, event: int) -> None:
    """Kills itself at the given fsync or rename of the checkpoints, before it takes effect."""
    seen = 0

    def counting(original: Callable[..., None]) -> Callable[..., None]:
        def call(*values: object) -> None:
            nonlocal seen
            seen += 1
            if seen == event:
                die()
            original(*values)

        return call

    os.fsync, os.replace = counting(os.fsync), counting(os.replace)
    run(shards, out)


def train_and_die_at_step(shards: Path, out: Path, step: int) -> None:
    original = trainer.Trainer._step

    def step_or_die(self: trainer.Trainer, *values: object) -> bool:
        if self.state.step == step:
            die()
        return original(self, *values)

    trainer.Trainer._step = step_or_die
    run(shards, out)


def train_and_die_while_writing(shards: Path, out: Path, name: str) -> None:
    """Kills itself with half of the second checkpoint's file `name` on disk."""
    original, seen = checkpoint.save_file, 0

    def half(tensors: object, path: Path, **options: object) -> None:
        nonlocal seen
        original(tensors, path, **options)
        seen += path.name == name
        if path.name == name and seen == 2:
            with open(path, "r+b") as file:
                file.truncate(path.stat().st_size // 2)
            die()

    checkpoint.save_file = half
    run(shards, out)


@pytest.mark.parametrize("step", [0, 3, 5])
def test_killed_between_steps(shards: Path, unbroken: Path, tmp_path: Path, step: int) -> None:
    killed(lambda: train_and_die_at_step(shards, tmp_path / "out", step))
    run(shards, tmp_path / "out", resume=True)
    assert_same_run(tmp_path / "out", unbroken)


@pytest.mark.parametrize("name", ["head.safetensors", "optimizer.safetensors"])
def test_killed_with_half_a_file_written(shards: Path, unbroken: Path, tmp_path: Path, name: str) -> None:
    killed(lambda: train_and_die_while_writing(shards, tmp_path / "out", name))
    assert any(path.startswith(".") for path in checkpoints(tmp_path / "out"))
    run(shards, tmp_path / "out", resume=True)
    assert_same_run(tmp_path / "out", unbroken)


@pytest.mark.parametrize("event", [*random.Random(0).sample(range(1, 25), 2), 26])
def test_killed_inside_writes(shards: Path, unbroken: Path, tmp_path: Path, event: int) -> None:
    killed(lambda: train_and_die_at_event(shards, tmp_path / "out", event))
    run(shards, tmp_path / "out", resume=True)
    assert_same_run(tmp_path / "out", unbroken)


@pytest.mark.slow
@pytest.mark.parametrize("event", range(1, EVENTS))
def test_killed_at_every_write(shards: Path, unbroken: Path, tmp_path: Path, event: int) -> None:
    killed(lambda: train_and_die_at_event(shards, tmp_path / "out", event))
    run(shards, tmp_path / "out", resume=True)
    assert_same_run(tmp_path / "out", unbroken)


@pytest.mark.slow
def test_killed_at_random_moments_through_the_command_line(shards: Path, unbroken: Path, tmp_path: Path) -> None:
    generator = random.Random(1)
    command = [sys.executable, "-m", "spectrain", *arguments(shards, tmp_path / "out"), "--resume"]
    kills = 0
    while kills < 5:
        child = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            child.wait(timeout=generator.uniform(4, 25))
            break
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            kills += 1
    done = launch([*arguments(shards, tmp_path / "out"), "--resume"])
    assert done.returncode == 0, done.stderr
    assert_same_run(tmp_path / "out", unbroken)


def test_resuming_a_finished_run_changes_nothing(shards: Path, unbroken: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(unbroken, out)
    run(shards, out, resume=True)
    assert_same_run(out, unbroken)


def stop_at(shards: Path, out: Path, step: int) -> None:
    killed(lambda: train_and_die_at_step(shards, out, step))


@pytest.mark.parametrize("damage", ["head.safetensors", "optimizer.safetensors", "state.json", "everything"])
def test_an_incomplete_checkpoint_is_named_and_passed_over(
    shards: Path, unbroken: Path, tmp_path: Path, damage: str
) -> None:
    out = tmp_path / "out"
    stop_at(shards, out, 5)
    newest = out / "run/checkpoints/step-00000004"
    if damage == "everything":
        shutil.rmtree(newest)
        newest.mkdir()
    elif damage == "state.json":
        (newest / damage).unlink()
    else:
        (newest / damage).write_bytes((newest / damage).read_bytes()[:-9])
    listener = Recorder()
    run(shards, out, resume=True, listener=listener)
    assert any("step-00000004 is incomplete" in note for note in listener.notes)
    assert any("resuming at optimizer step 3" in note for note in listener.notes)
    assert_same_run(out, unbroken)


def test_shards_may_move_and_the_draft_vocabulary_is_not_counted_again(
    shards: Path, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, moved = tmp_path / "out", tmp_path / "elsewhere"
    stop_at(shards, out, 3)
    shutil.copytree(shards, moved)

    def counted_again(*values: object) -> None:
        raise AssertionError("a resumed head keeps the map it was trained with")

    monkeypatch.setattr("spectrain.train.assembly.select_draft_vocabulary", counted_again)
    run(moved, out, resume=True)
    assert_same_run(out, unbroken)


def test_other_shards_or_another_recipe_are_refused(shards: Path, unbroken: Path, tmp_path: Path) -> None:
    other = write_shards(tmp_path / "other", (12, 13, 14))
    with pytest.raises(CheckpointError, match="other shards"):
        run(other, unbroken, resume=True)
    for change, key in (
        ("optimizer.lr=1e-2", "optimizer.lr = 0.003"),
        ("head.draft_vocab_size=32", "head.draft_vocab_size = 64"),
        ("data.seed=5", "data.seed = 0"),
        ("objective.steps=2", "objective.steps = 3"),
    ):
        with pytest.raises(CheckpointError, match=f"trained with {key}"):
            run(shards, unbroken, change, resume=True)


def test_another_micro_batch_size_continues_the_same_run(shards: Path, unbroken: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    stop_at(shards, out, 3)
    run(shards, out, "data.micro_batch_size=3", resume=True)
    last = f"run/checkpoints/step-{STEPS:08d}/head.safetensors"
    found, wanted = load_file(out / last), load_file(unbroken / last)
    assert all(torch.allclose(found[key].float(), wanted[key].float(), atol=1e-5) for key in wanted)


def test_a_long_run_can_be_made_longer(shards: Path, tmp_path: Path) -> None:
    run(shards, tmp_path / "out", "stopping.max_steps=3")
    listener = Recorder()
    report = run(shards, tmp_path / "out", "stopping.max_steps=5", resume=True, listener=listener)
    assert report.result.step == 5
    assert any("stretched over 5 steps, before over 3" in note for note in listener.notes)


def test_an_occupied_folder_is_kept_unless_told(shards: Path, unbroken: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(unbroken, out)
    with pytest.raises(CheckpointError, match="--resume to continue its run, --overwrite"):
        run(shards, out)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="notes.txt"):
        run(shards, out, overwrite=True)
    (out / "notes.txt").unlink()
    run(shards, out, "stopping.max_steps=1", overwrite=True)
    assert checkpoints(out) == ["step-00000001"]


@pytest.mark.parametrize(
    ("change", "options"),
    [
        ("head.draft_vocab_size=1", {"overwrite": True}),
        ("head.layer_ids=[0,1,2]", {"overwrite": True}),
        ("optimizer.betas=[0.9,1.5]", {"overwrite": True}),
        ("objective.attention=flex", {"overwrite": True}),
        ("stopping.max_steps=1", {"overwrite": True, "resume": True}),
    ],
)
def test_what_is_refused_costs_no_head(
    shards: Path, unbroken: Path, tmp_path: Path, change: str, options: dict[str, bool]
) -> None:
    out = tmp_path / "out"
    shutil.copytree(unbroken, out)
    with pytest.raises(ValueError):
        run(shards, out, change, **options)
    assert (out / "model.safetensors").is_file() and checkpoints(out) == checkpoints(unbroken)


def test_data_without_a_supervised_row_costs_no_head(unbroken: Path, tmp_path: Path) -> None:
    model, out = rand_llama(4), tmp_path / "out"
    documents = random_documents(model, (9, 12), masked=(0, 1))
    masked = write_shards(tmp_path / "masked", model=model, documents=documents)
    shutil.copytree(unbroken, out)
    with pytest.raises(TrainingError, match="expected supervised rows to train on, found none in 3 batches"):
        run(masked, out, "head.draft_vocab_size=null", overwrite=True)
    assert (out / "model.safetensors").is_file() and checkpoints(out) == checkpoints(unbroken)


def test_what_the_optimizer_refuses_costs_no_head(
    shards: Path, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    shutil.copytree(unbroken, out)

    def refuse(*_: object) -> None:
        raise SettingsError("DeepSpeed clips by norm only")

    monkeypatch.setattr("spectrain.train.run.Stepper", refuse)
    with pytest.raises(SettingsError):
        run(shards, out, overwrite=True)
    assert (out / "model.safetensors").is_file() and checkpoints(out) == checkpoints(unbroken)


def test_a_published_head_tells_nothing_of_its_machine() -> None:
    given = ["fit", "--out=/data/head", "--shards", "/data/a", "--set", "a.b=~/x", "--set", "optimizer.lr=1e-3"]
    told = ["fit", "--out=head", "--shards", "a", "--set", "a.b=x", "--set", "optimizer.lr=1e-3"]
    assert without_paths(given) == told


def test_the_best_value_survives_a_resume(shards: Path, unbroken: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    stop_at(shards, out, 5)
    path = out / "run/evaluations.json"
    stored = json.loads(path.read_text())
    stored["evaluations"][0]["acceptance_length"] = 99.0
    path.write_text(json.dumps(stored))
    report = run(shards, out, resume=True)
    assert report.exported_step == 3
    best = load_file(out / "run/checkpoints/step-00000003/head.safetensors")
    exported = load_file(out / "model.safetensors")
    assert all(torch.equal(exported[key], best[key].to(exported[key].dtype)) for key in best)


def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2, 3, 4):
        folder.path(step).mkdir()
    assert folder.newest() is None
    state = {
        "step": 0, "position": 0, "skipped": 0, "total_steps": 9, "data_hash": "", "identity": {}, "world": 1,
        "format_version": 1, "files": {},
    }  # fmt: skip
    for step in (1, 2, 3, 4):
        (folder.path(step) / "state.json").write_text(json.dumps({**state, "step": step}))
    folder.prune(keep_last=2, keep=1)
    assert checkpoints_of(tmp_path) == ["step-00000001", "step-00000003", "step-00000004"]
    assert folder.newest().state.step == 4


def checkpoints_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
