"""A head from a user's own package: the code and the commands of docs/custom-heads.md, run as they stand there."""

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from spectrain import cli
from spectrain.heads.base import HeadError
from spectrain.heads.folder import load_head
from spectrain.tests.loop import save_target, write_chats
from spectrain.tests.models import succ_llama

PAGE = Path(__file__).parents[1] / "docs" / "custom-heads.md"
LETTERS = range(7, 33)  # ids of a to z, of which each but the last has a letter after it


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def workplace(page: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the page's files, a target that counts, and data; the page's extract and fit have run in it."""
    folder = tmp_path_factory.mktemp("custom")
    blocks = re.findall(r"```\w+ (\S+)\n(.*?)```", page, re.DOTALL)
    assert [name for name, _ in blocks] == ["my_package/my_head.py", "my_head.yaml"]
    for name, text in blocks:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "my_package" / "__init__.py").touch()
    save_target(succ_llama(2), folder / "target")
    write_chats(folder / "chats.jsonl", rows=60)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": t}) + "\n" for t in ("a b", "k", "x y z")))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.chdir(folder)
        for command in commands(page)[:2]:
            with pytest.raises(SystemExit) as leaving:
                cli.main([*command[1:], "--device", "cpu"])
            assert not leaving.value.code
        yield folder
        for name in [name for name in sys.modules if name.split(".")[0] == "my_package"]:
            del sys.modules[name]


def commands(page: str) -> list[list[str]]:
    (block,) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    return [shlex.split(line) for line in block.splitlines()]


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as leaving:
        cli.main(arguments)
    shown = capsys.readouterr()
    return int(leaving.value.code or 0), shown.out, shown.err


def test_the_pages_commands_train_and_measure_the_head(page: str, workplace: Path, capsys: pytest.CaptureFixture[str]):
    assert [command[:2] for command in commands(page)] == [
        ["spectrain", name] for name in ("extract", "fit", "eval", "inspect")
    ]
    _, _, evaluate, inspect = commands(page)
    code, _, err = run([*evaluate[1:], "--device", "cpu", "--ignore-eos", "--max-new-tokens", "16"], capsys)
    assert code == 0, err
    code, out, err = run(inspect[1:], capsys)
    assert code == 0, err
    assert "my_package.my_head:BigramConfig" in out and "down.weight  [64, 64]" in out

    record = json.loads((workplace / "heads/mine/spectrain.json").read_text())
    assert record["config_class"] == "my_package.my_head:BigramConfig" and record["config"]["rank"] == 64
    head = load_head(workplace / "heads/mine", dtype=torch.float32, allowed_packages=["my_package"]).head
    from spectrain.extract.shards import ShardSet

    target = ShardSet.open([workplace / "shards"]).target_tensors()
    letters = torch.tensor(LETTERS)
    with torch.no_grad():
        drafted = head.logits(head(head.embed(letters, target)), target).argmax(-1)
    assert torch.equal(drafted, letters + 1)

    report = json.loads((workplace / "report/report.json").read_text())
    assert report["method"] == "my_head" and report["num_draft_tokens"] == 3 and report["lossless"]["passed"]
    # after the prompt the target counts from <e>, which no training text goes on from; all drafts behind it are right
    assert report["acceptance_length"] > 3


def test_drafts_are_drawn_from_the_law_they_carry(workplace: Path, capsys: pytest.CaptureFixture[str]):
    arguments = "eval --model target --head heads/mine --allow-package my_package --prompts prompts.jsonl --device cpu"
    sampled = "--temperature 1 --draft-sampling probabilistic --ignore-eos --max-new-tokens 60 --out sampled"
    code, _, err = run([*arguments.split(), *sampled.split()], capsys)
    assert code == 0, err
    lossless = json.loads((workplace / "sampled/report.json").read_text())["lossless"]
    assert lossless["mode"] == "sampled" and lossless["passed"]


def test_a_head_folder_imports_no_code_that_was_not_allowed(workplace: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(HeadError, match="pass --allow-package my_package"):
        load_head(workplace / "heads/mine")
    arguments = "eval --model target --head heads/mine --prompts prompts.jsonl --device cpu --out refused"
    code, _, err = run(arguments.split(), capsys)
    assert code == 2 and "pass --allow-package my_package" in err and not (workplace / "refused").exists()


def test_a_wrong_key_of_a_custom_section_gets_the_nearest_one(workplace: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["fit", "--recipe", "my_head.yaml", "--shards", "shards", "--out", "other", "--device", "cpu", "--set"]
    for override, near in (("head.rnak=4", "head.rank"), ("objective.los=ce", "objective.loss")):
        code, _, err = run([*arguments, override], capsys)
        assert code == 2 and f"did you mean {near}?" in err


def test_training_resumes_with_a_custom_head(workplace: Path, capsys: pytest.CaptureFixture[str]):
    shared = "fit --recipe my_head.yaml --shards shards --out again --device cpu --set stopping.save_every=2 --set"
    assert run([*shared.split(), "stopping.max_steps=2"], capsys)[0] == 0
    code, out, err = run([*shared.split(), "stopping.max_steps=4", "--resume"], capsys)
    assert code == 0 and "resuming at optimizer step 2" in err and "head of step 4" in out
