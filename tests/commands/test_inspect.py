"""What `inspect` tells of the folders `extract` and `fit` write, and that it notices damage."""

import shutil
from pathlib import Path

import pytest

from spectrain.cli import main
from spectrain.tests.loop import extract_and_fit
from spectrain.tests.models import rand_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loop")
    extract_and_fit(rand_llama(), folder)
    return folder


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(["inspect", *arguments])
    captured = capsys.readouterr()
    return int(exit_.value.code or 0), captured.out, captured.err


def test_shards(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, str(folder / "shards"))
    assert code == 0, err
    assert "2, 3, 4, 6 of 6 layers" in out and "40" in out and "checksums of all shards agree" in out


def test_a_head(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, str(folder / "head"))
    assert code == 0, err
    assert "in vLLM     method eagle3\n" in out and "in SGLang   algorithm EAGLE3\n" in out
    assert "64 of 97 tokens can be drafted" in out and "layers.0.self_attn.q_proj.weight  [32, 64]" in out


def test_a_flipped_byte_is_noticed(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:

    copy = tmp_path / "shards"
    shutil.copytree(folder / "shards", copy)
    shard = copy / "shard-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    code, _, err = run(capsys, str(copy))
    assert code == 2 and "shard-00000.safetensors" in err


def test_another_folder_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, str(tmp_path))
    assert code == 2 and "found neither" in err and len(err.strip().splitlines()) == 1
