"""Recurrent targets on a GPU: recorded, launched ahead, and saying what the library says alone."""

import copy
import dataclasses

import pytest
import torch

from spectrain.infer.config import EngineConfig
from spectrain.infer.engine import Engine
from spectrain.infer.proposers.none import NoneProposer
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.target import Target
from spectrain.tests.fresh import fresh_proposer
from spectrain.tests.models import HYBRIDS

pytestmark = pytest.mark.gpu
CONFIG = EngineConfig(num_blocks=400, block_size=16, max_batch_tokens=128, max_batch_size=8)
FAMILIES = ["qwen3_5", "nemotron_h", "lfm2"]


def texts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 100, (count,), generator=generator).tolist()
    return [torch.randint(3, 97, (n,), generator=generator).tolist() for n in lengths]


def decode(target: Target, k: int, temperature: float, **changes) -> list[list[int]]:
    sampling = "probabilistic" if temperature else "greedy"
    proposer = fresh_proposer("eagle3", target, k, sampling) if k else NoneProposer()
    engine = Engine(target, proposer, dataclasses.replace(CONFIG, num_draft_tokens=k, **changes))
    assert engine.not_recorded is None
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=5 + 3 * (i % 5)) for i in range(14)]
    return [o.token_ids for o in engine.generate(texts(14), params)]


@pytest.fixture(scope="module", params=FAMILIES)
def target(request: pytest.FixtureRequest) -> Target:
    return Target.from_model(HYBRIDS[request.param]().cuda())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("k", [0, 1, 5])
def test_recorded_steps_say_what_eager_ones_say(target: Target, k: int, temperature: float):
    assert decode(target, k, temperature) == decode(target, k, temperature, eager=True)


def test_drafting_changes_nothing_in_float32(target: Target):
    plain = decode(target, 0, 0.0)
    assert decode(target, 5, 0.0) == plain
    assert decode(target, 5, 0.0, draft_policy="adaptive") == plain


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_transformers(family: str):
    model = HYBRIDS[family]().cuda()
    oracle = copy.deepcopy(model)
    outputs = decode(Target.from_model(model), 3, 0.0)
    for prompt, output in zip(texts(14), outputs, strict=True):
        ids = torch.tensor([prompt], device="cuda")
        settings = {"max_new_tokens": len(output), "do_sample": False}
        assert (
            oracle.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist() == output
        )
