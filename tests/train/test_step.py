"""One optimizer step: its gradient does not depend on how rows are split, padded or spread over processes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from spectrain.extract.shards import ShardSet
from spectrain.tests.models import rand_llama
from spectrain.tests.shard_folders import random_documents, write_shards
from spectrain.tests.train import gradient_worker
from spectrain.tests.train.runs import environment, gradients, make_stepper
from spectrain.train.data import StepPlan
from spectrain.train.settings import OptimizerSettings, SettingsError
from spectrain.train.step import NonFiniteError, to_device

# eight rows of one document each, of very different lengths, one of them without any supervised token
LENGTHS = (17, 25, 31, 18, 20, 29, 17, 23)
EIGHT = ("data.batch_size=8", "data.validation_share=0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("step") / "shards", LENGTHS, masked=(3,))


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[str, Tensor]:
    return gradients(ShardSet.open([folder]), *EIGHT, "data.micro_batch_size=8")


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = max(1.0, float(tensor.abs().max()))
        torch.testing.assert_close(found[name] / scale, tensor / scale, atol=1e-6, rtol=0, msg=name)


def test_eight_accumulation_steps_equal_one_batch_of_eight(folder: Path, whole: dict[str, Tensor]) -> None:
    assert float(whole["loss"]) > 0 and all(torch.isfinite(t).all() for t in whole.values())
    assert_same(gradients(ShardSet.open([folder]), *EIGHT, "data.micro_batch_size=1"), whole)
    assert_same(gradients(ShardSet.open([folder]), *EIGHT, "data.micro_batch_size=3"), whole)


@pytest.mark.parametrize("length", [48, 80])
def test_padding_does_not_change_loss_or_gradient(tmp_path: Path, length: int) -> None:
    shards = ShardSet.open([write_shards(tmp_path / "one", (31,))])
    one = (*EIGHT, "data.micro_batch_size=1")
    assert_same(gradients(shards, *one, f"data.sequence_length={length}"), gradients(shards, *one))


def test_packing_equals_a_document_a_row(tmp_path: Path) -> None:
    """Packed neighbours must not see each other, nor weigh less than alone."""
    shards = ShardSet.open([write_shards(tmp_path / "packed", (9, 10, 11))])
    packed = gradients(shards, "data.batch_size=1", "data.validation_share=0", "data.sequence_length=32")
    alone = gradients(shards, "data.batch_size=3", "data.validation_share=0", "data.sequence_length=11")
    assert_same(packed, alone)


def test_two_processes_with_unequal_rows_equal_one(folder: Path, whole: dict[str, Tensor], tmp_path: Path) -> None:
    script = gradient_worker.__file__
    assert script is not None
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", script]
    changes = (*EIGHT, "data.micro_batch_size=3")
    done = subprocess.run(
        [*command, str(folder), str(tmp_path), *changes], capture_output=True, text=True, timeout=120, env=environment()
    )
    assert done.returncode == 0, done.stderr
    ranks = [load_file(tmp_path / f"{rank}.safetensors") for rank in range(2)]
    for found in ranks:
        assert_same(found, whole)


def test_denominators_are_global_and_known_before_the_forward(folder: Path) -> None:
    shards = ShardSet.open([folder])
    stepper, rows = make_stepper(shards, *EIGHT, "data.micro_batch_size=2")
    plan = next(rows.stream(0, 1))
    assert isinstance(plan, StepPlan)
    counts = stepper.count(plan)
    head, objective = stepper.module.head, stepper.module.objective
    assert torch.equal(counts, sum(objective.count(head, batch) for batch in plan.micro_batches))
    # a supervised span of n tokens has n - 1 valid rows at step 0, before the draft vocabulary takes some away
    spans = [length - 3 for row, length in enumerate(LENGTHS) if row != 3]
    assert 0 < counts[0] <= sum(spans)
    assert counts[0] > counts[1] > counts[2]


def test_a_step_without_supervised_rows_updates_nothing(tmp_path: Path) -> None:
    shards = ShardSet.open([write_shards(tmp_path / "s", (12, 14), documents=_two_masked())])
    stepper, rows = make_stepper(shards, "data.batch_size=8", "data.validation_share=0")
    before = {name: p.detach().clone() for name, p in stepper.module.head.named_parameters()}
    stream = rows.stream(0, 1)
    plan = next(stream)
    assert isinstance(plan, StepPlan)
    assert stepper.run(plan, stream, 1.0).skipped
    assert next(stream, None) is None
    assert all(torch.equal(p, before[name]) for name, p in stepper.module.head.named_parameters())
    assert not stepper.optimizer.state


def _two_masked() -> list:
    model = rand_llama(4)
    supervised = random_documents(model, (5,))[0]
    masked = random_documents(model, (12, 14), masked=(0, 1))
    # one token of supervision somewhere keeps the counts of the draft vocabulary alive, but gives no valid row
    mask = torch.tensor([False, False, False, False, True])
    argmax = torch.full((5,), -1, dtype=torch.int32)
    return [supervised._replace(loss_mask=mask, target_argmax=argmax), *masked]


def test_a_bad_gradient_never_reaches_the_optimizer(folder: Path) -> None:
    shards = ShardSet.open([folder])
    stepper, rows = make_stepper(shards, *EIGHT)
    before = {name: p.detach().clone() for name, p in stepper.module.head.named_parameters()}
    stream = rows.stream(0, 1)
    plan = next(stream)
    assert isinstance(plan, StepPlan)

    def poisoned():
        for batch in stream:
            yield batch._replace(aux_states=batch.aux_states * float("nan"))

    with pytest.raises(NonFiniteError):
        stepper.run(plan, poisoned(), 1.0)
    assert all(torch.equal(p, before[name]) for name, p in stepper.module.head.named_parameters())


def test_the_optimizer_holds_trainable_head_parameters_and_nothing_of_the_target(folder: Path) -> None:
    shards = ShardSet.open([folder])
    stepper, _ = make_stepper(shards, "optimizer.weight_decay=0.1")
    held = {id(p) for group in stepper.optimizer.param_groups for p in group["params"]}
    head = stepper.module.head
    assert held == {id(p) for p in head.parameters() if p.requires_grad}
    target = stepper.target
    for tensor in (target.embed_tokens, target.lm_head, target.norm.weight):
        assert id(tensor) not in held and not tensor.requires_grad
    assert not any("embed" in name for name in stepper.module.state_dict())
    decayed = {len(group["params"]): group["weight_decay"] for group in stepper.optimizer.param_groups}
    norms = sum(p.dim() == 1 for p in head.parameters())
    assert decayed[norms] == 0.0 and 0.1 in decayed.values()


def test_clipping_is_by_the_norm_of_the_whole_gradient(folder: Path) -> None:
    stepper, rows = make_stepper(ShardSet.open([folder]), *EIGHT, "optimizer.clip_norm=0.25")
    raw = gradients(ShardSet.open([folder]), *EIGHT)
    norm = torch.stack([g.norm() for name, g in raw.items() if name != "loss"]).norm()
    stream = rows.stream(0, 1)
    plan = next(stream)
    assert isinstance(plan, StepPlan)
    assert torch.allclose(stepper.run(plan, stream, 1e-3).grad_norm, norm, rtol=1e-4)
    # AdamW's first moment after one step is (1 - beta1) times the clipped gradient
    moments = [state["exp_avg"] for state in stepper.optimizer.state.values()]
    assert torch.stack([m.norm() for m in moments]).norm() == pytest.approx(0.1 * 0.25, rel=1e-4)


def test_clipping_by_value_bounds_each_element_and_leaves_the_others(folder: Path) -> None:
    raw = gradients(ShardSet.open([folder]), *EIGHT)
    bound = float(torch.cat([g.flatten() for name, g in raw.items() if name != "loss"]).abs().quantile(0.9))
    changes = ("optimizer.clip_norm=null", f"optimizer.clip_value={bound}")
    stepper, rows = make_stepper(ShardSet.open([folder]), *EIGHT, *changes)
    stream = rows.stream(0, 1)
    plan = next(stream)
    assert isinstance(plan, StepPlan)
    norm = torch.stack([g.norm() for name, g in raw.items() if name != "loss"]).norm()
    assert torch.allclose(stepper.run(plan, stream, 1e-3).grad_norm, norm, rtol=1e-4)
    state = stepper.optimizer.state
    for name, parameter in stepper.module.head.named_parameters():
        clipped = raw[name].clamp(-bound, bound)
        torch.testing.assert_close(state[parameter]["exp_avg"], 0.1 * clipped, atol=1e-8, rtol=1e-4)


def test_clipping_is_by_norm_or_by_value_or_not_at_all() -> None:
    with pytest.raises(SettingsError, match="by norm or by value"):
        OptimizerSettings(clip_norm=0.5, clip_value=0.5)
    for name in ("clip_norm", "clip_value"):
        with pytest.raises(SettingsError, match=f"optimizer.{name} must be above 0 or null"):
            OptimizerSettings(**{"clip_norm": None, name: 0.0})
    assert OptimizerSettings(clip_norm=None).clip_value is None


def test_moving_a_batch_keeps_absent_fields(folder: Path) -> None:
    stepper, rows = make_stepper(ShardSet.open([folder]), *EIGHT)
    plan = next(rows.stream(0, 1))
    assert isinstance(plan, StepPlan)
    assert to_device(plan.micro_batches[0], torch.device("cpu")).final_states is None
