"""`spectrain eval --method`: every name that may stand there, several at once, and one line for each that may not."""

import json
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from spectrain.commands.eval import Options
from spectrain.commands.methods import DraftTokens, draft_tokens, load_heads, proposer_maker
from spectrain.infer.config import EngineConfig
from spectrain.infer.proposers.hybrid import HybridProposer
from spectrain.infer.target import Target
from spectrain.tests.commands.evaluations import one_line, run
from spectrain.tests.commands.test_self_chat import tokenizer
from spectrain.tests.gemma4_assistants import assistant_of
from spectrain.tests.infer.draft_steps import bound, drafts_for
from spectrain.tests.models import gemma4
from spectrain.tests.suffix_package import NEEDS_SUFFIX


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts that repeat themselves, so that drafts are found."""
    path = tmp_path_factory.mktemp("prompts") / "twice.jsonl"
    rows = [{"prompt": f"w{i} w{i + 1} w{2 * i} w{i} w{i + 1} w{2 * i} w{i}"} for i in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def mine(tmp_path, monkeypatch) -> str:
    (tmp_path / "code_of_mine.py").write_text(
        textwrap.dedent("""
        class First:
            def __init__(self, config):
                self.k = config.num_draft_tokens

            def propose(self, sampled_token_ids, num_tokens_no_spec, token_ids_cpu):
                return [row[: self.k].tolist() for row in token_ids_cpu]

        class Failing(First):
            def propose(self, sampled_token_ids, num_tokens_no_spec, token_ids_cpu):
                raise LookupError("lost")

        class Leaving(First):
            def propose(self, sampled_token_ids, num_tokens_no_spec, token_ids_cpu):
                raise SystemExit(0)
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "code_of_mine", raising=False)
    return "custom:code_of_mine"


def results_of(out: Path) -> list[dict]:
    report = json.loads((out / "report.json").read_text())
    return report.get("results", [report])


@NEEDS_SUFFIX
def test_methods_are_compared_in_one_run(model, head, prompts, mine, tmp_path, capsys) -> None:
    names = ["ngram", "none", "ngram_gpu", "suffix", f"{mine}:First", "eagle3", "suffix+eagle3"]
    arguments = ("--model", model, "--head", head, "--prompts", prompts, "--max-new-tokens", 16, "--batch-size", 2)
    arguments += ("--ngram-min", 1, "--ngram-max", 3, "--ignore-eos", "--out", tmp_path / "r")
    code, shown, error = run(capsys, *arguments, "--method", ",".join(names))
    assert code == 0, error
    results = results_of(tmp_path / "r")
    assert [r["method"] for r in results] == names
    verdicts = {r["method"]: r["lossless"] for r in results}
    assert all(verdict["passed"] and verdict["equal"] == 4 for verdict in verdicts.values()), verdicts
    assert len({r["baseline_tokens_per_second"] for r in results}) == 1, "all stand beside the same plain runs"
    by_name = {r["method"]: r for r in results}
    assert by_name["none"]["acceptance_length"] is None and by_name["ngram"]["acceptance_length"] > 1
    assert by_name["ngram"]["acceptance_by_position"] == by_name["ngram_gpu"]["acceptance_by_position"]
    assert [r["num_draft_tokens"] for r in results] == [3, 0, 3, 24, 3, 2, 24]
    settings = json.loads((tmp_path / "r" / "report.json").read_text())["settings"]
    assert settings["num_draft_tokens"]["suffix"] == 24 and settings["ngram_max"] == 3
    rows = [json.loads(line) for line in (tmp_path / "r" / "outputs.jsonl").read_text().splitlines()]
    assert len(rows) == 4 * 7 == len({(row["index"], row["method"]) for row in rows}), "plain texts once"
    assert all(f"{name}: " in shown for name in names), "a line of advice each"
    page = (tmp_path / "r" / "report.html").read_text()
    assert "Side by side" in page and page.count(f"<h2>{names[-1]} on twice</h2>") == 1


@NEEDS_SUFFIX
def test_sampling_is_judged_by_its_law(model, head, prompts, tmp_path, capsys) -> None:
    arguments = ("--model", model, "--head", head, "--prompts", prompts, "--max-new-tokens", 32, "--ignore-eos")
    arguments += ("--temperature", 1, "--draft-sampling", "probabilistic", "--out", tmp_path / "r")
    code, _, error = run(capsys, *arguments, "--method", "suffix+eagle3")
    assert code == 0, error
    assert all(r["lossless"]["mode"] == "sampled" and r["lossless"]["passed"] for r in results_of(tmp_path / "r"))


@NEEDS_SUFFIX
def test_a_suffix_cache_carries_over_to_the_next_run(model, prompts, tmp_path, capsys) -> None:
    lengths, sizes = [], []
    for number in range(2):
        arguments = ("--model", model, "--prompts", prompts, "--method", "suffix", "--max-new-tokens", 12, "--limit", 2)
        arguments += (
            "--num-draft-tokens",
            6,
            "--suffix-cache",
            tmp_path / "cache",
            "--ignore-eos",
            "--out",
            tmp_path / str(number),
        )
        code, _, error = run(capsys, *arguments)
        assert code == 0, error
        lengths.append(results_of(tmp_path / str(number))[0]["tokens_per_step"])
        sizes.append((tmp_path / "cache").stat().st_size)
    assert lengths[1] > lengths[0] + 1, "the first run's responses, with their prompts asked again"
    assert sizes[0] < sizes[1]
    code, _, error = run(capsys, *arguments, "--overwrite", "--suffix-max-cached-requests", 2)
    assert code == 0, error
    assert (tmp_path / "cache").stat().st_size == sizes[0], "two responses, as after the first run"


@NEEDS_SUFFIX
def test_what_a_warm_up_said_is_not_known_to_the_measured_run(model, prompts, tmp_path, capsys) -> None:
    """A prompt that is alone and never repeats: what the warm-up said must not be found by suffix decoding."""
    lonely = tmp_path / "lonely.jsonl"
    lonely.write_text('{"prompt": "w40 w41 w42"}\n')
    arguments = ("--model", model, "--prompts", lonely, "--method", "suffix", "--max-new-tokens", 6, "--ignore-eos")
    code, _, error = run(capsys, *arguments, "--out", tmp_path / "r")
    assert code == 0, error
    assert results_of(tmp_path / "r")[0]["tokens_per_step"] < 1.5


@pytest.mark.parametrize(
    "flags,expected",
    [
        (["--method", "medusa"], "--method medusa"),
        (["--method", "ngram,medusa"], "--method medusa"),
        (["--method", "ngramm"], "--method ngramm"),
        (["--method", "ngramm"], "is it ngram?"),
        (["--method", "ngram,"], "names between commas, found 'ngram,'"),
        (["--method", ""], "names between commas, found ''"),
        (["--method", "suffix+"], "suffix+ joins the name of a head that drafts"),
        (["--method", "suffix+ngram"], "suffix+ joins the name of a head that drafts, found --method suffix+ngram"),
        (["--method", "draft_model"], "found no --draft-model; give --draft-model DIR"),
        (["--method", "suffix+pard"], "found no --draft-model"),
        (
            ["--method", "ngram,none", "--draft-sampling", "probabilistic"],
            "--draft-sampling probabilistic is for heads",
        ),
        (["--method", "suffix+eagle3"], "--method suffix+eagle3"),
        (["--method", "ngram,suffix,ngram"], "'ngram' twice"),
        (["--method", "custom:nowhere:X"], "custom:nowhere:X cannot be imported"),
        (["--method", "custom:json:Nothing"], "names no class of json"),
        (["--method", "custom:json"], "custom:module:Class"),
        (["--method", "ngram", "--ngram-min", "3", "--ngram-max", "2"], "1 <= min <= max"),
        (["--method", "ngram", "--ngram-min", "0"], "1 <= min <= max"),
        (["--method", "suffix", "--suffix-min-token-prob", "2"], "min_token_prob"),
        (["--method", "suffix", "--suffix-max-depth", "0"], "max_depth"),
        (["--method", "suffix", "--ngram-max", "2"], "--ngram-max is for ngram and ngram_gpu, found --method suffix"),
        (["--method", "ngram", "--suffix-cache", "x"], "--suffix-cache is for suffix, found --method ngram"),
        (["--method", "ngram", "--num-draft-tokens", "0"], "--num-draft-tokens must be at least 1"),
        pytest.param(["--method", "suffix", "--num-draft-tokens", "500"], "context of 96 tokens", marks=NEEDS_SUFFIX),
    ],
)
def test_what_is_not_there_is_one_line_and_nothing_else_runs(flags, expected, model, prompts, tmp_path, capsys) -> None:
    code, _, error = run(capsys, "--model", model, "--prompts", prompts, "--out", tmp_path / "r", *flags)
    assert expected in one_line(code, error)
    assert not (tmp_path / "r").exists()


def test_a_gemma_4_assistant_drafts_from_its_own_folder(prompts, tmp_path, capsys) -> None:
    target, head = gemma4(max_position_embeddings=96), tmp_path / "assistant"
    target.save_pretrained(tmp_path / "gemma")
    tokenizer().save_pretrained(tmp_path / "gemma")
    assistant_of(target.config).save_pretrained(head)
    arguments = ("--model", tmp_path / "gemma", "--head", head, "--prompts", prompts, "--max-new-tokens", 8)
    for method in ((), ("--method", "mtp")):
        code, _, error = run(capsys, *arguments, *method, "--out", tmp_path / f"r{len(method)}")
        assert code == 0, error
        (result,) = results_of(tmp_path / f"r{len(method)}")
        assert result["method"] == "mtp" and result["num_draft_tokens"] == 3 and result["lossless"]["passed"]
        assert result["draft_acceptance_rate"] is not None
    code, _, error = run(capsys, *arguments, "--method", "eagle3", "--out", tmp_path / "r")
    assert "is a head for mtp, found --method eagle3" in one_line(code, error)


def test_an_assistant_of_another_target_is_refused(model, prompts, tmp_path, capsys) -> None:
    assistant_of(gemma4().config).save_pretrained(tmp_path / "assistant")
    arguments = ("--model", model, "--head", tmp_path / "assistant", "--prompts", prompts, "--out", tmp_path / "r")
    code, _, error = run(capsys, *arguments)
    assert "reads keys and values of a Gemma 4" in one_line(code, error)


def test_another_heads_name_is_refused(model, head, prompts, tmp_path, capsys) -> None:
    for method in ("medusa", "suffix+medusa"):
        arguments = ("--model", model, "--head", head, "--prompts", prompts, "--out", tmp_path / "r")
        code, _, error = run(capsys, *arguments, "--method", method)
        assert f"is a head for eagle3, found --method {method}" in one_line(code, error)
    code, _, error = run(capsys, *arguments, "--method", "ngram")
    assert "need no head, found --head" in one_line(code, error)


def test_a_language_model_is_asked_for_by_its_own_option(model, prompts, tmp_path, capsys) -> None:
    arguments = ("--model", model, "--prompts", prompts, "--out", tmp_path / "r")
    code, _, error = run(capsys, *arguments, "--head", model)
    assert f"drafts by --draft-model {model}" in one_line(code, error)
    code, _, error = run(capsys, *arguments, "--draft-model", model, "--method", "ngram")
    assert "need no head, found --draft-model; drop --draft-model" in one_line(code, error)


def test_suffix_without_its_package_names_the_extra(model, prompts, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "arctic_inference.suffix_decoding", None)
    arguments = ("--model", "/nowhere/model", "--prompts", prompts, "--out", tmp_path / "r")
    for method in ("suffix", "none,suffix"):
        code, _, error = run(capsys, *arguments, "--method", method)
        assert "pip install 'spectrain[suffix]'" in one_line(code, error)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("Failing", "code_of_mine:Failing failed drafting for request 0: LookupError: lost"),
        ("Leaving", "code_of_mine:Leaving.propose ended the command: SystemExit: 0"),
    ],
)
def test_a_fault_in_a_users_class_is_one_line(kind, said, model, prompts, mine, tmp_path, capsys) -> None:
    arguments = ("--model", model, "--prompts", prompts, "--max-new-tokens", 4, "--out", tmp_path / "r")
    code, _, error = run(capsys, *arguments, "--method", f"{mine}:{kind}")
    line = one_line(code, error)
    assert said in line and "code_of_mine.py" in line


class TestOptionsChangeDrafts:
    """Each option, at another value than its default, drafts something else."""

    TEXT = [1, 2, 9, 4, 2, 8, 3, 9, 1, 2, 7, 5, 9, 1, 2]

    def drafts(self, method: str, *, k: int | None = None, **changes) -> list[int]:
        options = Options(model="m", prompts=[], method=method, num_draft_tokens=k, **changes)
        tokens = draft_tokens(method, options, {})
        target = type("NoTarget", (), {"vocab_size": 100})()
        proposer = proposer_maker(method, options, target, None, tokens)(EngineConfig(num_draft_tokens=tokens.engine))
        return drafts_for(bound(proposer, 1), [self.TEXT], prompt_lens=[len(self.TEXT)])[0]

    @pytest.mark.parametrize("method", ["ngram", "ngram_gpu"])
    def test_ngram(self, method) -> None:
        base = {"ngram_min": 1, "ngram_max": 1}
        assert self.drafts(method) == []
        assert self.drafts(method, **base) == [9, 4, 2]
        assert self.drafts(method, k=1, **base) == [9]
        assert self.drafts(method, ngram_min=1, ngram_max=3) == [7, 5, 9]
        assert self.drafts(method, ngram_match="latest", **base) == [7, 5, 9]

    @NEEDS_SUFFIX
    def test_suffix(self) -> None:
        usual = self.drafts("suffix")
        assert usual == [7, 5, 9]
        for changes in ({"k": 1}, {"suffix_max_factor": 2.0}, {"suffix_min_token_prob": 0.9}, {"suffix_max_depth": 2}):
            assert self.drafts("suffix", **changes) != usual, changes


def test_draft_tokens_by_method() -> None:
    record = {"serving": {"num_draft_tokens": 5}}
    options = Options(model="m", prompts=[])
    found = {name: draft_tokens(name, options, record) for name in ("none", "eagle3", "suffix", "suffix+eagle3")}
    assert found == {
        "none": DraftTokens(0, 0),
        "eagle3": DraftTokens(5, 5),
        "suffix": DraftTokens(24, 0),
        "suffix+eagle3": DraftTokens(24, 5),
    }
    given = options._replace(num_draft_tokens=7)
    assert {draft_tokens(name, given, record).engine for name in found} == {0, 7}
    assert draft_tokens("suffix", options._replace(suffix_max_depth=9), {}) == DraftTokens(9, 0)


@NEEDS_SUFFIX
def test_a_suffix_cache_that_cannot_be_written_is_refused_before_the_run(model, prompts, tmp_path, capsys) -> None:
    arguments = ("--model", model, "--prompts", prompts, "--method", "suffix", "--out", tmp_path / "r")
    code, _, error = run(capsys, *arguments, "--suffix-cache", prompts / "cache")
    assert f"--suffix-cache must be in a folder that can be written, found a file at {prompts};" in one_line(
        code, error
    )
    assert not (tmp_path / "r").exists()


@NEEDS_SUFFIX
def test_a_hybrids_head_makes_its_own_number_of_drafts(model, head) -> None:
    options = Options(model=str(model), prompts=[], head=head, method="suffix+eagle3")
    target = Target.load(model, dtype=torch.float32)
    loaded = load_heads(options, target, ["suffix+eagle3"])["suffix+eagle3"]
    tokens = draft_tokens("suffix+eagle3", options, loaded.record)
    made = proposer_maker("suffix+eagle3", options, target, loaded, tokens)(EngineConfig(num_draft_tokens=24))
    assert isinstance(made, HybridProposer) and made.suffix.num_draft_tokens == 24
    assert made.inner.num_draft_tokens == 2
