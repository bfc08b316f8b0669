"""`spectrain bench heads` on a tiny target: one table however the work is split, nothing in it that did not pass."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spectrain import cli
from spectrain.commands.benchmarks.heads import measuring
from spectrain.commands.benchmarks.heads import plan as plans
from spectrain.commands.benchmarks.heads import run as job
from spectrain.commands.benchmarks.heads.estimate import Clock
from spectrain.commands.benchmarks.heads.measuring import Bench
from spectrain.commands.benchmarks.heads.table import fill, loads_and_sets, markdown
from spectrain.commands.benchmarks.heads.work import Load, Work
from spectrain.commands.benchmarks.record import BenchError, Record
from spectrain.commands.extract import extract
from spectrain.commands.fit import Screen
from spectrain.infer import stages
from spectrain.infer.evaluate import Evaluation, as_verified
from spectrain.tests.infer.test_evaluate import accept_everything
from spectrain.tests.loop import save_target, write_chats
from spectrain.tests.models import rand_llama

SIZES = ("--token-budget", 500, "--sequence-length", 64, "--num-prompts", 3, "--max-new-tokens", 12, "--batch-sizes", 3)
TWO = ("--recipes", "medusa,eagle3", "--num-draft-tokens", 2, "--set", "eagle3:head.draft_vocab_size=64")
MEASURED_TIMES = ("tokens_per_second", "speedup", "noise_floor", "break_even_acceptance_length", "calls")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """Target, shards and prompts, as arguments."""
    folder = tmp_path_factory.mktemp("inputs")
    target = save_target(rand_llama(4, max_position_embeddings=96), folder / "target")
    shards = folder / "shards"
    extract(
        model=str(target), data=[write_chats(folder / "c.jsonl")], out=shards, layers="1,2,3", device="cpu",
        dtype="float32",
    )  # fmt: skip
    rows = [json.dumps({"prompt": f"a b {letter}"}) for letter in "klmnop"]
    (folder / "letters.jsonl").write_text("\n".join(rows) + "\n")
    return "--model", target, "--shards", shards, "--prompts", folder / "letters.jsonl"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as leaving:
        cli.main(["bench", "heads", "--device", "cpu", *map(str, arguments)])
    shown = capsys.readouterr()
    return int(leaving.value.code or 0), shown.out, shown.err


@pytest.fixture(scope="module")
def one_call(inputs: tuple[object, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The work folder of two heads, made in one call; tests that change it take a copy."""
    work = tmp_path_factory.mktemp("one") / "work"
    with pytest.raises(SystemExit) as leaving:
        cli.main(["bench", "heads", "--device", "cpu", *map(str, (*inputs, *SIZES, *TWO, "--work", work))])
    assert leaving.value.code == 0
    return work


def table(work: Path) -> dict[str, Any]:
    return json.loads((work / "table.json").read_text())


def without_times(work: Path) -> list[dict[str, Any]]:
    """The table's rows, but for what a clock decides."""
    rows = table(work)["results"]
    for row in rows:
        del row["training_tokens_per_second"], row["checks"]
        for cell in row["measurements"]:
            for name in MEASURED_TIMES:
                del cell[name]
    return rows


def files_of(work: Path) -> dict[str, bytes]:
    """All finished pieces."""
    names = [*work.glob("trained/*.json"), *work.glob("measured/*/*.json"), *work.glob("heads/*/model.safetensors")]
    return {str(path.relative_to(work)): path.read_bytes() for path in names}


def test_the_table_of_one_call(one_call: Path) -> None:
    record = table(one_call)
    assert record["refused"] is None and record["missing"] == [] and record["note"].startswith("CPU figures")
    assert str(one_call.parent) not in (one_call / "table.json").read_text()
    medusa, eagle3 = record["results"]
    assert (medusa["head"], eagle3["head"]) == ("medusa", "eagle3")
    assert medusa["trained_tokens"] == eagle3["trained_tokens"] >= 500
    # heads of 32 x 32 and 97 x 32 with their biases; five of them, since the recipe has more than are measured
    assert medusa["parameters_trained"] == medusa["parameters_stored"] == 5 * (32 * 32 + 32 + 97 * 32)
    assert eagle3["parameters_stored"] > eagle3["parameters_trained"], "d2t and t2d are no parameters"
    for row in record["results"]:
        assert row["num_draft_tokens"] == 2 and row["seeds"] == [0] and row["peak_memory_bytes"] is None
        assert row["training_tokens_per_second"]["mean"] > 0 and row["predicted_acceptance_length"]["mean"] >= 1
        places = [(cell["prompt_set"], cell["temperature"], cell["batch_size"]) for cell in row["measurements"]]
        assert places == [("letters", 0.0, 3), ("letters", 1.0, 3)]
        for cell in row["measurements"]:
            assert cell["acceptance_length"]["mean"] == pytest.approx(1 + sum(cell["acceptance_by_position"]))
            assert all(text.startswith("passed") for text in cell["lossless"]) and cell["num_prompts"] == 3
    assert len(record["plain"]) == 2
    for plain in record["plain"]:
        assert len(plain["tokens_per_second"]) == 3, "twice before the heads, once after them"
    cell, plain = medusa["measurements"][0], record["plain"][0]
    assert plain["prompt_set"] == cell["prompt_set"] and plain["temperature"] == cell["temperature"]
    rates = plain["tokens_per_second"]
    assert cell["speedup"]["mean"] == pytest.approx(cell["tokens_per_second"]["mean"] / (sum(rates) / 3))
    assert cell["noise_floor"] == pytest.approx((max(rates) - min(rates)) / (sum(rates) / 3))
    text = (one_call / "table.md").read_text()
    assert "### letters, temperature 1" in text and text.count("| plain | 0 |") == 2 and "noise" in text


def test_two_calls_give_the_table_of_one(inputs, one_call, tmp_path, capsys) -> None:
    arguments = (*inputs, *SIZES, *TWO, "--work", tmp_path)
    code, shown, error = run(capsys, *arguments, "--only", "medusa")
    assert code == 0, error
    assert "eagle3-0: training" in str(table(tmp_path)["missing"]) and "Not run yet: 1 pieces" in shown
    assert [row["head"] for row in table(tmp_path)["results"]] == ["medusa"]
    first = files_of(tmp_path)
    code, shown, error = run(capsys, *arguments)
    assert code == 0, error
    assert "train eagle3-0: " in shown and "train medusa" not in shown and "in all about" in shown
    assert {name: text for name, text in files_of(tmp_path).items() if name in first} == first
    assert without_times(tmp_path) == without_times(one_call)
    assert len(table(tmp_path)["calls"]) == 2
    assert {name: files_of(tmp_path)[name] for name in first if "safetensors" in name}.items() <= files_of(
        one_call
    ).items()


def test_what_is_finished_is_not_done_again(inputs, one_call, tmp_path, capsys, monkeypatch) -> None:
    work = shutil.copytree(one_call, tmp_path / "work")
    shutil.rmtree(work / "heads")
    monkeypatch.setattr(job, "train", None)
    monkeypatch.setattr(Bench, "measure", None)
    before = files_of(work)
    code, shown, error = run(capsys, *inputs, *SIZES, *TWO, "--work", work)
    assert code == 0, error
    assert "everything is finished" in shown and files_of(work) == before
    assert without_times(work) == without_times(one_call)


def test_a_head_that_is_gone_is_not_replaced_in_silence(inputs, one_call, tmp_path, capsys) -> None:
    work = shutil.copytree(one_call, tmp_path / "work")
    (work / "heads/medusa-0/model.safetensors").unlink()
    before = files_of(work)
    code, _, error = run(capsys, *inputs, *SIZES, *TWO, "--num-draft-tokens", "2,3", "--work", work)
    assert code == 2 and "medusa-0 must hold the head that was trained" in error and error.count("\n") == 1
    assert files_of(work) == before


def test_what_drafting_changed_is_refused_and_the_rest_goes_on(inputs, one_call, tmp_path, capsys, monkeypatch) -> None:
    work = shutil.copytree(one_call, tmp_path / "work")
    before = files_of(work)
    measure, verify = Bench.measure, stages.verify_drafts
    with monkeypatch.context() as broken:

        def wrong_for_medusa(self: Bench, run: plans.Run, *rest: Any) -> Any:
            broken.setattr(stages, "verify_drafts", accept_everything if run.head.label == "medusa" else verify)
            return measure(self, run, *rest)

        broken.setattr(Bench, "measure", wrong_for_medusa)
        arguments = (*inputs, *SIZES, *TWO, "--temperatures", 0, "--num-draft-tokens", "2,1", "--work", work)
        code, shown, error = run(capsys, *arguments)
    assert code == 2 and error.count("\n") >= 1
    assert "no figure without a passing check: medusa-0, k1-b3-t0-letters: FAILED" in error.splitlines()[-1]
    assert "medusa-0, k1-b3-t0-letters: refused" in shown
    new = files_of(work).keys() - before.keys()
    assert new == {"measured/eagle3-0/k1-b3-t0-letters.json"}
    record = table(work)
    assert [(row["head"], row["num_draft_tokens"]) for row in record["results"]] == [
        ("medusa", 2), ("eagle3", 1), ("eagle3", 2),
    ]  # fmt: skip
    assert "medusa-0, k1-b3-t0-letters" in record["refused"]
    code, _, error = run(capsys, *arguments)
    assert code == 0, error
    assert table(work)["refused"] is None and len(table(work)["results"]) == 4


def test_texts_that_low_precision_parts_are_compared_with_plain_decoding_at_as_many_rows(
    inputs, one_call, tmp_path, capsys, monkeypatch
) -> None:
    """Two heads, one further plain run: what it shows is shared."""
    work = shutil.copytree(one_call, tmp_path / "work")
    batches: list[int] = []

    def count(evaluation: Evaluation) -> Evaluation:
        batches.append(as_verified(evaluation).batch_size)
        return as_verified(evaluation)

    monkeypatch.setattr(measuring, "needs_plain_differences", lambda *arguments: True)
    monkeypatch.setattr(measuring, "as_verified", count)
    arguments = (*inputs, *SIZES, *TWO, "--temperatures", 0, "--num-draft-tokens", 1, "--work", work)
    code, _, error = run(capsys, *arguments)
    assert code == 0, error
    assert set(batches) == {3 * (1 + 1)} and len(batches) == 2, "once for the engine, once for the texts"
    assert all(row["measurements"][0]["lossless"] == ["passed: 3/3 prompts equal"] for row in table(work)["results"])


def test_a_stored_measurement_that_had_not_passed_makes_no_row(one_call, tmp_path, inputs, capsys) -> None:
    work = shutil.copytree(one_call, tmp_path / "work")
    path = next(work.glob("measured/eagle3-0/*.json"))
    measured = json.loads(path.read_text())
    path.write_text(json.dumps({**measured, "lossless": {**measured["lossless"], "passed": False}}))
    code, _, error = run(capsys, *inputs, *SIZES, *TWO, "--work", work)
    assert code == 2 and "no figure without a passing check" in error


def test_a_killed_training_goes_on_to_the_same_head(inputs, one_call, tmp_path, capsys, monkeypatch) -> None:
    arguments = (*inputs, *SIZES, *TWO, "--work", tmp_path, "--only", "eagle3")

    def killed(self: Screen, progress: Any) -> None:
        if progress.step == progress.total_steps and "loss" in progress.values:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Screen, "progress", killed)
        code, _, _ = run(capsys, *arguments)
    assert code == 130 and not list(tmp_path.glob("trained/*"))
    monkeypatch.setattr(Bench, "measure", lambda *arguments: [])
    code, _, error = run(capsys, *arguments)
    assert code == 0 and "resuming at optimizer step" in error
    name = "heads/eagle3-0/model.safetensors"
    assert files_of(tmp_path)[name] == files_of(one_call)[name]


def test_a_model_that_others_start_from_is_made_for_them(inputs, tmp_path, capsys) -> None:
    heads = ("--recipes", "pard", "--set", "draft_model:head.num_layers=2", "--num-draft-tokens", 1)
    more = ("--more-draft-tokens", 3, "--temperatures", 0)
    code, shown, error = run(capsys, *inputs, *SIZES, *heads, *more, "--only", "pard", "--work", tmp_path)
    assert code == 0, error
    rows = table(tmp_path)["results"]
    assert [(row["head"], row["num_draft_tokens"]) for row in rows] == [("pard", 1), ("pard", 3)]
    assert rows[0]["starts_from"] == ["draft_model-0"] and "pard (from draft_model-0)" in shown
    assert not (tmp_path / "measured" / "draft_model-0").exists()
    config = json.loads((tmp_path / "heads/pard-0/spectrain.json").read_text())["config"]
    assert config["num_layers"] == 2, "the small model's, not a sixth of the target's"


def test_no_time_begins_nothing(inputs, tmp_path, capsys) -> None:
    code, shown, _ = run(capsys, *inputs, *SIZES, *TWO, "--work", tmp_path, "--time-limit", 0.01)
    assert code == 0 and "run the command again to go on" in shown
    assert files_of(tmp_path) == {} and "table:" not in shown


def test_other_settings_do_not_mix(inputs, one_call, tmp_path, capsys) -> None:
    work = shutil.copytree(one_call, tmp_path / "work")
    for changes, said in (
        (("--max-new-tokens", 9), "was begun with max_new_tokens = 12, this call says 9"),
        (("--set", "medusa:optimizer.lr=1e-3"), "medusa-0 was trained with optimizer.lr = 0.002, this call says 0.001"),
        (("--set", "medusa:optimizer.lr=1e-3", "--only", "eagle3"), None),
    ):
        code, _, error = run(capsys, *inputs, *SIZES, *TWO, "--work", work, *changes)
        assert code == (2 if said else 0)
        assert said is None or (said in error and error.count("\n") == 1)
    other = tmp_path / "letters.jsonl"
    other.write_text('{"prompt": "q"}\n')
    code, _, error = run(capsys, *inputs[:4], "--prompts", f"letters={other}", *SIZES, *TWO, "--work", work)
    assert code == 2 and "was begun with prompts.letters" in error


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("--recipes", "medusa,eagle4"), "no recipe 'eagle4': did you mean eagle"),
        (("--recipes", "medusa,medusa"), "found medusa twice"),
        (("--recipes", "medusa", "--only", "eagle3"), "--only eagle3: expected some of medusa"),
        (("--recipes", "medusa", "--seeded", "eagle3"), "--seeded eagle3"),
        (("--recipes", "medusa", "--prompts", "x=/nowhere.jsonl"), "prompt set x: expected a JSONL file"),
        (("--recipes", "medusa", "--token-budget", "0"), "--token-budget must be at least 1, found 0"),
        (("--recipes", "medusa", "--seeds", "0"), "--seeds must be at least 1"),
        (("--recipes", "medusa", "--time-limit", "nan"), "--time-limit takes a number of seconds above 0, found nan"),
        (("--recipes", "medusa", "--time-limit", "-3"), "--time-limit takes a number of seconds above 0, found -3"),
        (("--recipes", "medusa", "--batch-sizes", "1,x"), "--batch-sizes takes whole numbers"),
        (("--recipes", "medusa", "--temperatures", "-1"), "--temperatures takes numbers"),
        (("--recipes", "medusa", "--num-draft-tokens", ""), "--num-draft-tokens takes whole numbers"),
        (("--recipes", "medusa", "--set", "data.seed=3"), "data.seed is the same for every head"),
        (("--recipes", "medusa", "--set", "eagle:head.x=3"), "--set eagle: expected some of medusa"),
        (("--recipes", "draft_model=medusa,pard"), "draft_model is the label of the small model"),
        (("--recipes", "medusa", "--set", "head.hat=3"), "unknown key head.hat"),
        (("--recipes", "medusa", "--set", "head.num_heads=3"), "medusa must draft 5 tokens, one a head"),
        (("--recipes", "eagle3", "--set", "head.layer_ids=[0]"), "shards were captured at layers"),
    ],
)
def test_wrong_options_get_one_line(inputs, tmp_path, capsys, arguments, said) -> None:
    code, _, error = run(capsys, *inputs, "--work", tmp_path / "work", *SIZES, *arguments)
    assert code == 2 and said in error and error.count("\n") == 1
    assert not (tmp_path / "work").exists()


def parsed(names: str | None, *overrides: str, seeds: tuple[int, ...] = (0,), seeded: tuple[str, ...] = (), k: int = 5):
    return plans.parse_heads(names, overrides, seeds, seeded, k, ())


def test_heads_by_name() -> None:
    heads = {head.label: head for head in parsed(None)}
    assert set(heads) == {
        "eagle", "eagle3", "medusa", "mlp_speculator", "mtp", "dflash", "dspark", "pard", "peagle", "draft_model",
    }  # fmt: skip
    assert {label for label, head in heads.items() if head.drafts_in_one_pass} == {"dflash", "dspark", "pard", "peagle"}
    assert {label for label, head in heads.items() if head.needs_model} == {"pard", "draft_model"}
    assert heads["mlp_speculator"].overrides == ("head.num_heads=5",), "the recipe has three"
    assert heads["medusa"].overrides == ()
    two = parsed("eagle31=eagle3,medusa", "eagle31:head.fc_norm=true", "optimizer.lr=1e-3", "medusa:optimizer.lr=2e-3")
    assert [(head.label, head.recipe) for head in two] == [("eagle31", "eagle3"), ("medusa", "medusa")]
    assert two[0].overrides == ("head.fc_norm=true", "optimizer.lr=1e-3")
    assert two[1].overrides == ("optimizer.lr=1e-3", "optimizer.lr=2e-3")


def test_settings_of_the_small_model_reach_it_or_are_refused() -> None:
    override = "draft_model:head.num_layers=2"
    for names in ("pard", "pard,draft_model", "draft_model"):
        heads = {head.label: head for head in parsed(names, override)}
        assert heads["draft_model"].overrides == ("head.num_layers=2",)
    for names in ("medusa", "pard,small=draft_model"):
        with pytest.raises(BenchError, match="--set draft_model: .*expected some of"):
            parsed(names, override)


def test_seeds_go_to_the_heads_that_ask_for_them() -> None:
    heads = parsed("pard,medusa", seeds=(3, 4), seeded=("pard",))
    assert [(head.label, head.seeds, head.measured) for head in heads] == [
        ("pard", (3, 4), True), ("medusa", (3,), True), ("draft_model", (3, 4), False),
    ]  # fmt: skip


def test_longer_drafts_are_for_first_seeds_of_heads_that_draft_in_one_pass() -> None:
    dflash, medusa = parsed("dflash,medusa", seeds=(3, 4), seeded=("dflash",))
    plan: Any = SimpleNamespace(
        num_draft_tokens=(5,), more_draft_tokens=(7, 12), batch_sizes=(1, 16), temperatures=(0.0,), prompts={"s": None}
    )
    asked = {seed: plans.Plan.draft_tokens(plan, dflash, seed) for seed in (None, 3, 4)}
    assert asked == {None: (5, 7, 12), 3: (5, 7, 12), 4: (5,)} and plans.Plan.draft_tokens(plan, medusa) == (5,)
    assert [load.batch_size for load, _ in loads_and_sets(plan, dflash, 5)] == [1, 16]
    assert [load.batch_size for load, _ in loads_and_sets(plan, dflash, 12)] == [16]


def test_prompt_sets(tmp_path) -> None:
    for name in ("a.jsonl", "b.jsonl.gz", "notes.txt"):
        (tmp_path / name).write_text("")
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    assert plans.parse_prompts([str(tmp_path)]) == {"a": a, "b": b}
    assert plans.parse_prompts([f"x={a}", str(b)]) == {"x": a, "b": b}
    for wrong, said in (
        ([str(a), f"a={b}"], "given twice"),
        ([f"x y={a}"], "without blanks"),
        ([str(tmp_path / "c")], "found none"),
    ):
        with pytest.raises(BenchError, match=said):
            plans.parse_prompts(wrong)


def stored(work: Work, run: plans.Run, load: Load, name: str, call: str, rate: float, length: float) -> None:
    work.save_measured(
        run, load, name,
        {
            "call": call, "acceptance_length": length, "acceptance_by_position": [length - 1], "num_prompts": 2,
            "tokens_per_second": rate, "baseline_tokens_per_second": 1.0, "noise_floor": 0.0, "verdict": "passed",
            "break_even_acceptance_length": None, "lossless": {"passed": True},
        },
    )  # fmt: skip


def test_seeds_become_mean_and_spread_and_ratios_stay_within_their_calls(tmp_path) -> None:
    head = parsed("medusa", seeds=(0, 1), seeded=("medusa",), k=1)[0]
    plan: Any = SimpleNamespace(
        heads=(head,),
        batch_sizes=(4,),
        num_draft_tokens=(1,),
        temperatures=(0.0,),
        prompts={"s": None},
        draft_tokens=lambda head, seed=None: (1,),
    )
    work, load = Work(tmp_path), Load(1, 4, 0.0)
    for seed, (call, rate, length, plain) in enumerate((("one", 30.0, 1.5, [9.0, 11.0]), ("two", 88.0, 1.7, [40.0]))):
        run = plans.Run(head, seed)
        trained = {
            "seed": seed,
            "tokens": 7,
            "steps": 1,
            "parameters": {"trained": 3, "stored": 4},
            "starts_from": None,
        }
        rates = {"tokens_per_second": 10.0 + seed, "peak_memory_bytes": None, "predicted_acceptance_length": None}
        work.save_trained(run, trained | rates)
        stored(work, run, load, "s", call, rate, length)
        key = {"prompt_set": "s", "batch_size": 4, "temperature": 0.0, "tokens_per_second": plain}
        work.save_plain(call, {"environment": {"hardware": "H"}, "runs": {"s b4 t0": key}})
    record = Record("heads", torch.device("cpu"), {})
    fill(record, plan, work)
    (row,) = record.rows
    (cell,) = row["measurements"]
    assert cell["speedup"] == {"mean": pytest.approx((3.0 + 2.2) / 2), "min": 2.2, "max": 3.0}
    assert cell["acceptance_length"] == {"mean": pytest.approx(1.6), "min": 1.5, "max": 1.7}
    assert cell["acceptance_by_position"] == [pytest.approx(0.6)] and cell["noise_floor"] == pytest.approx(0.2)
    assert row["seeds"] == [0, 1] and row["training_tokens_per_second"]["mean"] == 10.5
    assert row["predicted_acceptance_length"] is None
    settings = {"model": "m", "token_budget": 7, "sequence_length": 8, "num_prompts": 2, "max_new_tokens": 3}
    text = markdown(record.as_json() | {"settings": settings})
    assert "| plain | 0 | 1 |  | 10 / 40 (noise 20.0 %) |  |" in text
    assert "| medusa | 1 | 1.60 ± 0.10 | .60 | 59 ± 29 (2.60 ± 0.40 x) | passed |" in text


def test_estimates_are_scaled_by_how_wrong_they_were() -> None:
    clock = Clock(100.0)
    assert clock.has_room(99.0) and not clock.has_room(101.0)
    clock.note(10.0, 30.0)
    assert clock.expect(20.0) == pytest.approx(60.0) and not clock.has_room(34.0)
    assert clock.has_room(30.0) and not clock.has_room(30.0, 11.0)
    assert Clock(None).has_room(1e9)
