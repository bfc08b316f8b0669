"""`spectrain eval` through the command line on a tiny target: the report folder, and one line for each wrong input."""

import errno
import json
from pathlib import Path

import pytest
import torch

from spectrain import cli
from spectrain.commands import eval as eval_command
from spectrain.commands import eval_folder
from spectrain.tests.commands.evaluations import one_line, run, write_head
from spectrain.tests.commands.test_self_chat import tokenizer
from spectrain.tests.models import rand_llama


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "small.jsonl"
    rows = [{"prompt": f"w{i} w{i + 1} w{2 * i}"} for i in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_report_folder_of_a_head(model, head, prompts, tmp_path, capsys) -> None:
    out = tmp_path / "report"
    arguments = ("--model", model, "--head", head, "--prompts", prompts, "--max-new-tokens", 12, "--batch-size", 2)
    code, shown, _ = run(capsys, *arguments, "--out", out)
    assert code == 0
    report = json.loads((out / "report.json").read_text())
    assert report["method"] == "eagle3" and report["prompt_set"] == "small"
    assert report["num_draft_tokens"] == 2, "the head's own default"
    assert report["lossless"]["passed"] and report["lossless"]["equal"] == report["num_prompts"] == 5
    assert report["settings"]["model"] == model.name and str(model) not in (out / "report.html").read_text()
    assert report["settings"]["max_new_tokens"] == 12 and report["settings"]["dtype"] == "float32"
    assert str(tmp_path) not in (out / "report.json").read_text()
    rows = [json.loads(line) for line in (out / "outputs.jsonl").read_text().splitlines()]
    assert {row["method"] for row in rows} == {"eagle3", "none"} and len(rows) == 10
    assert {"index", "method", "prompt_token_ids", "token_ids", "text"} <= set(rows[0])
    assert "acceptance length" in shown and "report.html" in shown and (out / "report.html").is_file()


def test_sampling_is_judged_by_its_law(model, head, prompts, tmp_path, capsys) -> None:
    arguments = ("--model", model, "--head", head, "--prompts", prompts, "--max-new-tokens", 24, "--ignore-eos")
    arguments += ("--temperature", 1, "--draft-sampling", "probabilistic", "--out", tmp_path)
    code, shown, _ = run(capsys, *arguments)
    report = json.loads((tmp_path / "report.json").read_text())
    assert code == 0 and report["lossless"]["mode"] == "sampled"
    assert report["lossless"]["p_value"] > 1e-4 and report["lossless"]["num_tokens"] == 5 * 24
    assert "n = 120" in shown


@pytest.mark.parametrize("temperature", [0, 1])
def test_adaptive_drafting_is_lossless_and_names_the_best_k_by_batch_size(
    temperature, model, head, prompts, tmp_path, capsys
) -> None:
    arguments = ("--model", model, "--head", head, "--prompts", prompts, "--max-new-tokens", 24, "--batch-size", 3)
    arguments += ("--temperature", temperature, "--draft-sampling", "probabilistic", "--draft-policy", "adaptive")
    code, out, _ = run(capsys, *arguments, "--num-draft-tokens", 3, "--ignore-eos", "--out", tmp_path)
    assert code == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["settings"]["draft_policy"] == "adaptive"
    assert report["lossless"]["passed"] or not report["lossless"]["tested"]
    best = report["best_k_by_batch_size"]
    assert set(best) == {"1", "2", "3"} and all(0 <= k <= 3 for k in best.values())
    assert "by batch size" in out


def test_too_few_tokens_for_the_law_are_no_failure(model, head, prompts, tmp_path, capsys) -> None:
    arguments = ("--model", model, "--head", head, "--prompts", prompts, "--max-new-tokens", 4, "--limit", 1)
    code, shown, _ = run(capsys, *arguments, "--temperature", 1, "--out", tmp_path / "r")
    check = json.loads((tmp_path / "r" / "report.json").read_text())["lossless"]
    assert code == 0 and "not tested" in shown and "FAILED" not in shown
    assert not check["passed"] and not check["tested"]


def test_a_head_that_changes_the_output_exits_with_1(model, head, prompts, tmp_path, capsys, monkeypatch) -> None:
    from spectrain.infer import stages
    from spectrain.tests.infer.test_evaluate import accept_everything

    monkeypatch.setattr(stages, "verify_drafts", accept_everything)
    arguments = ("--model", model, "--head", head, "--prompts", prompts, "--max-new-tokens", 24, "--out", tmp_path)
    code, shown, _ = run(capsys, *arguments)
    assert code == 1 and "FAILED" in shown


def test_several_files_are_several_results(model, prompts, tmp_path, capsys) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"question": "w1"}\n')
    arguments = ("--model", model, "--method", "none", "--prompts", prompts, other, "--max-new-tokens", 3)
    code, _, _ = run(capsys, *arguments, "--limit", 2, "--out", tmp_path / "r")
    assert code == 0
    results = json.loads((tmp_path / "r" / "report.json").read_text())["results"]
    assert [(r["prompt_set"], r["num_prompts"], r["acceptance_length"]) for r in results] == [
        ("small", 2, None),
        ("other", 1, None),
    ]


def test_files_of_one_name_are_all_measured(model, prompts, tmp_path, capsys) -> None:
    other = tmp_path / "other" / prompts.name
    other.parent.mkdir()
    other.write_text('{"question": "w1"}\n')
    arguments = ("--model", model, "--method", "none", "--max-new-tokens", 3, "--limit", 2, "--out", tmp_path / "r")
    code, _, error = run(capsys, *arguments, "--prompts", prompts, other)
    assert code == 0, error
    results = json.loads((tmp_path / "r" / "report.json").read_text())["results"]
    assert [(r["prompt_set"], r["num_prompts"]) for r in results] == [
        (f"{prompts.parent.name}/small.jsonl", 2),
        ("other/small.jsonl", 1),
    ]
    code, _, error = run(capsys, *arguments, "--overwrite", "--prompts", prompts, prompts)
    assert "small.jsonl twice" in one_line(code, error)


def test_a_file_in_the_way_of_the_report_is_named_at_once(model, prompts, tmp_path, capsys) -> None:
    (tmp_path / "r").write_text("mine")
    for out in (tmp_path / "r", tmp_path / "r" / "report"):
        arguments = ("--model", "/nowhere/model", "--method", "none", "--prompts", prompts, "--out", out)
        code, _, error = run(capsys, *arguments)
        assert "--out must be a folder" in one_line(code, error)


def test_sampling_options_reach_the_engine(model, head, prompts, monkeypatch, tmp_path) -> None:
    seen = {}

    def stop(method, k, name, some, params, options, *rest):
        seen.update(params=params, k=k, options=options, count=len(some))
        raise KeyboardInterrupt

    monkeypatch.setattr(eval_command, "_work", stop)
    flags = "--temperature 0.7 --top-k 11 --top-p 0.9 --seed 5 --max-new-tokens 9 --num-draft-tokens 4 --batch-size 3"
    flags += f" --limit 2 --ignore-eos --draft-sampling probabilistic --num-blocks 77 --out {tmp_path / 'x'}"
    flags += " --min-p 0.1 --repetition-penalty 1.2 --presence-penalty 0.3 --frequency-penalty -0.4 --stop w1 --stop w2"
    with pytest.raises(SystemExit):
        cli.main(["eval", "--model", str(model), "--head", str(head), "--prompts", str(prompts), *flags.split()])
    params, options = seen["params"], seen["options"]
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.7, 11, 0.9, 9)
    assert (params.min_p, params.repetition_penalty, params.stop) == (0.1, 1.2, ("w1", "w2"))
    assert (params.presence_penalty, params.frequency_penalty) == (0.3, -0.4)
    assert params.ignore_eos and seen["k"] == 4 and seen["count"] == 2
    assert (options.seed, options.batch_size, options.num_blocks) == (5, 3, 77)
    assert options.draft_sampling == "probabilistic"


def test_other_template_or_tokenizer_warns_naming_both(model, prompts, tensors, tmp_path, capsys) -> None:
    record = {"shards": {"template_hash": "a" * 64, "tokenizer_hash": "b" * 64}}
    head = write_head(tmp_path / "odd-head", tensors, record)
    arguments = ("--model", model, "--head", head, "--prompts", prompts, "--max-new-tokens", 2, "--limit", 1)
    code, _, error = run(capsys, *arguments, "--out", tmp_path / "r")
    assert code == 0
    assert "chat template" in error and "aaaaaaaaaaaa" in error and "tokenizer" in error
    assert "odd-head" in error and model.name in error


def test_head_path_forgotten(model, prompts, tmp_path, capsys) -> None:
    code, _, error = run(capsys, "--model", model, "--prompts", prompts, "--out", tmp_path / "r")
    assert "--head DIR" in one_line(code, error) and "--method none" in error


@pytest.mark.parametrize("temperature", [0, 1])
def test_no_token_asked_for_is_an_empty_report(temperature, model, head, prompts, tmp_path, capsys) -> None:
    arguments = ("--model", model, "--head", head, "--prompts", prompts, "--max-new-tokens", 0)
    code, _, error = run(capsys, *arguments, "--temperature", temperature, "--logprobs", 1, "--out", tmp_path)
    assert code == 0, error
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["output_tokens"], report["acceptance_length"], report["best_k"]) == (0, None, None)
    assert report["prompt_tokens"] == sum(
        len(json.loads(line)["prompt_token_ids"]) for line in (tmp_path / "outputs.jsonl").read_text().splitlines()[:5]
    )
    rows = [json.loads(line) for line in (tmp_path / "outputs.jsonl").read_text().splitlines()]
    assert [(row["token_ids"], row["text"], row["logprobs"]) for row in rows] == [([], "", [])] * 10


def test_draft_longer_than_the_context(model, head, prompts, tmp_path, capsys) -> None:
    arguments = ("--model", model, "--head", head, "--prompts", prompts, "--out", tmp_path / "r")
    code, _, error = run(capsys, *arguments, "--num-draft-tokens", 500)
    assert "context of 96 tokens" in one_line(code, error) and "500" in error


def test_prompts_longer_than_the_context_are_named_and_the_others_go_on(model, tmp_path, capsys) -> None:
    path = tmp_path / "long.jsonl"
    long, short = json.dumps({"prompt": "w1 " * 200}), json.dumps({"prompt": "w1 w2"})
    path.write_text(f"{short}\n{long}\n{short}\n")
    arguments = (
        "--model",
        model,
        "--method",
        "none",
        "--prompts",
        path,
        "--max-new-tokens",
        4,
        "--out",
        tmp_path / "r",
    )
    code, _, error = run(capsys, *arguments)
    assert code == 0 and "long.jsonl:2 is left out" in error
    assert json.loads((tmp_path / "r" / "report.json").read_text())["num_prompts"] == 2
    path.write_text(f"{long}\n")
    code, _, error = run(capsys, *arguments, "--overwrite")
    assert "no prompt shorter than the context of 96" in one_line(code, error) and "long.jsonl:1" in error


def test_an_earlier_report_is_not_overwritten(model, prompts, tmp_path, capsys) -> None:
    (tmp_path / "report.json").write_text("precious")
    arguments = ("--model", model, "--method", "none", "--prompts", prompts, "--out", tmp_path)
    code, _, error = run(capsys, *arguments)
    assert "--overwrite" in one_line(code, error)
    assert (tmp_path / "report.json").read_text() == "precious"


def test_a_full_disk_keeps_the_earlier_report(model, prompts, tmp_path, capsys, monkeypatch) -> None:
    (tmp_path / "report.json").write_text("precious")

    def full(path, target, measured) -> None:
        path.write_text("part")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(eval_folder, "write_outputs", full)
    arguments = ("--model", model, "--method", "none", "--prompts", prompts, "--max-new-tokens", 2, "--out", tmp_path)
    code, _, error = run(capsys, *arguments, "--overwrite")
    assert "No space left on device; free space" in one_line(code, error)
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    assert (tmp_path / "report.json").read_text() == "precious"


def test_head_of_another_target(model, prompts, tensors, tmp_path, capsys) -> None:
    other = tmp_path / "other"
    rand_llama(5, max_position_embeddings=96).save_pretrained(other)
    tokenizer().save_pretrained(other)
    head = write_head(tmp_path / "h", tensors)
    code, _, error = run(capsys, "--model", other, "--head", head, "--prompts", prompts, "--out", tmp_path / "r")
    assert "num_layers 4" in one_line(code, error) and "has 5" in error


@pytest.mark.parametrize(
    "content,expected",
    [
        (b"", "empty file"),
        (b'{"prompt": "w1"', "not valid JSON"),
        (b'{"prompt": "\xff"}\n', "not UTF-8"),
        (b'{"text": "w1"}\n', "expected one of prompt"),
    ],
    ids=["empty", "truncated", "not-utf8", "no-prompt"],
)
def test_bad_prompt_files(content: bytes, expected: str, model, tmp_path, capsys) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    arguments = ("--model", model, "--method", "none", "--prompts", path, "--out", tmp_path / "r")
    code, _, error = run(capsys, *arguments)
    assert expected in one_line(code, error)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    "flags,expected",
    [
        (["--temperature", "-1"], "temperature"),
        (["--top-p", "0"], "top_p"),
        (["--min-p", "2"], "min_p"),
        (["--repetition-penalty", "0"], "repetition_penalty"),
        (["--presence-penalty", "nan"], "presence_penalty"),
        (["--stop", ""], "stop must be"),
        (["--batch-size", "0"], "--batch-size"),
        (["--max-new-tokens", "-1"], "--max-new-tokens must be at least 0"),
        (["--limit", "0"], "--limit must be at least 1"),
        (["--limit", "-3"], "--limit must be at least 1"),
        (["--num-blocks", "0"], "--num-blocks must be at least 1"),
        (["--num-blocks", "1"], "num_blocks must be"),
        (["--num-blocks", "1000000000000"], "lower --num-blocks"),
        (["--num-draft-tokens", "0"], "--num-draft-tokens"),
        (["--max-length", "100000"], "--max-length"),
        (["--device", "toaster"], "--device"),
        (["--device", "cuda:99"], "CUDA devices"),
        (["--method", "medusa"], "--method medusa"),
        (["--prompts", "absent.jsonl"], "absent.jsonl"),
    ],
)
def test_values_out_of_range(flags: list[str], expected: str, model, head, prompts, tmp_path, capsys) -> None:
    arguments = ("--model", model, "--head", head, "--prompts", prompts, "--out", tmp_path / "r", *flags)
    code, _, error = run(capsys, *arguments)
    assert expected in one_line(code, error)


RECORDS = {
    "record-cut": '{"format_version": 1, "config_cl',
    "record-empty": '{"format_version": 1}',
    "record-list": "[]",
    "record-target": '{"format_version": 1, "config_class": "spectrain.heads.eagle3:Eagle3Config", "config": {}}',
}


@pytest.mark.parametrize("fault", ["missing", "extra", "shape", "no-folder", "no-record", *RECORDS])
def test_broken_head_folders(fault: str, model, prompts, tensors, tmp_path, capsys) -> None:
    from safetensors.torch import load_file, save_file

    head = write_head(tmp_path / "h", tensors)
    weights = load_file(head / "model.safetensors")
    if fault in RECORDS:
        (head / "spectrain.json").write_text(RECORDS[fault])
    elif fault == "missing":
        weights.pop("fc.weight")
    elif fault == "extra":
        weights["stray.weight"] = torch.zeros(2)
    elif fault == "shape":
        weights["fc.weight"] = torch.zeros(3, 3)
    elif fault == "no-record":
        (head / "spectrain.json").unlink()
    save_file(weights, head / "model.safetensors")
    path = tmp_path / "nowhere" if fault == "no-folder" else head
    code, _, error = run(capsys, "--model", model, "--head", path, "--prompts", prompts, "--out", tmp_path / "r")
    line = one_line(code, error)
    assert "Error" not in line
    expected = {"missing": "missing fc.weight", "extra": "stray.weight", "shape": "fc.weight has shape [3, 3]"}
    expected["record-target"] = "missing ['draft_vocab_size'"
    assert expected.get(fault, str(path)) in line


def test_free_drafts_at_a_given_length_need_no_head_and_are_not_called_lossless(model, prompts, tmp_path, capsys):
    arguments = ("--model", model, "--prompts", prompts, "--max-new-tokens", 48, "--ignore-eos", "--batch-size", 5)
    synthetic = ("--method", "synthetic", "--num-draft-tokens", 4, "--verification", "synthetic")
    code, shown, _ = run(capsys, *arguments, *synthetic, "--acceptance-length", 3, "--out", tmp_path / "r")
    assert code == 0 and "not lossless, not checked" in shown
    report = json.loads((tmp_path / "r" / "report.json").read_text())
    assert report["method"] == "synthetic" and report["lossless"]["mode"] == "synthetic"
    assert report["acceptance_length"] == pytest.approx(3, abs=0.2), "all but the last steps keep two drafts"
    assert report["settings"]["verification"] == "synthetic" and report["settings"]["acceptance_length"] == 3


def test_free_drafts_pass_the_check_where_they_are_judged(model, prompts, tmp_path, capsys):
    arguments = ("--model", model, "--prompts", prompts, "--max-new-tokens", 8, "--method", "synthetic")
    code, _, _ = run(capsys, *arguments, "--out", tmp_path / "r")
    report = json.loads((tmp_path / "r" / "report.json").read_text())
    assert code == 0 and report["lossless"]["passed"] and report["num_draft_tokens"] == 3


def test_block_verification_passes_the_law_test(model, head, prompts, tmp_path, capsys):
    arguments = ("--model", model, "--head", head, "--prompts", prompts, "--max-new-tokens", 24, "--ignore-eos")
    sampled = ("--temperature", 1, "--draft-sampling", "probabilistic", "--verification", "block")
    code, _, _ = run(capsys, *arguments, *sampled, "--out", tmp_path / "r")
    report = json.loads((tmp_path / "r" / "report.json").read_text())
    assert code == 0 and report["lossless"]["passed"]
    assert [row["block_position"] for row in report["lossless"]["details"]] == [0], (
        "only the pooled law is the target's"
    )


@pytest.mark.parametrize(
    "options, said",
    [
        (("--method", "synthetic", "--acceptance-length", 2), "are for --verification synthetic"),
        (("--method", "synthetic", "--verification", "synthetic"), "found neither"),
        (("--method", "none", "--verification", "synthetic", "--acceptance-length", 2), "found --method none"),
        (("--method", "synthetic", "--verification", "synthetic", "--acceptance-rates", ".5"), "3 drafts need"),
        (("--method", "synthetic", "--verification", "synthetic", "--acceptance-rates", "x.json"), "no such file"),
        (("--method", "synthetic", "--verification", "synthetic", "--acceptance-length", 5), "between 1 and 4"),
    ],
)
def test_wrong_acceptance_gets_one_line(model, prompts, tmp_path, capsys, options, said):
    code, _, error = run(capsys, "--model", model, "--prompts", prompts, *options, "--out", tmp_path / "r")
    assert code == 2 and said in error.splitlines()[-1] and "Traceback" not in error


def test_free_drafts_take_no_head(model, head, prompts, tmp_path, capsys):
    options = ("--model", model, "--prompts", prompts, "--head", head, "--method", "synthetic")
    code, _, error = run(capsys, *options, "--out", tmp_path / "r")
    assert code == 2 and "drop --head" in error
