"""The engine on a GPU: recorded, launched ahead, without a single twin; and what it says is what eager steps say."""

import dataclasses

import pytest
import torch
from torch.utils._pytree import tree_leaves

from spectrain.infer.engine import Engine
from spectrain.infer.graphs import GraphCache
from spectrain.infer.proposers.none import NoneProposer
from spectrain.infer.target import Target
from spectrain.tests.fresh import fresh_proposer
from spectrain.tests.infer import gpu_runs
from spectrain.tests.infer.gpu_runs import CONFIG
from spectrain.tests.kernels.twins import refuse_twins
from spectrain.tests.models import rand_llama

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.from_model(rand_llama(max_position_embeddings=256).cuda())


def decode(target: Target, k: int, temperature: float, **changes) -> list[list[int]]:
    sampling = "probabilistic" if temperature else "greedy"
    proposer = fresh_proposer("eagle3", target, k, sampling) if k else NoneProposer()
    return gpu_runs.decode(target, proposer, k, temperature, **changes)[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("k", [0, 1, 5])
def test_recorded_steps_say_what_eager_ones_say(target, k, temperature):
    assert decode(target, k, temperature) == decode(target, k, temperature, eager=True)


def test_drafting_changes_nothing_in_float32(target):
    assert decode(target, 5, 0.0) == decode(target, 0, 0.0)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("k", [1, 5])
def test_adaptive_drafting_changes_nothing_in_float32(target, k, eager):
    assert decode(target, k, 0.0, draft_policy="adaptive", eager=eager) == decode(target, 0, 0.0)


def test_adaptive_drafting_measures_every_size_it_chooses_from(target):
    proposer = fresh_proposer("eagle3", target, 5)
    engine = Engine(target, proposer, dataclasses.replace(CONFIG, num_draft_tokens=5, draft_policy="adaptive"))
    assert engine.runner.policy is not None
    costs = engine.runner.policy.costs
    assert (costs.batches, costs.widths) == ((1, 2, 4, 8, 16), (1, 2, 3, 4, 6))
    assert all(cost > 0 for row in costs.verify_ms for cost in row)
    assert all(draft > rest > 0 for draft, rest in zip(costs.draft_ms, costs.rest_ms, strict=True))


def test_no_twin_is_needed(target, monkeypatch):
    refuse_twins(monkeypatch)
    assert all(decode(target, 4, 1.0))
    assert all(decode(target, 4, 1.0, draft_policy="adaptive"))


@pytest.mark.parametrize("k", [0, 5])
def test_every_replay_finds_its_arguments_where_they_were_recorded(target, k, monkeypatch):
    places: dict[object, list[int]] = {}
    run = GraphCache.run

    def watched(self, key, function, *arguments):
        found = [leaf.data_ptr() for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
        assert places.setdefault((id(self), key), found) == found, f"{key} is replayed on other tensors"
        return run(self, key, function, *arguments)

    monkeypatch.setattr(GraphCache, "run", watched)
    decode(target, k, 0.0)
    assert {key[0] for _, key in places} >= {"target", "verify"}
    assert any("mixed" in key for _, key in places)
