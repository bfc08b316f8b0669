"""The command from its options to the folder: layers, counts, on-policy text, bad input."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spectrain.cli import main
from spectrain.extract.shards import ShardSet
from spectrain.tests.chats import PLAIN, word_tokenizer
from spectrain.tests.extraction_runs import digests
from spectrain.tests.models import rand_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target") / "tiny"
    rand_llama().save_pretrained(folder)
    word_tokenizer(PLAIN, end="<e>").save_pretrained(folder)
    return folder


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    rows: list[Any] = [
        [("user", "a " * n), ("assistant", "b " * n), ("user", "c"), ("assistant", "d e")] for n in range(1, 9)
    ]
    lines = [{"messages": [{"role": role, "content": content} for role, content in row]} for row in rows]
    lines.insert(3, {"messages": []})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def extract(model: Path, chats: Path, tmp_path: Path) -> Callable[..., int]:
    def run(*options: str, out: str = "shards", data: Path = chats) -> int:
        arguments = ["extract", "--model", str(model), "--data", str(data), "--out", str(tmp_path / out)]
        with pytest.raises(SystemExit) as exit_:
            main([*arguments, "--device", "cpu", "--dtype", "float32", *options])
        return int(exit_.value.code or 0)

    return run


def test_a_run_prints_its_account_and_resumes_to_nothing(
    extract: Callable[..., int], chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--layers", "2,0", "--shard-tokens", "60", "--batch-tokens", "24")
    assert extract(*options) == 0
    printed = capsys.readouterr().err
    assert "9 rows: 8 kept, 1 left out" in printed
    assert f"1 left out: no messages ({chats}:4)" in printed
    assert "x 393 bytes (layers 0, 2, 6, float32)" in printed  # 3 layers of 32 floats, two ids and a mask byte
    shards = ShardSet.open([tmp_path / "shards"])
    shards.verify()
    assert shards.num_documents == 8 and len(shards.manifest.shards) > 2
    assert shards.manifest.settings["rows"] == {"read": 9, "kept": 8, "left_out": {"no messages": 1}}
    before = digests(tmp_path / "shards")
    assert extract(*options) == 2
    assert "pass --resume, --overwrite" in capsys.readouterr().err
    assert extract(*options, "--resume") == 0
    assert ": 0 shards written" in capsys.readouterr().err
    assert digests(tmp_path / "shards") == before
    assert extract(*options, "--limit", "3", "--overwrite") == 0
    assert ShardSet.open([tmp_path / "shards"]).num_documents == 3


def test_recipes_give_the_union_of_their_layers(extract: Callable[..., int], tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("extends: eagle3\nhead:\n  layer_ids: [0, 3, 5]\n")
    assert extract("--recipe", f"eagle3,{other}") == 0
    assert ShardSet.open([tmp_path / "shards"]).manifest.layer_ids == (0, 2, 3, 4, 5, 6)


@pytest.mark.parametrize("limit", [8, 12, 15])
def test_the_length_limit_cuts_rows(extract: Callable[..., int], tmp_path: Path, limit: int) -> None:
    assert extract("--layers", "2", "--max-length", str(limit)) == 0
    lengths = ShardSet.open([tmp_path / "shards"]).document_lengths()
    assert int(lengths.max()) == limit


def test_the_target_answers_first(
    extract: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--layers", "2", "--generate", "5", "--temperature", "1", "--seed", "3", "--shard-tokens", "60")
    assert extract(*options) == 0
    assert "9 prompts: 8 kept, 1 left out" in capsys.readouterr().err
    shards = ShardSet.open([tmp_path / "shards"])
    assert shards.manifest.on_policy
    assert shards.manifest.settings["generation"]["max_new_tokens"] == 5
    lines = (tmp_path / "shards" / "text" / "text-00000.jsonl").read_text().splitlines()
    for index, line in enumerate(lines):
        row, document = json.loads(line), shards.document(index)
        assert document.token_ids.tolist() == row["prompt_token_ids"] + row["token_ids"]
        assert int(document.loss_mask.sum()) == len(row["token_ids"]) <= 5
    before = digests(tmp_path / "shards")
    assert extract(*options, "--resume") == 0
    assert digests(tmp_path / "shards") == before
    assert extract(*options[:-4], "--seed", "4", "--resume") == 2
    assert "begun with another seed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "expected --recipe NAME or --layers 2,15,27, found neither"),
        (("--layers", "2", "--recipe", "eagle3"), "found both"),
        (("--layers", "two"), "--layers takes numbers"),
        (("--layers", ","), "--layers takes numbers"),
        (("--layers", "2,9"), "layer ids must lie between 0 (embeddings) and 6"),
        (("--recipe", "eagle33"), "no recipe 'eagle33': did you mean eagle3?"),
        (("--layers", "2", "--dtype", "float16"), "--dtype must be one of bfloat16, float32"),
        (("--layers", "2", "--max-length", "0"), "--max-length must be at least 1"),
        (("--layers", "2", "--max-length", "2"), "no supervised token within --max-length"),
        (("--layers", "2", "--batch-tokens", "0"), "--batch-tokens must be at least 1"),
        (("--layers", "2", "--generate", "0"), "--generate takes the longest answer"),
        (("--layers", "2", "--limit", "0"), "--limit must be at least 1"),
        (("--layers", "2", "--max-tokens", "0"), "--max-tokens must be at least 1"),
        (("--layers", "2", "--max-tokens", "2"), "expected at least one row with a supervised token"),
    ],
)
def test_bad_options_end_in_one_line(
    extract: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    message: str,
) -> None:
    assert extract(*options) == 2
    assert message in capsys.readouterr().err
    assert not list((tmp_path / "shards").glob("shard-*"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "found an empty file"),
        (b'{"messages": [{"role"', "bad.jsonl:1 is not valid JSON"),
        (b'{"messages": "\xe9"}', "bad.jsonl:1 is not UTF-8"),
        (b'{"messages": []}\n{"text": "a"}\n', "found none (2 rows: 0 kept, 2 left out"),
    ],
)
def test_bad_data_ends_in_one_line(
    extract: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, message: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    assert extract("--layers", "2", data=path) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert not (tmp_path / "shards" / "manifest.json").exists()


@pytest.mark.parametrize(
    "refused",
    [
        ("--model", "/nowhere/model"),
        ("--layers", "2,9"),
        ("--batch-tokens", "0"),
        ("--data", "/nowhere/data.jsonl"),
        ("--data", "/nowhere/data.jsonl", "--generate", "4"),
        ("--max-length", "2"),
        ("--generate", "0"),
    ],
)
def test_overwriting_removes_nothing_before_all_else_is_in_order(
    extract: Callable[..., int], tmp_path: Path, refused: tuple[str, ...]
) -> None:
    assert extract("--layers", "2", "--limit", "2") == 0
    before = digests(tmp_path / "shards")
    assert extract("--layers", "2", "--overwrite", *refused) == 2
    assert digests(tmp_path / "shards") == before


def test_overwriting_a_full_disk_removes_nothing(
    extract: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert extract("--layers", "2", "--limit", "2") == 0
    before = digests(tmp_path / "shards")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    assert extract("--layers", "2", "--overwrite") == 2
    assert digests(tmp_path / "shards") == before


@pytest.mark.slow
def test_two_processes_write_the_bytes_of_one(model: Path, chats: Path, tmp_path: Path) -> None:
    options = ["--model", str(model), "--data", str(chats), "--layers", "2,3", "--dtype", "float32"]
    options += ["--shard-tokens", "60", "--device", "cpu"]
    alone = [sys.executable, "-W", "ignore", "-m", "spectrain", "extract", *options, "--out", str(tmp_path / "one")]
    launch = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    pair = [*launch, "-m", "spectrain", "extract", *options, "--out", str(tmp_path / "two")]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true"}
    for command in (alone, pair):
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    assert "one of 2" in done.stderr
