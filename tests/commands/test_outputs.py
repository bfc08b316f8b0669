"""What is in the way of an output is said in one line, by every command, before a model, shards or prompts are read."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from spectrain import cli
from spectrain.commands.outputs import obstacle
from spectrain.commands.smollm2 import model_folder
from spectrain.tests.commands.evaluations import one_line

ABSENT = "/nowhere/absent"  # nothing can be read there: a command that says so has looked at its output too late
TARGET = ("--model", ABSENT)
FOLDERS = {
    "extract": (*TARGET, "--data", ABSENT, "--layers", "2", "--out"),
    "extract --generate": (*TARGET, "--data", ABSENT, "--layers", "2", "--generate", "4", "--out"),
    "extract --overwrite": (*TARGET, "--data", ABSENT, "--layers", "2", "--overwrite", "--out"),
    "fit": ("--shards", ABSENT, "--out"),
    "fit --resume": ("--shards", ABSENT, "--resume", "--out"),
    "fit --overwrite": ("--shards", ABSENT, "--overwrite", "--out"),
    "eval": (*TARGET, "--prompts", ABSENT, "--method", "none", "--out"),
    "quickstart": (*TARGET, "--out"),
    "bench generate": (*TARGET, "--prompts", ABSENT, "--head", ABSENT, "--out"),
    "bench heads": (*TARGET, "--prompts", __file__, "--shards", ABSENT, "--recipes", "medusa", "--work"),
}
FILES = {
    "eval --suffix-cache": (*TARGET, "--prompts", ABSENT, "--method", "suffix", "--suffix-cache"),
    "data self-chat": (*TARGET, "--out"),
    "data code-edits": ("--source", ABSENT, "--out"),
    "data code-edits --overwrite": ("--source", ABSENT, "--overwrite", "--out"),
    "bench decode": (*TARGET, "--out"),
    "bench methods": (*TARGET, "--prompts", ABSENT, "--out"),
    "bench methods --overwrite": (*TARGET, "--prompts", ABSENT, "--overwrite", "--out"),
}
COMMANDS = {**FOLDERS, **FILES}
NEVER_CLOSED = pytest.mark.skipif(os.geteuid() == 0, reason="no folder is closed to root")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder of things that may be in the way; it stays as it is."""
    (tmp_path / "file.json").write_text("mine")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "link.json").symlink_to(tmp_path / "not" / "there")
    (tmp_path / "closed").mkdir(mode=0o500)
    (tmp_path / "locked").mkdir(mode=0o600)
    return tmp_path


@pytest.fixture
def refusal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, Path], str]:
    """What a command says of its output; nothing may have changed on the disk."""
    monkeypatch.chdir(tmp_path)

    def run(command: str, out: Path) -> str:
        before = contents(tmp_path)
        with pytest.raises(SystemExit) as leaving:
            cli.main([*(word for word in command.split() if word[0] != "-"), *COMMANDS[command], str(out)])
        line = one_line(int(leaving.value.code or 0), capsys.readouterr().err)
        assert contents(tmp_path) == before
        option = COMMANDS[command][-1]
        assert line.startswith(f"spectrain: error: {option} must be ") and "; choose another" in line, line
        return line

    return run


def contents(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("file.json/x.json", "a file at {}/file.json"),
        ("file.json/new/x.json", "a file at {}/file.json"),
        ("link.json/x.json", "a link that leads nowhere at {}/link.json"),
        ("n" * 300 + ".json", "a name too long for the file system of {}"),
        (f"new/{'n' * 300}/x.json", "a name too long for the file system of {}"),
        ("new/" * 1200 + "x.json", "a name too long for the file system of {}"),
        pytest.param("closed/x.json", "no permission to write in {}/closed", marks=NEVER_CLOSED),
        pytest.param("locked/new/x.json", "no permission to write in {}/locked", marks=NEVER_CLOSED),
    ],
    ids=["under a file", "deep under a file", "under a link", "long", "under long", "deep", "closed", "locked"],
)
def test_what_is_in_the_way_is_named_first(command, out, said, place, refusal) -> None:
    assert f"found {said.format(place)};" in refusal(command, place / out)


@pytest.mark.parametrize("command", FOLDERS)
@pytest.mark.parametrize(("out", "kind"), [("file.json", "a file"), ("link.json", "a link that leads nowhere")])
def test_a_folder_takes_no_other_things_place(command, out, kind, place, refusal) -> None:
    assert f"must be a folder that can be written, found {kind} at" in refusal(command, place / out)


@pytest.mark.parametrize("command", FILES)
@pytest.mark.parametrize("out", ["folder.json", "link.json"])
def test_a_file_takes_no_other_things_place(command, out, place, refusal) -> None:
    assert "must be a file, found something else" in refusal(command, place / out)


@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("extract", "target"),
        ("extract --generate", "text"),
        ("extract --overwrite", "target"),
        ("fit --resume", "run"),
        ("fit --overwrite", "run"),
        ("quickstart", "shards"),
        ("quickstart", "head"),
        ("quickstart", "report"),
        ("bench heads", "heads"),
        ("bench heads", "heads/medusa-0"),
    ],
)
def test_a_file_in_a_folders_place_inside_the_output(command, part, tmp_path, refusal) -> None:
    """Overwriting would delete a head, or a first command be done, before the file was met."""
    (tmp_path / "out" / part).parent.mkdir(parents=True)
    (tmp_path / "out" / part).write_text("mine")
    (tmp_path / "out" / "model.safetensors").write_text("a head")
    assert f"found a file at {tmp_path / 'out' / part};" in refusal(command, tmp_path / "out")


def test_conversations_need_room_for_what_is_kept_beside_them(tmp_path, refusal) -> None:
    (tmp_path / "a.jsonl.progress").mkdir()
    assert "a.jsonl.progress;" in refusal("data self-chat", tmp_path / "a.jsonl")
    assert "too long" in refusal("data self-chat", tmp_path / ("n" * 244)), "n.progress.tmp"


def test_reports_beside_a_record_are_looked_at_first(tmp_path, refusal) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "batch-64").write_text("mine")
    assert "batch-64;" in refusal("bench methods", tmp_path / "a.json")


def test_conversations_are_not_added_to_anothers_file(tmp_path, capsys) -> None:
    (tmp_path / "a.jsonl").write_text("mine")
    with pytest.raises(SystemExit) as leaving:
        cli.main(["data", "self-chat", *COMMANDS["data self-chat"], str(tmp_path / "a.jsonl")])
    assert "not begun by self-chat" in one_line(int(leaving.value.code or 0), capsys.readouterr().err)
    assert (tmp_path / "a.jsonl").read_text() == "mine"


@NEVER_CLOSED
def test_a_record_that_may_not_be_written_is_not_overwritten(tmp_path, refusal) -> None:
    (tmp_path / "a.json").write_text("mine")
    (tmp_path / "a.json").chmod(0o400)
    assert "read-only" in refusal("data code-edits --overwrite", tmp_path / "a.json")


@pytest.mark.parametrize("command", FILES)
def test_the_folder_one_is_in_is_no_file(command, refusal) -> None:
    assert "must be a file" in refusal(command, Path("."))


def test_only_the_process_that_writes_looks(place, monkeypatch, capsys) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        cli.main(["fit", "--shards", ABSENT, "--out", str(place / "file.json")])
    assert "no such folder" in capsys.readouterr().err


def test_a_cache_that_cannot_be_written_is_named(place) -> None:
    with pytest.raises(ValueError, match="XDG_CACHE_HOME must be a folder that can be written, found a file at"):
        model_folder(cache=place / "file.json" / "spectrain")


@pytest.mark.parametrize("folder", [".", "new", "new/newer", "folder.json", "to-folder", "to-folder/new", "new/../new"])
def test_nothing_is_in_the_way_of_folders_there_or_to_come(folder, place, monkeypatch) -> None:
    (place / "to-folder").symlink_to("folder.json")
    monkeypatch.chdir(place)
    assert obstacle(Path(folder)) is None and obstacle(place / folder, "n" * 255) is None
    assert obstacle(Path(folder), "n" * 256) is not None
