"""DSpark's objective: DFlash's logits and a bias by the text's own token before each slot."""

import math

import pytest
import torch

from spectrain.heads.base import HeadError
from spectrain.heads.dspark import DSparkConfig, DSparkHead
from spectrain.heads.target_tensors import TargetTensors
from spectrain.tests.fresh import fresh_head, loud_head
from spectrain.tests.train.blocks import WalkingBlockDrafter, block_batch, spark_config
from spectrain.tests.train.formulas import influences
from spectrain.tests.train.texts import blank, cross_entropy
from spectrain.tests.train.toys import (
    MK,
    counted,
    law_target,
    mk_windows,
    random_document,
    random_target,
    share,
    train,
)
from spectrain.train import alignment
from spectrain.train.losses import LossRows, LossSettings, soft_linear_loss
from spectrain.train.objectives.dspark import DSparkObjective, DSparkSettings


def spark_head(config: DSparkConfig, target: TargetTensors) -> DSparkHead:
    head = loud_head(config, target, random_norms=True)
    assert isinstance(head, DSparkHead)
    return head


@pytest.mark.parametrize("from_anchor", [True, False])
def test_loss_equals_the_formula_on_the_drafters_logits(from_anchor: bool) -> None:
    config, target = spark_config(sample_from_anchor=from_anchor, block_size=4), random_target(16, 16)
    head = spark_head(config, target)
    documents = [random_document(n, 16, 16, torch.Generator().manual_seed(n)) for n in (8, 5)]
    objective = DSparkObjective(config, DSparkSettings(slot_decay=2.0, confidence_weight=0.7, ce_share=0.3))
    batch = counted(objective, head, block_batch([documents], target, config))
    w1 = head.state_dict()["markov_head.markov_w1.weight"]
    total, normaliser, errors = 0.0, 0.0, [0.0] * config.num_drafts
    for document in documents:
        ids = document.token_ids.tolist()
        laws = target.logits(document.final).softmax(-1)
        drafter = WalkingBlockDrafter(head, target, document.aux)
        for t in range(len(ids) - 2):
            states = drafter.states(t + 1, ids[t + 1])
            logits = states @ target.lm_head.T
            for k in range(min(config.num_drafts, len(ids) - 2 - t)):
                slot, before = k + (0 if from_anchor else 1), ids[t + 1 + k]
                q, p = (logits[slot] + drafter.bias(before)).softmax(0), laws[t + 1 + k]
                distance = float((p - q).abs().sum())
                c = head.confidence_head.proj(torch.cat([states[slot], w1[before]]))
                error = float(
                    torch.nn.functional.binary_cross_entropy_with_logits(c, torch.tensor([1 - distance / 2])).detach()
                )
                law = 0.3 * -math.log(float(q[ids[t + 2 + k]])) + 0.7 * distance
                total += math.exp(-k / 2) * (law + 0.7 * error)
                normaliser += math.exp(-k / 2)
                errors[k] += error
    output = objective(head, target, batch)
    assert float(output.loss.detach()) == pytest.approx(total / normaliser, rel=1e-5)
    for k in range(config.num_drafts):
        assert float(output.metrics[f"confidence_{k}"][0]) == pytest.approx(errors[k], rel=1e-4)


def test_frozen_columns_change_neither_loss_nor_the_other_gradients() -> None:
    """The same product with every column trained, and with the first ones frozen."""
    generator = torch.Generator().manual_seed(0)
    target, states = random_target(16, 16), torch.randn(6, 9, generator=generator)
    weight = torch.randn(16, 9, generator=generator)
    rows = {
        "weights": torch.rand(6, generator=generator),
        "terms": torch.zeros(6, dtype=torch.int64),
        "targets": torch.tensor([0, 1, 2, 0, 1, 2]),
        "labels": torch.arange(6),
    }
    normed, found = torch.randn(3, 16, generator=generator), {}
    for frozen in (0, 5):
        left, right, s = (
            weight[:, :frozen],
            weight[:, frozen:].clone().requires_grad_(),
            states.clone().requires_grad_(),
        )
        settings = LossSettings(loss="ce_tv", ce_share=0.4)
        losses = soft_linear_loss(
            LossRows(states=s, **rows), right, target, normed, None, settings, left if frozen else None
        )
        losses.total.backward()
        found[frozen] = (losses.total.detach(), s.grad, right.grad)
    for a, b in zip(found[0][:2], found[5][:2], strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(found[0][2][:, 5:], found[5][2])


def test_mixed_loss_is_the_sum_of_its_parts_in_value_and_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    target, states = random_target(16, 8), torch.randn(5, 8, generator=generator)
    weight, normed = torch.randn(16, 8, generator=generator), torch.randn(5, 8, generator=generator)
    index, found = torch.arange(5), {}
    for kind in ("ce", "tv", "ce_tv"):
        s = states.clone().requires_grad_()
        rows = LossRows(states=s, weights=torch.ones(5), terms=index * 0, targets=index, labels=index + 3)
        losses = soft_linear_loss(rows, weight, target, normed, None, LossSettings(loss=kind, ce_share=0.1))
        losses.total.backward()
        found[kind] = (losses.losses, s.grad)
    for ce, tv, both in zip(*found.values(), strict=True):
        torch.testing.assert_close(both, 0.1 * ce + 0.9 * 2 * tv, atol=1e-6, rtol=1e-5)


def test_a_slot_depends_on_the_token_before_it_and_no_later_one() -> None:
    """The bias reads x_{a+k} for draft k: the token before the one it stands for."""
    config, target = spark_config(vocab=32), random_target(32, 16)
    head = spark_head(config, target)
    document = random_document(7, 32, 16, torch.Generator().manual_seed(0))._replace(token_ids=torch.arange(7))
    batch = block_batch([[document]], target, config)
    objective = DSparkObjective(config, DSparkSettings())
    losses = objective(head, target, counted(objective, head, batch))
    losses.loss.backward()
    touched = head.markov_head.markov_w1.weight.grad.abs().sum(-1).nonzero().squeeze(1).tolist()
    assert touched == [1, 2, 3, 4, 5]  # anchors x_1..x_5 and the drafts before others; never a last label


def test_only_the_table_of_counted_slots_can_change_the_loss() -> None:
    """As of DFlash with hard and soft labels at once: the token before a slot is an anchor, or such a label itself."""
    config, target = spark_config(), random_target(16, 16)
    mask = torch.tensor([c == "1" for c in "00111011"])
    document = random_document(8, 16, 16, torch.Generator().manual_seed(3))._replace(loss_mask=mask)
    found = influences(DSparkObjective(config, DSparkSettings()), spark_head(config, target), target, document)
    assert found == ({2, 3, 4, 6, 7}, {0, 1, 2, 3, 4, 5}, {2, 3, 6})


def learn_chain(weight: float = 1.0) -> tuple:
    """Every window of the chain, states blank: only tokens tell."""
    law = torch.cat([torch.cat([MK, torch.full((3, 1), 1e-12)], dim=1), torch.full((1, 4), 0.25)])
    target, config = law_target(law, 16), spark_config(vocab=4, block_size=3)
    head = fresh_head(config, target)
    windows = blank([d for [d] in mk_windows(5, 16)])
    batch = block_batch([windows[i : i + 31] for i in range(0, 186, 31)], target, config)
    objective = DSparkObjective(config, DSparkSettings(loss="kl", confidence_weight=weight))
    return train(objective, head, target, batch, 60, 5e-2)


def test_every_slot_reaches_the_entropy_of_one_step() -> None:
    """Slots of a DFlash block stop at .766596, .945307 and 1.007871; knowing the token before brings .766596."""
    output = learn_chain()
    for k in range(3):
        assert 0.766596 - 1e-3 < cross_entropy(output, k) < 0.766596 + 6e-3
        # its law is the target's, so acceptance is certain, and the confidence head knows
        assert share(output, f"alpha_{k}") > 0.97 and share(output, f"confidence_{k}") < 0.2


def test_a_previous_token_one_off_stops_at_the_entropy_further_away(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = alignment.input_tokens
    monkeypatch.setattr(alignment, "input_tokens", lambda batch, step: inputs(batch, max(step - 1, 0)))
    output = learn_chain()
    assert cross_entropy(output, 1) > 0.9


def test_training_starts_as_dflash() -> None:
    config, target = spark_config(), random_target(16, 16)
    head = fresh_head(config, target)
    head.assert_filled()
    assert (head.pair_bias(torch.arange(16)) == 0).all()
    names = {name for name in head.state_dict() if "head" in name}
    assert names == {
        "markov_head.markov_w1.weight",
        "markov_head.markov_w2.weight",
        "confidence_head.proj.weight",
        "confidence_head.proj.bias",
    }
    assert head.markov_head.markov_w1.weight.shape == head.markov_head.markov_w2.weight.shape == (16, 4)
    assert head.confidence_head.proj.weight.shape == (1, 16 + 4)


def test_the_serving_config_names_the_two_heads() -> None:
    config = spark_config()
    served = config.serving_config()
    assert served["architectures"] == ["DSparkDraftModel"] and served["markov_rank"] == 4
    assert served["enable_confidence_head"] and served["dflash_config"]["sample_from_anchor"]
    assert DSparkConfig.from_dict(config.to_dict()) == config
    assert config.num_drafts == config.block_size == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"markov_rank": 0}, "markov_rank must be 1 or more"),
        ({"num_candidates": 17}, "num_candidates must lie between 1"),
    ],
)
def test_wrong_settings_are_named(settings: dict, message: str) -> None:
    with pytest.raises(HeadError, match=message):
        spark_config(**settings)
    with pytest.raises(ValueError, match="confidence_weight must be 0 or more"):
        DSparkSettings(confidence_weight=-1)
