"""Every objective: what it trains on, that nothing leaks, what it moves, and one gradient whatever a batch's layout."""

import math

import pytest
import torch

from spectrain.heads.base import HeadConfig
from spectrain.heads.target_tensors import TargetTensors
from spectrain.tests.fresh import head_recipes, loud_head, objective_of, tiny_head_config
from spectrain.tests.language_models import draft_model_config
from spectrain.tests.train.blocks import block_config, spark_config
from spectrain.tests.train.invariance import assert_layout_changes_nothing, assert_no_rows_give_zeros
from spectrain.tests.train.per_step import make_config
from spectrain.tests.train.toys import (
    Document,
    counted,
    gradients,
    law_target,
    pack,
    random_document,
    random_target,
    seeded,
    share,
    tiny_config,
    tiny_eagle_config,
    tiny_facts,
    tiny_peagle_config,
)
from spectrain.train.objectives.supervision import SupervisedObjective
from spectrain.train.settings import OptimizerSettings
from spectrain.train.step import make_optimizer

CASES: dict[str, tuple[HeadConfig, dict[str, object]]] = {
    "eagle": (tiny_eagle_config(num_layers=2, fc_bias=True), {}),
    "eagle3": (tiny_config(num_layers=2, draft_vocab_size=11), {"steps": 4}),
    "peagle": (tiny_peagle_config(num_layers=2, draft_vocab_size=11, fc_norm=True), {"steps": 4, "retention": 0.8}),
    "draft model": (draft_model_config(tiny_facts()), {}),
    "pard": (draft_model_config(tiny_facts(), parallel=True), {"steps": 3}),
    "medusa": (make_config("medusa, token map"), {}),
    "medusa, shared lm_head": (make_config("medusa, shared lm_head"), {}),
    "mlp": (make_config("mlp, token map"), {}),
    "mlp, tied": (make_config("mlp, tied"), {}),
    "dflash": (block_config(num_layers=2), {"anchors": 4}),
    "dflash, by confidence": (block_config(), {"anchors": 4, "slot_weights": "dpace"}),
    "dspark": (spark_config(), {"anchors": 4}),
    "dspark without confidence": (spark_config(confidence_head=False), {}),
}


@pytest.mark.parametrize("recipe", head_recipes())
def test_every_head_is_among_the_cases(recipe: str):
    kind = type(tiny_head_config(recipe, tiny_facts()))
    assert kind in {type(config) for config, _ in CASES.values()}, f"{recipe} has no case in {__name__}"


@pytest.mark.parametrize("loss", ["ce", "kl"])
@pytest.mark.parametrize("case", CASES)
def test_counted_rows_and_their_labels_equal_a_table_made_by_hand(case: str, loss: str):
    """Of mask 00111011, drafts of x_3, x_4 and x_7 behind x_2, x_3 and x_6, and of x_4 behind x_2."""
    config, settings = CASES[case]
    target = random_target(16, 16)
    head, objective = loud_head(config, target).eval(), objective_of(config, loss=loss, **settings)
    assert isinstance(objective, SupervisedObjective)
    document = random_document(8, 16, 16, torch.Generator().manual_seed(0), layers=len(config.layer_ids))
    document = document._replace(loss_mask=torch.tensor([c == "1" for c in "00111011"]))
    found = objective.supervise(head, seeded(pack([[document]], target, objective.num_terms, seq=9)))
    drafts = [(2, 3, 0), (3, 4, 0), (6, 7, 0), (2, 4, 1)]  # newest token, label, draft
    # a draft model's row is its newest token; others pair the state before it with it
    rows_before = 0 if case in ("draft model", "pard") else 1
    table = {(newest - rows_before, k): label for newest, label, k in drafts if k < objective.num_terms}
    assert {(row, k) for k, row in found.valid.nonzero().tolist()} == set(table)
    ids, tops = head.draft_to_target(), target.logits(document.final).argmax(-1)
    for (row, k), label in table.items():
        text, top = (
            int(token) if ids is None else next(iter((ids == token).nonzero().flatten().tolist()), -1)
            for token in (document.token_ids[label], tops[label - 1])
        )
        wanted = text if loss == "ce" else top
        assert (int(found.tops[k, row]), int(found.labels[k, row])) == (top, wanted)
        assert bool(found.weights[k, row]) == (wanted >= 0)


@pytest.mark.parametrize("loss", ["ce", "kl", "lk_alpha"])
@pytest.mark.parametrize("case", CASES)
def test_gradient_does_not_depend_on_batching_padding_packing_or_ranks(case: str, loss: str):
    """With noise and rows drawn, which belong to the document and not to its place."""
    config, settings = CASES[case]
    target = random_target(16, 16)
    assert_layout_changes_nothing(objective_of(config, loss=loss, **settings), loud_head(config, target), target)


@pytest.mark.parametrize("loss", ["ce", "kl", "tv", "lk_lambda", "lk_alpha"])
@pytest.mark.parametrize("case", CASES)
def test_batch_without_supervised_rows_gives_finite_zeros_for_every_parameter(case: str, loss: str):
    config, settings = CASES[case]
    target = random_target(16, 16)
    assert_no_rows_give_zeros(objective_of(config, loss=loss, **settings), loud_head(config, target), target)


@pytest.mark.parametrize("case", [case for case in CASES if "," not in case and "without" not in case])
def test_uniform_tokens_cannot_be_predicted(case: str):
    """Fresh uniform tokens every step, whose states name the token behind them: a leak, could a row see its label's."""
    config, settings = CASES[case]
    alone = {"noise": 0.0, "feature_weight": 0.0, "law_weight": 1.0} if case == "eagle" else {}
    target, vocab = law_target(torch.eye(16) / 2 + 1 / 32, 16), 6
    head, objective = loud_head(config, target), objective_of(config, loss="ce", **settings, **alone)
    ids = head.draft_to_target()

    def telling(walk: torch.Tensor) -> Document:
        final = torch.eye(16)[walk[1:]]
        aux = final[:, None].expand(-1, len(config.layer_ids), -1)
        return Document(walk[:-1], torch.ones(len(walk) - 1, dtype=torch.bool), aux, final)

    optimizer, generator, recent = torch.optim.Adam(head.parameters(), lr=1e-2), torch.Generator().manual_seed(0), []
    for step in range(60):
        walks = torch.randint(0, vocab, (10, 2, 10), generator=generator)
        batch = seeded(pack([[telling(walk) for walk in row] for row in walks], target, objective.num_terms), step)
        output = objective(head, target, counted(objective, head, batch))
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
        if step >= 30:
            recent.append([share(output, f"loss_{k}") for k in range(objective.num_terms)])
    losses, floor = torch.tensor(recent).mean(0), math.log(vocab if ids is None else int((ids < vocab).sum()))
    # below lies only a leak, far above only a head that did not learn
    assert (losses > floor - 0.02).all() and (losses < floor + 0.2).all(), losses


@pytest.mark.parametrize("case", CASES)
def test_training_moves_the_whole_head_and_nothing_of_the_target(case: str):
    config, settings = CASES[case]
    target, before = random_target(16, 16), random_target(16, 16)
    head, objective = loud_head(config, target), objective_of(config, **settings)
    start = {name: parameter.detach().clone() for name, parameter in head.named_parameters()}
    optimizer = make_optimizer(head, OptimizerSettings(lr=1e-2))
    owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert owned == {id(parameter) for parameter in head.parameters() if parameter.requires_grad}
    generator = torch.Generator().manual_seed(0)
    texts = [random_document(n, 16, 16, generator, layers=len(config.layer_ids)) for n in (12, 9)]
    batch = counted(objective, head, seeded(pack([texts], target, objective.num_terms)))
    for _ in range(5):
        optimizer.zero_grad()
        objective(head, target, batch).loss.backward()
        optimizer.step()
    for name, kept, was in zip(("embeddings", "output", "norm"), theirs(target), theirs(before), strict=True):
        assert torch.equal(kept, was) and id(kept) not in owned, name
    still = {name for name, parameter in head.named_parameters() if torch.equal(parameter, start[name])}
    assert still == {name for name, parameter in head.named_parameters() if not parameter.requires_grad}


def theirs(target: TargetTensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    assert target.norm.weight is not None
    return target.embed_tokens, target.lm_head, target.norm.weight


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_shards_and_autocast_keep_a_float32_loss(case: str):
    config, settings = CASES[case]
    target = random_target(16, 16)
    head, objective = loud_head(config, target), objective_of(config, **settings)
    document = random_document(20, 16, 16, torch.Generator().manual_seed(0), layers=len(config.layer_ids))
    batch = counted(objective, head, seeded(pack([[document]], target, objective.num_terms)))
    wide = objective(head, target, batch).loss
    assert batch.final_states is not None
    low_batch = batch._replace(aux_states=batch.aux_states.bfloat16(), final_states=batch.final_states.bfloat16())
    assert objective(head, target, low_batch).loss.dtype is torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = objective(head, target.to("cpu", torch.bfloat16), low_batch).loss
    assert low.dtype is torch.float32
    torch.testing.assert_close(low, wide, rtol=5e-2, atol=0)
    low.backward()
    assert all(torch.isfinite(grad).all() and grad.dtype is torch.float32 for grad in gradients(head).values())
