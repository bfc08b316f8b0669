"""Every objective: the same gradient whatever the layout of a batch, and zeros where nothing counts."""

import pytest

from spectrain.heads.base import HeadConfig
from spectrain.heads.dspark import DSparkConfig
from spectrain.heads.mtp import MtpConfig
from spectrain.tests.fresh import loud_head, objective_of
from spectrain.tests.language_models import draft_model_config
from spectrain.tests.train.blocks import block_config
from spectrain.tests.train.invariance import assert_layout_changes_nothing, assert_no_rows_give_zeros
from spectrain.tests.train.per_step import make_config
from spectrain.tests.train.toys import random_target, tiny_config, tiny_eagle_config, tiny_facts, tiny_peagle_config

DSPARK = {"layer_ids": (2, 3, 4), "num_layers": 1, "block_size": 3, "mask_token_id": 15, "markov_rank": 4}
CASES: dict[str, tuple[HeadConfig, dict[str, object]]] = {
    "eagle": (tiny_eagle_config(num_layers=2, fc_bias=True), {}),
    "eagle3": (tiny_config(num_layers=2, draft_vocab_size=11), {"steps": 4}),
    "mtp": (MtpConfig.derive(tiny_facts(), {}), {}),
    "mtp, two layers": (MtpConfig.derive(tiny_facts(), {"num_layers": 2}), {"steps": 4}),
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
