"""Draft models and PARD on a GPU: recorded steps say what eager ones say, and drafting changes nothing."""

import dataclasses

import pytest

from spectrain.heads.draft_model import DraftModel, DraftModelConfig
from spectrain.infer.engine import Engine
from spectrain.infer.proposers.draft_model import DraftModelProposer
from spectrain.infer.proposers.none import NoneProposer
from spectrain.infer.proposers.pard import PardProposer
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.target import Target
from spectrain.tests.infer import gpu_runs
from spectrain.tests.infer.gpu_runs import CONFIG, texts
from spectrain.tests.language_models import random_draft_model
from spectrain.tests.models import rand_llama

pytestmark = pytest.mark.gpu
METHODS = {"draft_model": DraftModelProposer, "pard": PardProposer}


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.from_model(rand_llama(max_position_embeddings=256).cuda())


def decode(target: Target, method: str, k: int, temperature: float = 0.0, **changes) -> list[list[int]]:
    proposer = NoneProposer()
    if k:
        head = random_draft_model(target.facts, parallel=method == "pard").cuda()
        sampling = "probabilistic" if temperature else "greedy"
        proposer = METHODS[method](head, target.tensors(), k, sampling)  # pyright: ignore[reportArgumentType]
    return gpu_runs.decode(target, proposer, k, temperature, **changes)[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("k", [1, 5])
@pytest.mark.parametrize("method", METHODS)
def test_recorded_steps_say_what_eager_ones_say(target, method, k, temperature):
    assert decode(target, method, k, temperature) == decode(target, method, k, temperature, eager=True)


@pytest.mark.parametrize("policy", ["fixed", "adaptive"])
@pytest.mark.parametrize("method", METHODS)
def test_drafting_changes_nothing_in_float32(target, method, policy):
    assert decode(target, method, 5, draft_policy=policy) == decode(target, method, 0)


def test_a_target_that_drafts_for_itself_is_hardly_ever_wrong(target):
    """Its own fused layers and ours round apart, so near ties may fall either way."""
    shape = {"num_layers": target.facts.num_layers, "source_layers": tuple(range(target.facts.num_layers))}
    head = DraftModel(DraftModelConfig.derive(target.facts, shape))
    head.load_state_dict(rand_llama(max_position_embeddings=256).state_dict())
    engine = Engine(
        target,
        DraftModelProposer(head.cuda(), target.tensors(), 5),
        dataclasses.replace(CONFIG, num_draft_tokens=5),
    )
    engine.generate(texts(8), SamplingParams(max_tokens=40, ignore_eos=True))
    statistics = engine.statistics
    assert statistics.accepted_tokens > 0.95 * statistics.draft_tokens > 0


def test_appended_rows_read_no_further_than_the_blocks_a_request_holds(target):
    """Contexts that end in the last block leave placeholders no slot of their own."""
    head = random_draft_model(target.facts, parallel=True).cuda()
    outputs = []
    for proposer, k in ((PardProposer(head, target.tensors(), 5), 5), (NoneProposer(), 0)):  # pyright: ignore[reportArgumentType]
        engine = Engine(target, proposer, dataclasses.replace(CONFIG, num_draft_tokens=k, max_length=64))
        prompts = [text[:40] for text in texts(12)]
        finished = engine.generate(prompts, SamplingParams(max_tokens=64, ignore_eos=True))
        outputs.append([o.token_ids for o in finished])
    assert outputs[0] == outputs[1]
