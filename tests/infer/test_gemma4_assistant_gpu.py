"""Gemma 4 assistants on a GPU: recorded steps say what eager ones say, and drafting changes nothing."""

import dataclasses
from pathlib import Path

import pytest

from spectrain.infer.engine import Engine
from spectrain.infer.proposers.gemma4_assistant import Gemma4AssistantProposer
from spectrain.infer.proposers.none import NoneProposer
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.target import Target
from spectrain.tests.gemma4_assistants import ORDERED, assistant_of, read_by_us
from spectrain.tests.infer import gpu_runs
from spectrain.tests.infer.gpu_runs import CONFIG, texts
from spectrain.tests.infer.proposers import keep_drafts
from spectrain.tests.models import gemma4

pytestmark = pytest.mark.gpu
K = 4
WIDE = {"max_position_embeddings": 256, "vocab_size": 108, "head_dim": 256, "global_head_dim": 512}
"""The released widths of heads, and a vocabulary that holds the texts."""


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.from_model(gemma4(**WIDE).cuda())


@pytest.fixture(scope="module", params=[False, True], ids=["whole", "ordered"])
def head(request: pytest.FixtureRequest, target: Target, tmp_path_factory: pytest.TempPathFactory):
    widths = {"head_dim": 256, "global_head_dim": 512}
    changes = ORDERED if request.param else {}
    folder: Path = tmp_path_factory.mktemp("assistant")
    return read_by_us(assistant_of(target.config, text=widths, **changes), folder, target).cuda()


def decode(target: Target, head, temperature: float = 0.0, **changes) -> tuple[list[list[int]], Engine]:
    proposer = NoneProposer()
    if head is not None:
        sampling = "probabilistic" if temperature else "greedy"
        proposer = Gemma4AssistantProposer(head, target.tensors(), K, sampling)
    return gpu_runs.decode(target, proposer, K if head else 0, temperature, **changes)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_recorded_steps_say_what_eager_ones_say(target, head, temperature):
    recorded, engine = decode(target, head, temperature)
    assert recorded == decode(target, head, temperature, eager=True)[0]
    assert engine.not_recorded is None and engine.statistics.draft_tokens > 0


def test_drafting_changes_nothing_in_float32(target, head):
    assert decode(target, head)[0] == decode(target, None)[0]


def test_drafts_on_the_device_are_those_of_the_host(target, head, tmp_path):
    found = []
    for place, model in (("cuda", target), ("cpu", Target.from_model(gemma4(**WIDE)))):
        proposer = Gemma4AssistantProposer(head.to(place), model.tensors(), K)
        drafts = keep_drafts(proposer)
        Engine(model, proposer, dataclasses.replace(CONFIG, num_draft_tokens=K, eager=True)).generate(
            texts(6), SamplingParams(max_tokens=12, ignore_eos=True)
        )
        found.append(drafts)
    head.to("cuda")
    common = found[0].keys() & found[1].keys()
    same = sum(found[0][key] == found[1][key] for key in common)
    assert len(common) > 30 and same >= 0.95 * len(common)  # near ties may fall either way
