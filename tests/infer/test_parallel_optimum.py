"""Heads that draft all tokens in one forward, knowing the chain's law: the engine accepts what can be accepted.

Draft k is drawn from the law k + 1 tokens behind the newest one; the target has the law of the token before it.
"""

import pytest
import torch

from spectrain.heads.decoder import DecoderHead
from spectrain.infer.proposers.base import Proposer
from spectrain.infer.target import Target
from spectrain.tests.fresh import fresh_head, proposer_of, tiny_head_config
from spectrain.tests.infer.markov import (
    DRAFTS,
    MASKED_LAW,
    first_accepted,
    make_marginal,
    marginal_settings,
    markov_target,
    survival,
)
from spectrain.tests.train.texts import overlap
from spectrain.tests.train.toys import MK

LAWS = torch.stack([torch.linalg.matrix_power(MK, k + 1) for k in range(DRAFTS)])
BEST = LAWS.argmax(-1)
HEADS: dict[str, tuple[str, dict[str, object]]] = {
    "pard": ("pard", {"source_layers": [0]}),
    "peagle": ("peagle", {"layer_ids": [1]}),
    "dflash": ("dflash", {"layer_ids": [1], "block_size": 5}),
    "dflash from the anchor": ("dflash", {"layer_ids": [1], "block_size": 4, "sample_from_anchor": True}),
}


@pytest.fixture(scope="module")
def target() -> Target:
    return markov_target(MASKED_LAW)


def perfect(name: str, target: Target, sampling: str) -> Proposer:
    recipe, settings = HEADS[name]
    first = int(recipe == "dflash" and "sample_from_anchor" not in settings)
    config = tiny_head_config(recipe, target.facts, **{**marginal_settings(DRAFTS + first), **settings})
    head = fresh_head(config, target.tensors())
    assert isinstance(head, DecoderHead)
    make_marginal(head, target, first)
    return proposer_of(head, target, DRAFTS, sampling)


def test_the_closed_form_is_that_of_the_chain():
    assert survival(LAWS) == pytest.approx((1, 0.767621, 0.543182, 0.369060), abs=1e-6)
    assert survival(LAWS)[1] == pytest.approx(overlap(2), abs=1e-6)


@pytest.mark.parametrize("sampling", ["probabilistic", "greedy"])
@pytest.mark.parametrize("name", HEADS)
def test_sampled_acceptance_by_position_is_the_closed_form(target: Target, name: str, sampling: str):
    """Greedy drafts are point masses on each law's likeliest token."""
    accepted = first_accepted(target, perfect(name, target, sampling))
    laws = LAWS if sampling == "probabilistic" else torch.nn.functional.one_hot(BEST, 3).float()
    for i, expected in enumerate(survival(laws)):
        assert float((accepted > i).float().mean()) == pytest.approx(expected, abs=0.03 if expected < 1 else 1e-3)


@pytest.mark.parametrize("name", HEADS)
def test_greedy_acceptance_is_that_of_each_start(target: Target, name: str):
    """The chain's likeliest continuation repeats a token; from token 2 the likeliest token two places on is another."""
    accepted = first_accepted(target, perfect(name, target, "greedy"), starts=(1, 1, 1), temperature=0.0)
    assert accepted.tolist() == (torch.arange(3) == BEST).long().cumprod(0).sum(0).tolist() == [DRAFTS, DRAFTS, 1]
