"""`spectrain bench methods` and `data code-edits` on a tiny target."""

import json
from pathlib import Path

import pytest

from spectrain import cli
from spectrain.infer import stages
from spectrain.tests.infer.test_evaluate import accept_everything
from spectrain.tests.loop import save_target
from spectrain.tests.models import rand_llama


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    folder = tmp_path_factory.mktemp("inputs")
    target = save_target(rand_llama(2, max_position_embeddings=96), folder / "target")
    for name in ("first", "second"):
        rows = [json.dumps({"prompt": f"a b {letter} a b"}) for letter in "klmno"]
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    return "--model", target, "--prompts", folder / "first.jsonl", "--prompts", folder / "second.jsonl"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Exit code, and what the command said: on the error stream where it failed."""
    with pytest.raises(SystemExit) as leaving:
        cli.main([*map(str, arguments)])
    code, said = int(leaving.value.code or 0), capsys.readouterr()
    return code, said.err if code else said.out


def bench(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    return run(capsys, "bench", "methods", "--device", "cpu", *arguments)


def test_a_row_a_method_set_and_batch_size(inputs, tmp_path, capsys) -> None:
    out = tmp_path / "m.json"
    sizes = ("--batch-sizes", "1,3", "--limit", 2, "--max-new-tokens", 8)
    code, said = bench(capsys, *inputs, "--method", "ngram,ngram_gpu", *sizes, "--out", out)
    assert code == 0
    record = json.loads(out.read_text())
    key = ("prompt_set", "batch_size", "method", "num_prompts")
    found = {tuple(row[name] for name in key) for row in record["results"]}
    names = ("first", "second")
    methods = ("ngram", "ngram_gpu")
    assert found == {(s, b, m, max(2, b)) for s in names for b in (1, 3) for m in methods}
    assert str(tmp_path) not in out.read_text() and all(row["checks"] for row in record["results"])
    table = out.with_suffix(".md").read_text()
    row = next(r for r in record["results"] if (r["prompt_set"], r["batch_size"], r["method"]) == ("first", 1, "ngram"))
    assert f"| ngram | 3 | {row['speedup']:.2f} x (" in table and table.count("### ") == 2
    assert table[table.index("### ") :] in said, "the tables that were written are those that are shown"
    assert (tmp_path / "m" / "batch-3" / "report.json").is_file()


def test_a_draft_model_is_one_of_the_methods(inputs, tmp_path, capsys) -> None:
    out, target = tmp_path / "m.json", inputs[1]
    sizes = ("--batch-sizes", "1", "--limit", 2, "--max-new-tokens", 8)
    arguments = (*inputs[:4], "--method", "ngram,draft_model", "--draft-model", target, *sizes, "--out", out)
    assert bench(capsys, *arguments)[0] == 0
    record = json.loads(out.read_text())
    (row,) = (row for row in record["results"] if row["method"] == "draft_model")
    assert row["acceptance_length"] > 1, "the target is its own draft model, for the tokens that its tokenizer knows"
    assert record["settings"]["draft_model"] == "target"


def test_a_method_that_changes_the_output_makes_no_row(inputs, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(stages, "verify_drafts", accept_everything)
    out = tmp_path / "m.json"
    sizes = ("--batch-sizes", "2", "--limit", 2, "--max-new-tokens", 24)
    code, error = bench(capsys, *inputs, "--method", "synthetic,ngram", *sizes, "--out", out)
    assert code == 2 and "no figure without a passing check" in error
    rows = json.loads(out.read_text())["results"] if out.exists() else []
    assert not any(row["method"] == "synthetic" for row in rows)


def test_an_earlier_record_is_not_replaced_unasked(inputs, tmp_path, capsys) -> None:
    out = tmp_path / "m.json"
    out.write_text("{}")
    code, error = bench(capsys, *inputs, "--out", out)
    assert code == 2 and "--overwrite" in error and out.read_text() == "{}"


def test_code_edits_quote_the_whole_function(tmp_path, capsys) -> None:
    source, out = tmp_path / "h.jsonl", tmp_path / "new" / "e.jsonl"
    function = {"prompt": "def f(x):\n", "canonical_solution": "    return x\n", "entry_point": "f"}
    source.write_text(json.dumps(function) + "\n" + json.dumps(function | {"task_id": 2}) + "\n")
    assert run(capsys, "data", "code-edits", "--source", source, "--out", out)[0] == 0
    prompts = [json.loads(line)["prompt"] for line in out.read_text().splitlines()]
    assert len(prompts) == 2 and all("```python\ndef f(x):\n    return x\n```" in prompt for prompt in prompts)
    assert prompts[0] != prompts[1]


@pytest.mark.parametrize("text, said", [('{"prompt": "x"}\n', "h.jsonl:1"), ("", "empty")])
def test_files_that_hold_no_functions_get_one_line(tmp_path, capsys, text, said) -> None:
    source, out = tmp_path / "h.jsonl", tmp_path / "e.jsonl"
    source.write_text(text)
    code, error = run(capsys, "data", "code-edits", "--source", source, "--out", out)
    assert code == 2 and said in error and error.count("\n") == 1 and not out.exists()


def test_code_edits_do_not_replace_a_file_unasked(tmp_path: Path, capsys) -> None:
    out = tmp_path / "e.jsonl"
    out.write_text("x")
    code, error = run(capsys, "data", "code-edits", "--source", out, "--out", out)
    assert code == 2 and "--overwrite" in error and out.read_text() == "x"
