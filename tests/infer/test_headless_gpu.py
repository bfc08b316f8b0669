"""N-gram drafts on a GPU: recorded = eager, device = host; and what is recorded of steps that draft on the host."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from spectrain.infer.config import EngineConfig
from spectrain.infer.engine import Engine
from spectrain.infer.planes import Planes
from spectrain.infer.proposers.base import Proposer
from spectrain.infer.proposers.hybrid import HybridProposer
from spectrain.infer.proposers.ngram import NgramProposer
from spectrain.infer.proposers.ngram_gpu import NgramGpuProposer
from spectrain.infer.proposers.ngram_rule import NgramRule
from spectrain.infer.proposers.none import NoneProposer
from spectrain.infer.proposers.suffix import SuffixProposer
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.target import Target
from spectrain.tests.fresh import fresh_proposer
from spectrain.tests.infer.draft_steps import drafted, drafts_for, step_of
from spectrain.tests.models import rand_llama
from spectrain.tests.suffix_package import NEEDS_SUFFIX

pytestmark = pytest.mark.gpu
K = 4
RULE = NgramRule(min_n=1, max_n=3)
CONFIG = EngineConfig(num_draft_tokens=K, num_blocks=400, block_size=16, max_batch_tokens=256, max_batch_size=16)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.from_model(rand_llama(max_position_embeddings=256).cuda())


def decode(target: Target, proposer: Proposer, temperature: float = 0.0, **changes) -> tuple[list[list[int]], Engine]:
    generator = torch.Generator().manual_seed(5)
    pieces = [torch.randint(3, 97, (3 + i % 9,), generator=generator).tolist() for i in range(24)]
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=5 + 9 * (i % 5)) for i in range(24)]
    engine = Engine(target, proposer, dataclasses.replace(CONFIG, **changes))
    outputs = engine.generate([piece * 3 for piece in pieces], params)
    assert engine.pool.num_free == engine.pool.num_blocks - 1
    return [o.token_ids for o in outputs], engine


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", [NgramProposer, NgramGpuProposer])
def test_recorded_steps_say_what_eager_ones_say(target, kind, temperature) -> None:
    recorded, engine = decode(target, kind(K, RULE), temperature)
    eager, plainly = decode(target, kind(K, RULE), temperature, eager=True)
    assert recorded == eager and engine.runner.graphs is not None
    for field in ("num_drafts", "draft_tokens", "accepted_per_position"):
        assert getattr(engine.statistics, field) == getattr(plainly.statistics, field)
    assert engine.statistics.accepted_tokens > 0


@pytest.mark.parametrize("kind", [NgramProposer, NgramGpuProposer])
def test_greedy_output_is_the_targets_own(target, kind) -> None:
    plain, _ = decode(target, NoneProposer(), num_draft_tokens=0)
    assert decode(target, kind(K, RULE))[0] == plain


@NEEDS_SUFFIX
@pytest.mark.parametrize("sampling", ["greedy", "probabilistic"])
def test_the_head_of_a_hybrid_is_recorded_and_prompts_beside_it(target, sampling) -> None:
    plain, _ = decode(target, NoneProposer(), num_draft_tokens=0)
    hybrid = HybridProposer(SuffixProposer(K), fresh_proposer("eagle3", target, 2, sampling))
    said, engine = decode(target, hybrid)
    assert said == plain and engine.not_recorded is None and engine.runner.graphs is not None
    recorded = {(stage, place == "mixed") for stage, place, *_ in engine.runner.graphs._recorded}
    stages = ("target", "verify", "observe", "brief", "take")
    assert recorded == {("follow", False)} | set(itertools.product(stages, (True, False)))
    assert engine.statistics.accepted_tokens > 0


@pytest.mark.parametrize("occurrence", ["earliest", "latest"])
def test_device_drafts_are_the_hosts_recorded_or_not(occurrence) -> None:
    rng, rule = np.random.default_rng(0), dataclasses.replace(RULE, occurrence=occurrence)
    texts = [rng.integers(0, 3 + 40 * (i % 5), int(rng.integers(1, 900))).tolist() for i in range(33)]
    fields = {"width": 1000, "room": [i % 7 for i in range(33)]}
    step = step_of(texts, **fields)
    step = step._replace(**{n: v.cuda() for n, v in step._asdict().items() if isinstance(v, torch.Tensor)})
    host, device = NgramProposer(K, rule), NgramGpuProposer(K, rule)
    host.bind(Planes((), 1, 1, torch.device("cpu")), 33)
    expected = drafts_for(host, texts, **fields)
    assert drafted(device.propose(step)) == expected
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        recorded = device.propose(step)
    recorded.token_ids.fill_(-7)
    graph.replay()
    assert drafted(recorded) == expected and sum(map(len, expected)) > 30
    # the same recording on other texts
    step.tokens.copy_(step.tokens.roll(1, dims=0))
    step.seq_lens.copy_(step.seq_lens.roll(1, dims=0))
    step.room.copy_(step.room.roll(1, dims=0))
    graph.replay()
    assert drafted(recorded) == [expected[-1], *expected[:-1]]
