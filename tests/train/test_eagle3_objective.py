"""EAGLE-3's objective against an independent decoder, its dependency table and its reduction."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from spectrain.heads.eagle3 import Eagle3Head
from spectrain.heads.target_tensors import FinalNorm, TargetTensors
from spectrain.tests.fresh import loud_head
from spectrain.tests.train.formulas import assert_acceptance, influences
from spectrain.tests.train.reference_decoder import assert_decoders_logits, decoder_losses, teacher_forced
from spectrain.tests.train.toys import (
    Document,
    counted,
    numbered_documents,
    pack,
    random_document,
    random_target,
    share,
    tiny_config,
)
from spectrain.train import losses as losses_module
from spectrain.train.batch import TrainBatch
from spectrain.train.objectives.base import predicted_acceptance_length
from spectrain.train.objectives.eagle3 import Eagle3Objective, Eagle3Settings

STYLES = {
    "llama": {},
    "qwen3": {"layer_style": "qwen3"},
    "norm before residual": {"norm_before_residual": True},
    "norm before fc": {"norm_before_fc": True},
    "eagle3.1": {"fc_norm": True, "norm_output": True},
    "two layers": {"num_layers": 2},
    "two layers, every flag": {
        "num_layers": 2,
        "layer_style": "qwen3",
        "norm_before_residual": True,
        "norm_before_fc": True,
        "fc_norm": True,
        "norm_output": True,
    },
    "reduced vocabulary": {"draft_vocab_size": 11},
}


def unrolled_logits(head: Eagle3Head, target: TargetTensors, batch: TrainBatch, objective: Eagle3Objective) -> Tensor:
    """Draft logits [steps, batch, seq, draft_vocab] of a real call of the objective."""
    captured: list[Tensor] = []
    hook = head.register_forward_hook(lambda _m, _i, output: captured.append(output.logits_states))
    objective(head, target, batch)
    hook.remove()
    return torch.stack([head.logits(x, target) for x in captured])


def packed_case(generator: torch.Generator) -> list[list[Document]]:
    lengths = [[7], [4, 2], [1, 5]]
    return [[random_document(n, 16, 16, generator) for n in row] for row in lengths]


@pytest.mark.parametrize("style", STYLES)
def test_training_logits_equal_an_incremental_decoder(style: str):
    config, target = tiny_config(**STYLES[style]), random_target(16, 16)
    head = loud_head(config, target, random_norms=True)
    rows = packed_case(torch.Generator().manual_seed(1))
    objective = Eagle3Objective(config, Eagle3Settings(steps=4))
    batch = pack(rows, target, 4, seq=8)
    found = unrolled_logits(head, target, batch, objective)
    moved = unrolled_logits(head, target, batch._replace(positions=batch.positions + 7), objective)
    for logits in (found, moved):
        compared = assert_decoders_logits(logits, rows, head, target)
        assert compared == 18 + 6 + 1 + 0 + 10  # sum over documents of min(4, n-1-t)


@pytest.mark.parametrize("kind", ["ce", "kl", "tv", "lk_alpha"])
@pytest.mark.parametrize("style", ["llama", "reduced vocabulary"])
def test_loss_equals_the_formula_on_the_decoders_logits(style: str, kind: losses_module.LossKind):
    """Soft labels included: softmax(lm_head(norm(h_L))), the norm exactly once."""
    config, target = tiny_config(**STYLES[style]), random_target(16, 16)
    head = loud_head(config, target, random_norms=True)
    rows = packed_case(torch.Generator().manual_seed(1))
    objective = Eagle3Objective(config, Eagle3Settings(steps=3, step_decay=0.6, loss=kind))
    batch = counted(objective, head, pack(rows, target, 3))
    output = objective(head, target, batch)
    losses = decoder_losses(kind, rows, head, target, 3)
    assert batch.denominators.tolist() == [len(part) for part in losses] and all(losses)
    expected = sum(0.6**k * sum(losses[k]) / len(losses[k]) for k in range(3))
    assert float(output.loss.detach()) == pytest.approx(expected, rel=1e-5)

    normed_twice = dataclasses.replace(target, norm=lambda x: target.norm(target.norm(x)))
    without_norm = dataclasses.replace(target, norm=FinalNorm("none", None, None, 0.0))
    for wrong in (normed_twice, without_norm):
        if kind != "ce":
            assert abs(float(objective(head, wrong, batch).loss.detach()) - expected) > 1e-3


def test_fc_receives_the_declared_layers_in_ascending_order():
    config, target = tiny_config(), random_target(16, 16)
    assert config.layer_ids == (2, 3, 4)
    head = loud_head(config, target)
    seen: list[Tensor] = []
    head.fc.register_forward_hook(lambda _m, inputs, _o: seen.append(inputs[0]))
    signatures = torch.tensor(config.layer_ids, dtype=torch.float32)[:, None].expand(3, 16)
    document = random_document(5, 16, 16, torch.Generator().manual_seed(0))
    batch = pack([[document._replace(aux=signatures.expand(5, 3, 16))]], target, 2)
    Eagle3Objective(config, Eagle3Settings(steps=2))(head, target, batch)
    assert len(seen) == 1  # later steps are conditioned on the head's own feedback
    assert seen[0][0, 0].view(3, 16).tolist() == signatures.tolist()


@pytest.mark.parametrize("num_layers", [1, 2])
def test_each_row_depends_on_exactly_what_the_drafter_knows(num_layers: int):
    """States h_0..h_t and tokens x_1..x_{t+1+k} of its own document: all of them, nothing else."""
    config, target = tiny_config(vocab=32, num_layers=num_layers), random_target(32, 16)
    head = loud_head(config, target)
    lengths, steps, generator = [6, 5], 3, torch.Generator().manual_seed(0)
    batch = pack([numbered_documents(lengths, 16, generator)], target, steps, seq=13)
    aux = batch.aux_states.requires_grad_()
    embeds = target.embed_tokens.requires_grad_()
    logits = unrolled_logits(
        head, target, batch._replace(aux_states=aux), Eagle3Objective(config, Eagle3Settings(steps=steps))
    )
    probe = torch.randn(logits.shape[-1], generator=generator)
    start = 0
    for n in lengths:
        for k in range(steps):
            for t in range(n - 1 - k):
                by_state, by_token = torch.autograd.grad(
                    logits[k, 0, start + t] @ probe, [aux, embeds], retain_graph=True
                )
                states = by_state[0].abs().sum((-1, -2)).nonzero().squeeze(1).tolist()
                tokens = by_token.abs().sum(-1).nonzero().squeeze(1).tolist()
                assert states == list(range(start, start + t + 1))
                assert tokens == list(range(start + 1, start + t + 2 + k))
        start += n


def test_only_the_table_of_counted_rows_can_change_the_loss():
    """Mask 00111011 counts (1,0) (2,0) (5,0) (1,1): x_0, x_7, aux rows 6, 7 and final rows 0 1 4 5 7 play no part."""
    config, target = tiny_config(), random_target(16, 16)
    head = loud_head(config, target)
    mask = torch.tensor([c == "1" for c in "00111011"])
    document = random_document(8, 16, 16, torch.Generator().manual_seed(3))._replace(loss_mask=mask)
    found = influences(Eagle3Objective(config, Eagle3Settings(steps=3)), head, target, document)
    assert found == ({1, 2, 3, 4, 5, 6}, {0, 1, 2, 3, 4, 5}, {2, 3, 6})


def test_noise_in_one_packed_document_leaves_the_other_alone():
    config, target = tiny_config(), random_target(16, 16)
    head = loud_head(config, target)
    generator = torch.Generator().manual_seed(0)
    kept = random_document(6, 16, 16, generator)
    objective = Eagle3Objective(config, Eagle3Settings(steps=3))
    alone = unrolled_logits(head, target, pack([[kept]], target, 3), objective)
    for seed in range(2):
        noise = random_document(5, 16, 16, torch.Generator().manual_seed(seed + 10))
        after = unrolled_logits(head, target, pack([[noise, kept]], target, 3), objective)[:, :, 5:]
        before = unrolled_logits(head, target, pack([[kept, noise]], target, 3), objective)[:, :, :6]
        for k in range(3):  # rows whose input token exists
            torch.testing.assert_close(after[k, :, : 5 - k], alone[k, :, : 5 - k], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(before[k, :, : 5 - k], alone[k, :, : 5 - k], atol=1e-5, rtol=1e-5)


def test_rows_the_head_cannot_draft_are_removed_and_still_count_as_misses():
    config, target = tiny_config(draft_vocab_size=4), random_target(16, 16)
    head = loud_head(config, target)
    document = random_document(40, 16, 16, torch.Generator().manual_seed(0))
    objective = Eagle3Objective(config, Eagle3Settings(steps=2))
    batch = counted(objective, head, pack([[document]], target, 2))
    ids = head.draft_to_target()
    assert ids is not None
    tops = target.logits(document.final).argmax(-1)
    expected = [sum(int(tops[t + 1 + k] in ids) for t in range(40 - 2 - k)) for k in range(2)]
    assert batch.denominators.tolist() == expected and 0 < expected[0] < 38
    output = objective(head, target, batch)
    assert output.metrics["loss_0"][1] == expected[0]
    assert output.metrics["agree_0"][1] == 38 and output.metrics["agree_0"][0] <= expected[0]


def test_acceptance_metrics_equal_counts_on_the_decoders_logits():
    config, target = tiny_config(vocab=2, hidden=8), random_target(2, 8)
    head = loud_head(config, target)
    documents = [random_document(n, 2, 8, torch.Generator().manual_seed(n)) for n in (25, 11, 4)]
    objective = Eagle3Objective(config, Eagle3Settings(steps=3))
    output = objective(head, target, pack([[d] for d in documents], target, 3))
    hits = []
    for document in documents:
        tops = target.logits(document.final).argmax(-1)
        logits = teacher_forced(head, target, document.token_ids, document.aux, 3)
        labelled = [(t, k) for t, k in logits if t + 2 + k < len(document.token_ids)]
        hits.append({(t, k): int(logits[t, k].argmax()) == int(tops[t + 1 + k]) for t, k in labelled})
    expected = 1 + sum(assert_acceptance(output, hits, 3))
    assert predicted_acceptance_length(output.metrics) == pytest.approx(expected)


@pytest.mark.parametrize("supervised", [(1.0, 1.0, 1.0), (math.inf, math.inf, 1.0)], ids=["every step", "last step"])
def test_gradient_is_the_whole_derivative_through_every_earlier_step(supervised: tuple[float, ...]):
    """Against central differences: a detached state or key at any step leaves part of the derivative out."""
    config, target = tiny_config(), random_target(16, 16)
    head = loud_head(config, target)
    batch = pack([[random_document(6, 16, 16, torch.Generator().manual_seed(0))]], target, 3)
    batch = batch._replace(denominators=torch.tensor(supervised))
    objective = Eagle3Objective(config, Eagle3Settings(steps=3))
    objective(head, target, batch).loss.backward()
    generator, reach = torch.Generator().manual_seed(1), 2e-3
    for name in ("fc.weight", "layers.0.self_attn.k_proj.weight", "layers.0.self_attn.v_proj.weight"):
        parameter = head.get_parameter(name)
        assert parameter.grad is not None
        direction = torch.randn(parameter.shape, generator=generator)
        direction = direction / direction.norm()
        direction = direction + parameter.grad / parameter.grad.norm()
        losses = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(direction, alpha=sign * reach)
                losses.append(float(objective(head, target, batch).loss))
                parameter.sub_(direction, alpha=sign * reach)
        numeric = (losses[0] - losses[1]) / (2 * reach)
        assert float((parameter.grad * direction).sum()) == pytest.approx(numeric, rel=5e-3)


def test_missing_last_state_and_bad_settings_are_refused():
    config, target = tiny_config(), random_target(16, 16)
    head = loud_head(config, target)
    batch = pack([[random_document(5, 16, 16, torch.Generator().manual_seed(0))]], target, 2)
    with pytest.raises(ValueError, match="shards without id L"):
        Eagle3Objective(config, Eagle3Settings(steps=2))(head, target, batch._replace(final_states=None))
    for settings in ({"steps": 0}, {"step_decay": 0.0}, {"step_decay": math.nan}, {"attention": "sdpa"}):
        with pytest.raises(ValueError, match=f"objective.{next(iter(settings))}"):
            Eagle3Settings(**settings)


def test_share_of_a_metric_is_numerator_over_denominator():
    config, target = tiny_config(), random_target(16, 16)
    head = loud_head(config, target)
    objective = Eagle3Objective(config, Eagle3Settings(steps=1))
    batch = counted(objective, head, pack([[random_document(9, 16, 16, torch.Generator().manual_seed(0))]], target, 1))
    output = objective(head, target, batch)
    assert share(output, "loss_0") == pytest.approx(float(output.loss.detach()), rel=1e-6)
    assert 0 < share(output, "alpha_0") < 1
