"""Whole trainings on tiny shards: what is learned, logged, kept, and refused."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from spectrain.extract.shards import ShardError, ShardSet, TargetIdentity
from spectrain.heads.base import HeadError
from spectrain.heads.folder import load_head
from spectrain.recipes.loader import RecipeError
from spectrain.tests.models import rand_llama, succ_llama
from spectrain.tests.shard_folders import make_document, random_documents, write_shards
from spectrain.tests.train.runs import Recorder, run
from spectrain.train import checkpoint, evaluation, trainer
from spectrain.train.checkpoint import CheckpointFolder
from spectrain.train.evaluation import Evaluation, Validator
from spectrain.train.log import read_metrics
from spectrain.train.schedule import learning_rate
from spectrain.train.settings import OptimizerSettings
from spectrain.train.step import Stepper
from spectrain.train.trainer import FrozenParameterWarning, TrainingError
from spectrain.train.vocabulary import VocabularyError


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("trainer") / "shards")


@pytest.fixture(scope="module")
def trained(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trainer") / "out"
    run(shards, out)
    return out


def test_a_head_that_can_know_the_next_token_learns_to(tmp_path: Path) -> None:
    """SUCC always continues t with t + 1: nearly every draft must agree on documents never trained on."""
    model, layers = succ_llama(4), (1, 2, 3, 4)
    documents = [
        make_document(model, (torch.arange(20) + 5 * row) % 41, torch.arange(20) >= 2, row, layers) for row in range(24)
    ]
    folder = write_shards(tmp_path / "s", model=model, documents=documents, layers=layers)
    common = ("head.draft_vocab_size=null", "stopping.epochs=12", "optimizer.lr=2e-2", "stopping.eval_every=50")
    report = run(folder, tmp_path / "full", *common, "data.batch_size=4")
    assert report.result.best is not None and report.result.best.acceptance_length > 3.5
    assert report.coverage == 1.0


def test_the_folder_loads_strictly_and_records_where_it_came_from(trained: Path, shards: Path) -> None:
    loaded = load_head(trained)
    record = loaded.record
    manifest = ShardSet.open([shards]).manifest
    assert record["shards"]["target"]["fingerprint"] == manifest.target.fingerprint
    assert record["shards"]["tokenizer_hash"] == manifest.tokenizer_hash
    assert record["recipe"]["name"] == "eagle3" and record["recipe"]["optimizer"]["lr"] == 3e-3
    assert record["draft_vocabulary"]["size"] == 64 and 0 < record["draft_vocabulary"]["coverage"] <= 1
    assert record["metrics"]["validation"]["acceptance_length"] >= 1
    assert {"spectrain", "torch", "transformers"} <= record["versions"].keys()
    # the context a head was trained on is not the context it serves
    assert json.loads((trained / "config.json").read_text())["max_position_embeddings"] == 64
    assert load_file(trained / "model.safetensors")["fc.weight"].dtype == torch.bfloat16
    text = (trained / "config.json").read_text() + (trained / "spectrain.json").read_text()
    assert str(shards.parent) not in text and str(trained.parent) not in text and str(Path.home()) + "/" not in text


def test_masters_and_moments_are_float32_and_names_are_bare(trained: Path) -> None:
    folder = CheckpointFolder(trained / "run/checkpoints").newest()
    assert folder is not None
    head, moments = (load_file(folder.folder / name) for name in ("head.safetensors", "optimizer.safetensors"))
    assert head.keys() == load_head(trained).head.state_dict().keys()
    assert all(t.dtype == torch.float32 for name, t in head.items() if name not in ("d2t", "t2d"))
    assert {name.partition(".")[0] for name in moments} == {"step", "exp_avg", "exp_avg_sq"}
    assert all(t.dtype == torch.float32 for t in moments.values())


def test_a_run_leaves_recipe_metrics_and_plots(trained: Path) -> None:
    kept = trained / "run"
    lines = read_metrics(kept)
    training = [line for line in lines if line["kind"] == "train"]
    assert [line["step"] for line in training] == [1, 2, 3, 4, 5, 6]
    assert all({"loss", "lr", "grad_norm", "acceptance_length", "agree_0"} <= line.keys() for line in training)
    assert [line["step"] for line in lines if line["kind"] == "validation"] == [3, 6]
    assert "# --set" in (kept / "recipe.yaml").read_text()
    assert all((kept / name).read_bytes()[:4] == b"\x89PNG" for name in ("loss.png", "acceptance_length.png"))


def test_target_tensors_are_untouched_and_absent_from_what_is_saved(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steppers: list[Stepper] = []
    original = Stepper.__init__

    def remember(self: Stepper, *values: Any, **options: Any) -> None:
        original(self, *values, **options)
        steppers.append(self)

    monkeypatch.setattr(Stepper, "__init__", remember)
    before = (shards / "target/target.safetensors").read_bytes()
    run(shards, tmp_path / "out", "optimizer.weight_decay=0.1", "stopping.max_steps=5")
    reference, used = ShardSet.open([shards]).target_tensors(), steppers[0].target
    assert torch.equal(used.embed_tokens, reference.embed_tokens) and torch.equal(used.lm_head, reference.lm_head)
    assert (shards / "target/target.safetensors").read_bytes() == before
    assert not any("embed" in name for name in load_file(tmp_path / "out/model.safetensors"))


def test_rates_depend_on_optimizer_steps_alone(shards: Path, tmp_path: Path) -> None:
    """Batch 4 at once, or one by one with accumulation: the same curve, and the same events at the same steps."""
    common = ("data.batch_size=4", "stopping.epochs=2", "stopping.eval_every=2")
    curves = []
    for micro in (4, 1):
        out = tmp_path / f"micro{micro}"
        run(shards, out, *common, f"data.micro_batch_size={micro}")
        lines = read_metrics(out / "run")
        curves.append([(line["kind"], line["step"], line.get("lr")) for line in lines])
    assert curves[0] == curves[1]
    rates = [rate for kind, _, rate in curves[0] if kind == "train"]
    settings = OptimizerSettings(lr=3e-3)
    assert rates == [learning_rate(settings, step, len(rates)) for step in range(len(rates))]
    assert rates[-1] == pytest.approx(0.0)


def test_two_documents_together_equal_two_accumulated(tmp_path: Path) -> None:
    """One and nine supervised rows: a mean of means would weigh them alike."""
    folder = write_shards(tmp_path / "s", (6, 13), prompt=3)
    one_row_each = ("data.sequence_length=13", "data.batch_size=2", "data.validation_share=0", "stopping.epochs=1")
    for micro in (1, 2):
        run(folder, tmp_path / f"out{micro}", *one_row_each, f"data.micro_batch_size={micro}")
    first, second = (
        load_file(tmp_path / f"out{micro}/run/checkpoints/step-00000001/head.safetensors") for micro in (1, 2)
    )
    assert all(torch.allclose(first[name].float(), second[name].float(), atol=1e-6) for name in first)


def test_a_document_without_supervision_changes_nothing_but_the_count(tmp_path: Path) -> None:
    model = rand_llama(4)
    documents = random_documents(model, (20, 20, 20), masked=(1,))
    constant = (
        "optimizer.schedule=constant", "optimizer.warmup_steps=0", "data.batch_size=1", "data.sequence_length=20",
        "data.validation_share=0", "stopping.epochs=4",
    )  # fmt: skip
    with_it = write_shards(tmp_path / "with", model=model, documents=documents)
    report = run(with_it, tmp_path / "out", *constant)
    assert (report.result.step, report.result.skipped) == (8, 4)
    assert [line["step"] for line in read_metrics(tmp_path / "out/run")] == list(range(1, 9))
    order = [line["loss"] for line in read_metrics(tmp_path / "out/run")]
    assert len(order) == 8 and all(loss is not None for loss in order)
    head = load_file(tmp_path / "out/run/checkpoints/step-00000008/head.safetensors")
    assert all(torch.isfinite(t).all() for t in head.values() if t.is_floating_point())


def test_no_supervised_token_at_all_stops_before_the_first_step(tmp_path: Path) -> None:
    model = rand_llama(4)
    folder = write_shards(tmp_path / "s", model=model, documents=random_documents(model, (9, 12), masked=(0, 1)))
    with pytest.raises(VocabularyError, match="expected supervised tokens"):
        run(folder, tmp_path / "out")
    with pytest.raises(TrainingError, match="expected supervised rows"):
        run(folder, tmp_path / "full", "head.draft_vocab_size=null")
    assert not (tmp_path / "out").exists() and not (tmp_path / "full").exists()


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_checkpoint(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Stepper._forward_backward
    calls = 0

    def poisoned(self: Stepper, batch: Any, final: bool) -> Any:
        nonlocal calls
        calls += 1
        return original(self, batch._replace(aux_states=batch.aux_states * (float("nan") if calls > 9 else 1.0)), final)

    monkeypatch.setattr(Stepper, "_forward_backward", poisoned)
    with pytest.raises(TrainingError, match=r"step 4 .*the last good one is .*step-00000003") as error:
        run(shards, tmp_path / "out")
    assert "\n" not in str(error.value)
    found = CheckpointFolder(tmp_path / "out/run/checkpoints").newest()
    assert found is not None and found.state.step == 3


def test_a_failing_evaluation_loses_no_checkpoint(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Validator, *values: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Validator, "run", fail)
    with pytest.raises(RuntimeError):
        run(shards, tmp_path / "out")
    found = CheckpointFolder(tmp_path / "out/run/checkpoints").newest()
    assert found is not None and found.state.step == 3


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("os error 28")])
def test_a_disk_that_fills_up_keeps_the_checkpoints_before(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    out, save_file = tmp_path / "out", checkpoint.save_file

    def full(tensors: Any, path: Path, **options: Any) -> None:
        if "step-00000003" in str(path):
            path.write_bytes(b"part")
            raise error
        save_file(tensors, path, **options)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(checkpoint.CheckpointError, match="could not write a checkpoint .* free space .* --resume"):
        run(shards, out)
    folder = out / "run" / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["step-00000002"], "what was half written gives its space back"
    monkeypatch.setattr(checkpoint, "save_file", save_file)
    assert run(shards, out, resume=True).result.step > 3


def test_without_validation_the_last_checkpoint_is_exported_and_said_so(shards: Path, tmp_path: Path) -> None:
    listener = Recorder()
    report = run(shards, tmp_path / "out", "data.validation_share=0", listener=listener)
    assert report.result.best is None and report.exported_step == report.result.step
    assert any("last checkpoint is the best" in note for note in listener.notes)
    load_head(tmp_path / "out")


@pytest.mark.parametrize(
    ("lengths", "best"), [((1.5, 2.0, 1.8), 6), ((float("nan"), 1.2, 1.1), 6), ((2.0, 1.0, 1.5), 3)]
)
def test_best_follows_acceptance_not_loss(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lengths: tuple[float, ...], best: int
) -> None:
    values = iter(lengths)

    def fabricated(self: Validator, stepper: Stepper, step: int) -> Evaluation:
        return Evaluation(step, next(values), loss=1.0 / step, metrics={})

    monkeypatch.setattr(Validator, "run", fabricated)
    report = run(shards, tmp_path / "out", "stopping.max_steps=9", "stopping.epochs=5", "stopping.keep_last=1")
    assert report.exported_step == best
    assert json.loads((tmp_path / "out/run/evaluations.json").read_text())["best_step"] == best
    masters = load_file(tmp_path / f"out/run/checkpoints/step-{best:08d}/head.safetensors")
    exported = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(exported[name], masters[name].to(exported[name].dtype)) for name in exported)


def test_patience_stops_early(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Validator, "run", lambda self, stepper, step: Evaluation(step, 3.0 - step / 10, loss=1.0, metrics={})
    )
    report = run(shards, tmp_path / "out", "stopping.epochs=9", "stopping.patience=2")
    assert report.result.stopped_early and (report.result.step, report.exported_step) == (9, 3)


def test_evaluation_leaves_the_head_in_training_mode(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = []
    original_run, original_step = evaluation.Validator.run, Stepper.run

    def during(self: Validator, stepper: Stepper, step: int) -> Evaluation | None:
        result = original_run(self, stepper, step)
        modes.append(("after evaluation", stepper.module.training))
        return result

    def step(self: Stepper, *values: Any) -> Any:
        modes.append(("step", self.module.training and self.module.head.training))
        return original_step(self, *values)

    monkeypatch.setattr(evaluation.Validator, "run", during)
    monkeypatch.setattr(Stepper, "run", step)
    run(shards, tmp_path / "out")
    assert ("after evaluation", True) in modes and all(training for _, training in modes)


def test_a_norm_that_does_not_move_is_named(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(FrozenParameterWarning, match="norm.weight"):
        run(shards, tmp_path / "tiny", "optimizer.lr=1e-12")
    monkeypatch.setattr(trainer, "warmup_steps", lambda *_: 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FrozenParameterWarning)
        run(shards, tmp_path / "healthy")


def test_bfloat16_compute_moves_masters_as_float32_does(shards: Path, tmp_path: Path) -> None:
    """A step of 2e-3 is below half a unit of bfloat16 at 1.0; float32 masters take it all the same."""
    from spectrain.recipes.loader import load_recipe
    from spectrain.tests.train.runs import SMALL
    from spectrain.train.run import FitRequest, fit

    moved = {}
    for dtype in ("float32", "bfloat16"):
        changes = ("optimizer.lr=2e-3", "optimizer.schedule=constant", "stopping.epochs=20", "stopping.max_steps=12")
        recipe = load_recipe("eagle3", [*SMALL, *changes, "stopping.eval_every=12", "stopping.save_every=12"])
        out = tmp_path / dtype
        fit(FitRequest(recipe=recipe, shards=(shards,), out=out, device="cpu", dtype=dtype), Recorder())
        masters = load_file(out / "run/checkpoints/step-00000012/head.safetensors")
        norms = [t - 1 for name, t in masters.items() if name.endswith("norm.weight")]
        moved[dtype] = float(torch.stack([n.norm() for n in norms]).norm())
    assert moved["float32"] > 0.005
    assert moved["bfloat16"] == pytest.approx(moved["float32"], rel=0.05)


def test_the_draft_vocabulary_belongs_to_the_run(shards: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for size, rows in (("32", 32), ("64", 64), ("null", 97)):
        run(shards, out, f"head.draft_vocab_size={size}", "stopping.max_steps=1", overwrite=True)
        tensors = load_file(out / "model.safetensors")
        assert tensors["lm_head.weight"].shape[0] == rows
        assert ("d2t" in tensors) == (rows < 97)
        if rows < 97:
            assert {1, 2} <= set((tensors["d2t"] + torch.arange(rows)).tolist())
        load_head(out)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ("optimizer.lrr=1", RecipeError, r"did you mean optimizer\.lr\?"),
        ("head.draft_vocab=1", RecipeError, r"did you mean head\.draft_vocab_size\?"),
        ("objective.step=1", RecipeError, r"did you mean objective\.steps\?"),
        ("data.batch=1", RecipeError, r"did you mean data\.batch_size\?"),
        ("head.layer_ids=[1,2,9]", HeadError, "between 0 .* and 4"),
        ("head.layer_ids=[3,2,1]", HeadError, "ascending"),
        ("head.layer_ids=[0,1,2]", ShardError, r"captured at layers \(1, 2, 3, 4\)"),
        ("head.config=os:getcwd", HeadError, "is none"),
        ("head.config=spectrain.heads.eagle3:Nothing", HeadError, "cannot be imported"),
        ("stopping.max_steps=0", ValueError, "stopping.max_steps must be at least 1"),
    ],
)
def test_bad_recipes_end_before_anything_is_written(
    shards: Path, tmp_path: Path, change: str, kind: type[ValueError], message: str
) -> None:
    with pytest.raises(kind, match=message) as error:
        run(shards, tmp_path / "out", change)
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


def test_shards_of_another_target_are_refused(shards: Path, tmp_path: Path) -> None:
    other = write_shards(
        tmp_path / "other", (9, 12), changes={"target": TargetIdentity(name="b", revision="0", fingerprint="f1")}
    )
    with pytest.raises(ShardError, match="one target"):
        run((shards, other), tmp_path / "out")
    changed = write_shards(tmp_path / "changed", (9, 12), changes={"vocab_size": 98})
    with pytest.raises(ShardError, match="vocab_size must be 97"):
        run(changed, tmp_path / "out")


def test_a_head_from_the_users_own_package_is_named_in_the_recipe(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ownhead.py").write_text(
        "from dataclasses import dataclass\n"
        "from spectrain.heads.eagle3 import Eagle3Config, Eagle3Head\n"
        "class OwnHead(Eagle3Head):\n    pass\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class OwnConfig(Eagle3Config):\n    network = 'ownhead:OwnHead'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    run(shards, tmp_path / "out", "head.config=ownhead:OwnConfig", "stopping.max_steps=1")
    with pytest.raises(HeadError, match="--allow-package ownhead"):
        load_head(tmp_path / "out")
    assert type(load_head(tmp_path / "out", allowed_packages=["ownhead"]).head).__name__ == "OwnHead"
