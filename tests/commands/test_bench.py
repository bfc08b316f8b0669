"""`spectrain bench` at tiny sizes on a CPU: every subcommand, and no figure without a passing check."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from spectrain import cli
from spectrain.commands.benchmarks import attention, checks, drafting, policy, rejection, targets
from spectrain.commands.benchmarks import decode as decode_benchmark
from spectrain.commands.benchmarks.record import BenchError, Check, Record, numbers
from spectrain.commands.benchmarks.static_cache import StaticCache
from spectrain.commands.benchmarks.timing import Timing, time_calls
from spectrain.commands.benchmarks.verify import accepted_as_asked
from spectrain.infer.config import EngineConfig
from spectrain.infer.engine import Engine
from spectrain.infer.proposers.none import NoneProposer
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.statistics import EngineStatistics
from spectrain.infer.target import Target
from spectrain.kernels import dispatch
from spectrain.kernels.records import AttentionInputs
from spectrain.tests.models import rand_llama

CPU = torch.device("cpu")
TINY = ("--shape", "tiny", "--context", "20", "--steps", "2")


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measured bandwidth is of no interest here."""
    monkeypatch.setattr("spectrain.commands.benchmarks.timing.COPIED_BYTES", {"cpu": 2**20})


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as leaving:
        cli.main(["bench", *map(str, arguments), "--device", "cpu"])
    shown = capsys.readouterr()
    return int(leaving.value.code or 0), shown.out, shown.err


def results(path: Path) -> list[dict[str, Any]]:
    record = json.loads(path.read_text())
    assert record["date"] and record["environment"]["torch"] == torch.__version__
    assert record["note"].startswith("CPU figures") and record["refused"] is None
    assert str(path.parent) not in path.read_text()
    assert all(row["checks"] for row in record["results"])
    return record["results"]


def test_decode(tmp_path, capsys) -> None:
    out = tmp_path / "d.json"
    code, shown, error = run(capsys, "decode", *TINY, "--batch-sizes", "3,1", "--transformers", "--out", out)
    assert code == 0, error
    assert "CPU figures" in shown and "to floor" in shown
    rows = results(out)
    assert [row["batch"] for row in rows] == [1, 3]
    for row in rows:
        assert row["to_floor"] == pytest.approx(row["step_ms"] / row["floor_ms"])
        assert row["tokens_per_second"] == pytest.approx(1000 * row["batch"] / row["step_ms"], rel=0.8)
        assert row["gpu_ms"] is None and row["transformers_tokens_per_second"] > 0
        assert row["checks"]["recorded = eager"].startswith(f"{row['batch']} of {row['batch']} texts equal")
        assert row["checks"]["engine = transformers"].startswith(f"{row['batch']} of {row['batch']} texts equal")


def test_decode_of_a_model_folder(tmp_path, capsys) -> None:
    rand_llama(2, max_position_embeddings=512).save_pretrained(tmp_path / "model")
    out = tmp_path / "d.json"
    arguments = ("--model", tmp_path / "model", *TINY[2:], "--batch-sizes", "2")
    code, _, error = run(capsys, "decode", *arguments, "--out", out)
    assert code == 0, error
    assert json.loads(out.read_text())["settings"]["model"] == "model"
    assert results(out)[0]["batch"] == 2


def test_verify(tmp_path, capsys) -> None:
    out = tmp_path / "v.json"
    sizes = ("--batch-sizes", "1,2", "--rejection-batch", 3, "--vocab-size", 5000)
    code, _, error = run(capsys, "verify", *TINY[:4], "--steps", 8, *sizes, "--out", out)
    assert code == 0, error
    pipeline = [row for row in results(out) if "rejection" in row]
    steps = [row for row in results(out) if "rejection" not in row]
    assert [row["rejection"] for row in pipeline] == [case.name for case in rejection.CASES]
    assert all(row["to_one_read"] > 0 and row["twin_to_pipeline"] > 0 for row in pipeline)
    assert [row["batch"] for row in steps] == [1, 2]
    for row in steps:
        assert row["acceptance_length"] == pytest.approx(3.5, abs=0.3)
        assert row["verify_to_plain"] == pytest.approx(row["verify_ms"] / row["plain_ms"])
        assert row["realised_share"] == pytest.approx(row["speedup"] / row["possible_speedup"])
        assert row["checks"]["drafted = plain"].startswith(f"{row['batch']} of {row['batch']} texts equal")


def test_attention(tmp_path, capsys) -> None:
    out = tmp_path / "a.json"
    code, _, error = run(capsys, "attention", "--loads", "1x40x1,3x33x5", "--heads", "4,2,16", "--out", out)
    assert code == 0, error
    first, second = results(out)
    assert (first["context"], second["rows"]) == (40, 5)
    assert first["kv_mb"] == pytest.approx(2 * 40 * 2 * 16 * 4 / 1e6)
    assert first["of_copy_bandwidth"] == pytest.approx(first["kv_mb"] / first["us"] / first["copy_tb_per_s"])


def test_policy(tmp_path, capsys, monkeypatch) -> None:
    for name, value in (("SKIPPED", 4), ("TIMED", 8), ("REPEATS", 2), ("LEARNED_REQUEST_STEPS", 16)):
        monkeypatch.setattr(policy, name, value)
    out = tmp_path / "p.json"
    rates = ("--acceptance-rates", ".9,.7,.6", "--num-draft-tokens", 3)
    code, _, error = run(capsys, "policy", *TINY[:4], "--concurrency", "2,3", *rates, "--out", out)
    assert code == 0, error
    rows = results(out)
    assert [(row["rates"], row["requests"]) for row in rows] == [(".9,.7,.6", 2), (".9,.7,.6", 3)]
    for row in rows:
        best = max(1.0, row["fixed_to_none"])
        assert row["adaptive_to_best"] == pytest.approx(row["adaptive_to_none"] / best)
        assert 0 <= row["drafts_verified_a_request"] <= 3


def test_drafting(tmp_path, capsys) -> None:
    out = tmp_path / "d.json"
    code, shown, error = run(capsys, "drafting", *TINY, "--requests", 3, "--context", 300, "--out", out)
    assert code == 0, error
    host, device = results(out)
    assert (host["method"], device["method"]) == ("ngram", "ngram_gpu") and host["context"] == 300
    for row in (host, device):
        assert row["to_decode_step"] == pytest.approx(row["us"] / 1000 / row["decode_ms"])
        assert row["checks"] == {
            "host = device": "33 of 33 drafts equal",
            "drafts = search from scratch": "12 of 12 drafts equal",
        }
    assert host["drafted_a_request"] == device["drafted_a_request"] > 0.5


@pytest.mark.parametrize("name", ["ngram", "ngram_gpu"])
def test_wrong_ngrams_print_no_figure(name, tmp_path, capsys, monkeypatch) -> None:
    kind = {"ngram": drafting.NgramProposer, "ngram_gpu": drafting.NgramGpuProposer}[name]
    real = kind.propose

    def late(self, step):
        drafts = real(self, step)
        ids = drafts.token_ids
        return drafts._replace(token_ids=ids[:, [-1, *range(ids.shape[1] - 1)]])

    monkeypatch.setattr(kind, "propose", late)
    arguments = ("drafting", *TINY, "--requests", 3, "--context", 300)
    assert "no figure without a passing check: host = device" in refused(tmp_path, capsys, *arguments)


def broken_attention(inputs: AttentionInputs) -> torch.Tensor:
    return REAL_ATTENTION(inputs) * 1.2


def broken_verify(inputs: Any, **keywords: Any) -> Any:
    """Keeps one draft fewer than it may."""
    found = REAL_VERIFY(inputs, **keywords)
    return found._replace(num_emitted=(found.num_emitted - 1).clamp(min=1))


REAL_ATTENTION, REAL_VERIFY = dispatch.paged_attention, dispatch.verify


def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    out = tmp_path / "out.json"
    code, shown, error = run(capsys, *arguments, "--out", out)
    assert code == 2 and not out.exists()
    assert "ms" not in shown and "copy" not in shown, "a figure was printed"
    return error


def test_a_wrong_attention_kernel_prints_no_figure(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(dispatch, "paged_attention", broken_attention)
    error = refused(tmp_path, capsys, "attention", "--loads", "2x20x3", "--heads", "4,2,16")
    assert "no figure without a passing check: attention 2x20x3 = twin" in error


def test_an_attention_kernel_of_nan_prints_no_figure(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(dispatch, "paged_attention", lambda inputs: torch.full_like(inputs.q, torch.nan))
    assert "attention" in refused(tmp_path, capsys, "attention", "--loads", "1x20x1", "--heads", "4,2,16")


def test_a_wrong_rejection_kernel_prints_no_figure(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(dispatch, "verify", broken_verify)
    arguments = ("verify", *TINY, "--rejection-batch", 3, "--vocab-size", 500)
    assert "no figure without a passing check: rejection" in refused(tmp_path, capsys, *arguments)


def test_steps_that_say_other_things_than_eager_ones_print_no_figure(tmp_path, capsys, monkeypatch) -> None:
    forward, build = Target.forward, decode_benchmark._build
    eager_now = [True]

    def note(*arguments: Any, eager: bool) -> Engine:
        eager_now[0] = eager
        return build(*arguments, eager=eager)

    def wrong(self: Target, batch: Any) -> Any:
        output = forward(self, batch)
        return output if eager_now[0] else output._replace(logits=output.logits.roll(1, dims=-1))

    monkeypatch.setattr(decode_benchmark, "_build", note)
    monkeypatch.setattr(Target, "forward", wrong)
    error = refused(tmp_path, capsys, "decode", *TINY, "--batch-sizes", "1")
    assert "recorded = eager: 0 of 1 texts equal" in error


def test_rows_that_passed_are_kept_when_a_later_one_is_refused(tmp_path, capsys, monkeypatch) -> None:
    def breaks_when_long(inputs: AttentionInputs) -> torch.Tensor:
        return (broken_attention if inputs.max_seq_len > 30 else REAL_ATTENTION)(inputs)

    monkeypatch.setattr(dispatch, "paged_attention", breaks_when_long)
    out = tmp_path / "a.json"
    loads = ("--loads", "1x20x1,1x40x1,1x21x1", "--heads", "4,2,16")
    code, _, error = run(capsys, "attention", *loads, "--out", out)
    record = json.loads(out.read_text())
    assert code == 2 and "1x40x1" in error and "1x40x1" in record["refused"]
    assert [row["context"] for row in record["results"]] == [20]


def test_a_row_needs_a_check_that_passed() -> None:
    record = Record("attention", CPU, {})
    with pytest.raises(AssertionError):
        record.add({"ms": 1.0}, [])
    with pytest.raises(BenchError, match="texts: 1 of 2"):
        record.add({"ms": 1.0}, [Check("twin", True, "equal"), Check("texts", False, "1 of 2")])
    assert record.rows == []


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("decode",), "--model or by --shape, found neither"),
        (("decode", "--shape", "tiny", "--model", "x"), "found both"),
        (("decode", "--shape", "9b"), "must be one of tiny, 1b, 8b"),
        (("decode", "--shape", "tiny", "--batch-sizes", "1,x"), "--batch-sizes takes whole numbers"),
        (("decode", "--shape", "tiny", "--batch-sizes", "0"), "at least 1"),
        (("decode", "--shape", "tiny", "--steps", "0"), "--steps must be at least 1"),
        (("verify", "--shape", "tiny", "--rejection-batch", "-1"), "--rejection-batch must be 0 or more"),
        (("attention", "--loads", "1x2"), "BATCHxCONTEXTxROWS"),
        (("attention", "--loads", "1x2x3"), "at most as many rows"),
        (("attention", "--heads", "5,2,16"), "key heads that divide"),
        (("policy", "--shape", "tiny", "--acceptance-rates", ".5", "--num-draft-tokens", "2"), "2 drafts need"),
        (("verify", "--shape", "tiny", "--acceptance-length", "9", "--rejection-batch", "0"), "lies between 1 and 6"),
    ],
)
def test_wrong_options_get_one_line(tmp_path, capsys, arguments, said) -> None:
    code, shown, error = run(capsys, *arguments, "--out", tmp_path / "x.json")
    assert code == 2 and said in error and error.count("\n") == 1


def test_an_earlier_record_is_not_replaced_unasked(tmp_path, capsys) -> None:
    out = tmp_path / "a.json"
    out.write_text("{}")
    code, _, error = run(capsys, "attention", "--loads", "1x20x1", "--heads", "4,2,16", "--out", out)
    assert code == 2 and "--overwrite" in error and out.read_text() == "{}"


@pytest.mark.parametrize(
    "out, said",
    [
        ("a.json/b.json", "in a folder that can be written"),
        ("nowhere/b.json", "in a folder that can be written"),
        ("b", "a file whose name ends in .json"),
        ("folder.json", "a file"),
        ("link.json", "a file"),
    ],
)
def test_a_record_that_cannot_be_written_is_refused_before_the_run(out, said, tmp_path, capsys) -> None:
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "folder.json").mkdir()
    for name in ("nowhere", "link.json"):
        (tmp_path / name).symlink_to(tmp_path / "not" / "there")
    code, _, error = run(capsys, "attention", "--loads", "1x20x1", "--heads", "4,2,16", "--out", tmp_path / out)
    assert code == 2 and f"--out must be {said}, found" in error and error.count("\n") == 1


def test_acceptance_far_from_what_was_asked_is_refused() -> None:
    counts = EngineStatistics(
        num_drafts=1000, reached_per_position=[1000, 800, 400], accepted_per_position=[800, 400, 300]
    )
    assert accepted_as_asked(counts, [0.8, 0.4, 0.3]).passed
    assert accepted_as_asked(counts, [0.82, 0.42, 0.3]).passed, "chance"
    assert not accepted_as_asked(counts, [0.9, 0.45, 0.34]).passed
    assert not accepted_as_asked(counts, [0.8, 0.64, 0.48]).passed
    assert not accepted_as_asked(EngineStatistics(), [0.8]).passed


def test_weights_that_a_step_reads() -> None:
    tied, untied = (rand_llama(2, tie_word_embeddings=tie) for tie in (True, False))
    table = 97 * 32 * 4
    everything = sum(p.nbytes for p in tied.parameters())
    assert targets.weight_bytes(tied) == everything
    assert targets.weight_bytes(untied) == everything  # the head instead of the embedding
    assert sum(p.nbytes for p in untied.parameters()) == everything + table


def test_a_shape_has_the_same_weights_each_time() -> None:
    source = targets.Source(model=None, shape="tiny", device=CPU, dtype=torch.float32)
    state = torch.get_rng_state()
    first, second = source.build(), source.build()
    assert torch.equal(state, torch.get_rng_state())
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
    eight = targets.SHAPES["8b"]
    assert (eight["hidden_size"], eight["num_hidden_layers"], eight["vocab_size"]) == (4096, 36, 151_936)


def test_known_text_drafts_are_right_but_for_every_fourth_position() -> None:
    target = Target.from_model(rand_llama(2, max_position_embeddings=64))
    prompts = targets.random_prompts(3, 5, 97)
    params = [SamplingParams(max_tokens=24, ignore_eos=True, seed=i) for i in range(3)]
    config = EngineConfig(num_blocks=60, block_size=4, max_batch_size=3)
    plain = Engine(target, NoneProposer(), config).generate(prompts, params)
    texts = [[*p, *o.token_ids] for p, o in zip(prompts, plain, strict=True)]
    proposer = checks.KnownText(texts, 5, 97, CPU)
    engine = Engine(target, proposer, EngineConfig(num_draft_tokens=5, num_blocks=60, block_size=4, max_batch_size=3))
    drafted = engine.generate(prompts, params)
    assert [o.token_ids for o in drafted] == [o.token_ids for o in plain]
    statistics = engine.statistics
    assert statistics.acceptance_length == pytest.approx(4.0, abs=0.6), "three right drafts, then a wrong one"


def test_transformers_continues_past_end_tokens() -> None:
    source = targets.Source(model=None, shape="tiny", device=CPU, dtype=torch.float32)
    answer = StaticCache.load(source).decode(targets.random_prompts(2, 6, 503), 5)
    assert [len(text) for text in answer.texts] == [5, 5] and answer.tokens_per_second > 0


def test_clocks_take_functions_in_turn() -> None:
    seen: list[int] = []
    timing = time_calls([lambda i=i: seen.append(i) for i in range(3)], CPU, calls=7, repeats=2)
    assert seen == [0, 1, 2] + 3 * [0, 1, 2, 0, 1, 2, 0] and timing.ms >= 0
    assert Timing.of([3.0, 1.0, 2.0]) == Timing(2.0, 1.0)
    assert numbers("1, 16", "--x") == [1, 16]
    assert attention.Load.parse("2x30x4") == attention.Load(2, 30, 4)
