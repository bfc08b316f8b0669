"""Block drafters on a GPU: recorded and launched ahead they say what eager steps say, and what plain decoding says."""

import pytest

from spectrain.infer.proposers.dflash import DFlashProposer
from spectrain.infer.proposers.dspark import DSparkProposer
from spectrain.infer.proposers.none import NoneProposer
from spectrain.infer.target import Target
from spectrain.tests.infer import gpu_runs, test_dflash_proposer, test_dspark_proposer
from spectrain.tests.models import rand_llama

pytestmark = pytest.mark.gpu
HEADS = {
    "dflash": (DFlashProposer, test_dflash_proposer, {"num_layers": 2}),
    "dflash, causal window": (DFlashProposer, test_dflash_proposer, {"causal": True, "sliding_window": 9}),
    "dspark": (DSparkProposer, test_dspark_proposer, {}),
    "dspark, candidates": (DSparkProposer, test_dspark_proposer, {"num_candidates": 5}),
}


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.from_model(rand_llama(max_position_embeddings=256).cuda())


def decode(target: Target, name: str | None, k: int, temperature: float, **changes) -> list[list[int]]:
    proposer = NoneProposer()
    if name is not None:
        kind, module, settings = HEADS[name]
        head = module.head_of(target, **settings).cuda()
        proposer = kind(head, target.tensors(), k, "probabilistic" if temperature else "greedy")
    return gpu_runs.decode(target, proposer, k, temperature, **changes)[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("k", [1, 4, 7])
@pytest.mark.parametrize("name", HEADS)
def test_recorded_steps_say_what_eager_ones_say(target, name, k, temperature):
    assert decode(target, name, k, temperature) == decode(target, name, k, temperature, eager=True)


@pytest.mark.parametrize("policy", ["fixed", "adaptive"])
@pytest.mark.parametrize("name", HEADS)
def test_drafting_changes_nothing_in_float32(target, name, policy):
    assert decode(target, name, 4, 0.0, draft_policy=policy) == decode(target, None, 0, 0.0)
