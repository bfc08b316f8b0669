"""`spectrain eval` with the settings of sampling beyond temperature and truncation: what they do, and without loss."""

import json
from pathlib import Path

import pytest

from spectrain import cli
from spectrain.commands.sampling_options import SamplingOptionError, bad_word_ids
from spectrain.kernels import dispatch
from spectrain.tests.commands.evaluations import one_line, run
from spectrain.tests.commands.test_self_chat import WORDS, tokenizer

PROMPTS = 5
TOKENS = 24


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "small.jsonl"
    rows = [{"prompt": f"w{i} w{i + 1} w{2 * i}"} for i in range(PROMPTS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def evaluate(model, head, prompts, tmp_path_factory):
    """One run through the command line: its check and settings, and the rows of drafting and of plain decoding."""
    out = tmp_path_factory.mktemp("report")

    def ask(*flags: object, temperature: float = 0.0) -> tuple[dict, dict, list[dict], list[dict]]:
        arguments = ("--model", model, "--head", head, "--prompts", prompts, "--max-new-tokens", TOKENS)
        arguments += ("--batch-size", 3, "--temperature", temperature, "--draft-sampling", "probabilistic")
        with pytest.raises(SystemExit) as leaving:
            cli.main(["eval", "--device", "cpu", *map(str, (*arguments, *flags, "--out", out, "--overwrite"))])
        assert not leaving.value.code
        report = json.loads((out / "report.json").read_text())
        assert report["lossless"]["passed"] and report["acceptance_length"] is not None
        rows = [json.loads(line) for line in (out / "outputs.jsonl").read_text().splitlines()]
        drafted, plain = ([row for row in rows if row["method"] == name] for name in ("eagle3", "none"))
        assert len(drafted) == len(plain) == PROMPTS
        if not temperature:
            assert ids(drafted) == ids(plain) and report["lossless"]["equal"] == PROMPTS
        return report["lossless"], report["settings"], drafted, plain

    return ask


@pytest.fixture(scope="module")
def free(evaluate) -> list[dict]:
    """Greedy outputs without any setting."""
    return evaluate("--ignore-eos")[2]


def ids(rows: list[dict]) -> list[list[int]]:
    return [row["token_ids"] for row in rows]


def said(rows: list[dict]) -> set[int]:
    return {token for row in rows for token in row["token_ids"]}


def test_a_bias_moves_tokens_in_and_out_of_the_output(evaluate, free):
    often = free[0]["token_ids"][5]
    _, settings, drafted, _ = evaluate("--ignore-eos", "--logit-bias", f"{often}=-100", "33=0.5")
    assert often not in said(drafted) and len(said(drafted)) > 3
    assert settings["logit_bias"] == [f"{often}=-100", "33=0.5"]
    assert said(evaluate("--ignore-eos", "--logit-bias", "33=100")[2]) == {33}


def test_a_bad_word_never_comes(evaluate, free):
    words = [WORDS[token] for token in sorted(said(free)) if token > 6][:4]
    _, settings, drafted, _ = evaluate("--ignore-eos", "--bad-words", *words)
    assert said(drafted) and not said(drafted) & {WORDS.index(word) for word in words}
    assert settings["bad_words"] == words


def test_only_allowed_tokens_come(evaluate):
    _, settings, drafted, _ = evaluate("--ignore-eos", "--allowed-token-ids", 11, 12, 40, 41, 42)
    assert said(drafted) <= {11, 12, 40, 41, 42} and len(said(drafted)) > 1
    assert settings["allowed_token_ids"] == [11, 12, 40, 41, 42]


def test_a_stop_token_ends_an_output_but_not_before_the_minimum(evaluate, free):
    stop = free[0]["token_ids"][3]
    first = free[0]["token_ids"].index(stop) + 1
    _, settings, stopped, _ = evaluate("--ignore-eos", "--stop-token-ids", stop, 95)
    assert stopped[0]["token_ids"] == free[0]["token_ids"][:first] and settings["stop_token_ids"] == [stop, 95]
    # more than a warm-up or a rehearsal decodes
    _, settings, late, _ = evaluate("--ignore-eos", "--stop-token-ids", stop, "--min-tokens", 20)
    assert all(len(row["token_ids"]) >= 20 for row in late) and stop not in late[0]["token_ids"][:20]
    assert settings["min_tokens"] == 20


def test_log_probabilities_of_every_token_are_saved(evaluate, free):
    _, settings, drafted, plain = evaluate("--ignore-eos", "--logprobs", 2)
    assert settings["logprobs"] == 2 and "logprobs" not in free[0]
    assert ids(drafted) == ids(free), "to be told of tokens changes none"
    for ours, theirs in zip(drafted, plain, strict=True):
        assert len(ours["logprobs"]) == len(ours["token_ids"]) == TOKENS
        for token, law, other in zip(ours["token_ids"], ours["logprobs"], theirs["logprobs"], strict=True):
            assert next(iter(law)) == str(token) and len(law) == 2, "a greedy token is the best one"
            assert law == pytest.approx(other, abs=1e-4)
            assert max(law.values()) == law[str(token)] < 0


def test_wide_noise_is_the_same_noise_with_more_digits(evaluate, monkeypatch):
    widths, verify = set(), dispatch.verify

    def watched(inputs, *, fp64_gumbel=False):
        widths.add(fp64_gumbel)
        return verify(inputs, fp64_gumbel=fp64_gumbel)

    monkeypatch.setattr(dispatch, "verify", watched)
    check, settings, rows, _ = evaluate("--ignore-eos", "--fp64-gumbel", temperature=1)
    assert settings["fp64_gumbel"] and check["mode"] == "sampled" and check["num_tokens"] == PROMPTS * TOKENS
    assert widths == {True}
    assert ids(evaluate("--ignore-eos", temperature=1)[2]) == ids(rows) and widths == {True, False}


@pytest.mark.parametrize(
    "flags",
    [
        ("--logit-bias", "11=1.5", "12=-2"),
        ("--bad-words", "w1", "w2"),
        ("--allowed-token-ids", *range(7, 60)),
        ("--stop-token-ids", 11, 12, "--min-tokens", 12),
        ("--logprobs", 0),
    ],
    ids=lambda flags: flags[0],
)
def test_sampled_drafts_follow_the_law_under_the_setting(flags, evaluate):
    check, _, drafted, _ = evaluate(*flags, temperature=1)
    assert check["mode"] == "sampled" and check["tested"] and check["passed"]
    if flags[0] == "--logprobs":
        assert all(len(law) == 1 for row in drafted for law in row["logprobs"])


@pytest.mark.parametrize(
    "flags,expected",
    [
        (("--logit-bias", "7"), "--logit-bias takes ID=BIAS"),
        (("--logit-bias", "w7=1"), "--logit-bias takes ID=BIAS"),
        (("--logit-bias", "7=1", "7=2"), "names token 7 twice"),
        (("--logit-bias", "7=nan"), "logit_bias must be finite"),
        (("--bad-words", " "), "--bad-words takes words"),
        (("--allowed-token-ids", "-3"), "allowed_token_ids must be"),
        (("--stop-token-ids", "-1"), "stop_token_ids must be"),
        (("--min-tokens", "300"), "min_tokens must be an integer between 0 and max_tokens = 256"),
        (("--min-tokens", "-1"), "min_tokens must be"),
        (("--logprobs", "-1"), "logprobs must be"),
    ],
)
def test_impossible_settings_are_refused_before_anything_loads(flags, expected, prompts, tmp_path, capsys):
    arguments = ("--model", tmp_path / "nowhere", "--method", "none", "--prompts", prompts, "--out", tmp_path / "r")
    code, _, error = run(capsys, *arguments, *flags)
    assert expected in one_line(code, error)


@pytest.mark.parametrize(
    "flags,expected",
    [
        (("--logit-bias", "97=1"), "logit_bias must hold token ids in 0..96, found 97"),
        (("--allowed-token-ids", "5", "1000"), "allowed_token_ids must hold token ids in 0..96, found 1000"),
        (("--stop-token-ids", "97"), "stop_token_ids must hold token ids in 0..96, found 97"),
        (("--logprobs", "98"), "logprobs must be at most the vocabulary of 97"),
        (("--bad-words", "elsewhere"), "must be words of the target's tokenizer, found 'elsewhere'"),
        (("--bad-words", "w1", "--allowed-token-ids", WORDS.index("w1")), "at least one token to give"),
    ],
)
def test_tokens_the_target_has_not_are_refused_before_it_decodes(flags, expected, model, prompts, tmp_path, capsys):
    arguments = ("--model", model, "--method", "none", "--prompts", prompts, "--out", tmp_path / "r")
    code, _, error = run(capsys, *arguments, *flags)
    assert expected in one_line(code, error)


def test_a_bad_word_is_read_at_the_beginning_of_a_text_and_behind_a_space():
    class Bytes:
        unk_token_id = None

        def __call__(self, text, **options):
            return {"input_ids": list(text.encode())}

    assert bad_word_ids([" ab", "c", "ab"], Bytes()) == ((97, 98), (32, 97, 98), (99,), (32, 99))
    assert bad_word_ids(["w3"], tokenizer()) == ((WORDS.index("w3"),),)
    with pytest.raises(SamplingOptionError, match="'zzz'"):
        bad_word_ids(["w3", "zzz"], tokenizer())
