"""Several processes, and launchers that silently start fewer."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from spectrain.tests.shard_folders import write_shards
from spectrain.tests.train.runs import arguments, launch, run
from spectrain.train import launch as launch_module
from spectrain.train.launch import LaunchError, describe, run_on_main, start

LAST = "run/checkpoints/step-00000006/head.safetensors"


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # documents 4 and 7 have no supervised token, so that a process can be left without any
    return write_shards(tmp_path_factory.mktemp("launch") / "shards", masked=(4, 7))


def largest_difference(first: Path, second: Path) -> float:
    a, b = load_file(first), load_file(second)
    assert a.keys() == b.keys()
    return max(float((a[name].float() - b[name].float()).abs().max()) for name in a)


@pytest.mark.slow
def test_two_processes_train_as_one_and_one_continues_what_two_began(shards: Path, tmp_path: Path) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    run(shards, alone)
    done = launch([*arguments(shards, together)], processes=2)
    assert done.returncode == 0, done.stderr
    assert "2 processes, MULTI_CPU, backend gloo" in done.stderr
    assert done.stdout.count("head of step") == 1
    assert largest_difference(alone / LAST, together / LAST) < 1e-6
    # back to the checkpoint of two processes, forward on one
    for name in ("model.safetensors", "spectrain.json", "config.json"):
        (together / name).unlink()
    for path in (together / LAST).parent.iterdir():
        path.unlink()
    report = run(shards, together, resume=True)
    assert report.result.step == 6
    assert largest_difference(alone / LAST, together / LAST) < 1e-6


@pytest.mark.slow
def test_zero2_trains_and_resumes_like_one_process(shards: Path, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    import shutil
    import subprocess

    from spectrain.tests.train.runs import environment

    alone, sharded = tmp_path / "alone", tmp_path / "sharded"
    run(shards, alone)
    config = Path(launch_module.__file__).parent.parent / "recipes/accelerate/zero2.yaml"
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config), "--num_processes", "2",
        "-m", "spectrain", *arguments(shards, sharded),
    ]  # fmt: skip
    env = {name: value for name, value in environment().items() if name != "ACCELERATE_USE_CPU"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=env)
    assert done.returncode == 0, done.stderr
    assert "2 processes, DEEPSPEED, backend gloo" in done.stderr
    assert largest_difference(alone / LAST, sharded / LAST) < 1e-5
    whole = load_file(sharded / LAST)
    shutil.rmtree((sharded / LAST).parent)
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=500, env=env)
    assert done.returncode == 0, done.stderr
    resumed = load_file(sharded / LAST)
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


def test_fewer_processes_than_announced_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = start("cpu")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LaunchError, match="announced 2 processes .* but 1 run together"):
        launch_module._check(accelerator, on_cpu=True)


@pytest.mark.parametrize("name", ["DEEPSPEED", "FSDP"])
def test_a_plugin_that_was_dropped_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    accelerator = start("cpu")
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "true")
    with pytest.raises(LaunchError, match=f"asked for {name} but NO runs"):
        launch_module._check(accelerator, on_cpu=True)


def test_the_launcher_that_runs_alone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    assert describe(start("cpu")) == "1 process, device cpu"
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert "`accelerate launch --cpu` starts one process" in describe(start("cpu"))


def test_devices_that_are_not_there_are_refused() -> None:
    with pytest.raises(LaunchError, match="auto, cpu or cuda"):
        start("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(LaunchError, match="found none"):
            start("cuda")


def test_work_of_the_main_process_returns_or_raises_here() -> None:
    accelerator = start("cpu")
    assert run_on_main(accelerator, lambda: 3) == 3

    def fail() -> None:
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        run_on_main(accelerator, fail)
