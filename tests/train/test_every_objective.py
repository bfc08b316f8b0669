"""Every objective: which rows count and what they are trained on, and the same gradient whatever a batch's layout."""

import pytest
import torch

from spectrain.heads.base import HeadConfig
from spectrain.heads.dspark import DSparkConfig
from spectrain.tests.fresh import loud_head, objective_of
from spectrain.tests.language_models import draft_model_config
from spectrain.tests.train.blocks import block_config
from spectrain.tests.train.invariance import assert_layout_changes_nothing, assert_no_rows_give_zeros
from spectrain.tests.train.per_step import make_config
from spectrain.tests.train.toys import (
    pack,
    random_document,
    random_target,
    seeded,
    tiny_config,
    tiny_eagle_config,
    tiny_facts,
    tiny_peagle_config,
)
from spectrain.train.objectives.supervision import SupervisedObjective

DSPARK = {"layer_ids": (2, 3, 4), "num_layers": 1, "block_size": 3, "mask_token_id": 15, "markov_rank": 4}
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
    "dspark": (DSparkConfig.derive(tiny_facts(), DSPARK), {"anchors": 4}),
    "dspark without confidence": (DSparkConfig.derive(tiny_facts(), {**DSPARK, "confidence_head": False}), {}),
}


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
