"""EAGLE drafting in the engine: lossless with any head, and nothing it drafts depends on its batch."""

import dataclasses
from typing import NamedTuple

import pytest
import torch

from spectrain.heads.base import DraftHead
from spectrain.heads.decoder import DecoderConfig
from spectrain.heads.eagle import EagleConfig
from spectrain.heads.eagle3 import Eagle3Config
from spectrain.heads.peagle import PEagleConfig
from spectrain.heads.resolve import resolve
from spectrain.infer.engine import Engine, EngineConfig
from spectrain.infer.proposers.base import DraftStep
from spectrain.infer.proposers.eagle import EagleProposer
from spectrain.infer.proposers.eagle3 import Eagle3Proposer
from spectrain.infer.proposers.feature import FeatureProposer
from spectrain.infer.proposers.none import NoneProposer
from spectrain.infer.proposers.peagle import PEagleProposer
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.target import Target
from spectrain.tests.models import rand_llama

CONFIG = EngineConfig(num_blocks=200, block_size=4, max_batch_tokens=64, max_batch_size=16)
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.from_model(rand_llama(max_position_embeddings=128))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 97, (n,), generator=generator).tolist() for n in (1, 3, 5, 17, 26, 2, 9)]


@pytest.fixture(scope="module")
def plain(target, prompts) -> list[list[int]]:
    return [o.token_ids for o in Engine(target, NoneProposer(), CONFIG).generate(prompts, GREEDY)]


class Kind(NamedTuple):
    config: type[DecoderConfig]
    proposer: type[FeatureProposer]
    settings: dict[str, object]


EAGLE3 = Kind(Eagle3Config, Eagle3Proposer, {})
EAGLE = Kind(EagleConfig, EagleProposer, {})
PEAGLE = Kind(PEagleConfig, PEagleProposer, {"num_layers": 2, "mask_token_id": 96})
KINDS = [EAGLE3, EAGLE, PEAGLE]
KIND_NAMES = ["eagle3", "eagle", "peagle"]


def head_of(target: Target, kind: Kind = EAGLE3, **settings) -> DraftHead:
    config = kind.config.derive(target.facts, {"draft_vocab_size": 97, **kind.settings, **settings})
    head = resolve(config.network)(config)
    if config.draft_vocab_size < config.vocab_size:
        head.set_draft_vocab(torch.arange(3, 3 + config.draft_vocab_size))
    head.initialise(target.tensors(), torch.Generator().manual_seed(0))
    return head


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (EAGLE3, {}),
        (EAGLE3, {"draft_vocab_size": 50}),
        (EAGLE3, {"layer_style": "qwen3", "num_layers": 2}),
        (EAGLE3, {"norm_output": True, "fc_norm": True}),
        (EAGLE3, {"norm_before_residual": True, "norm_before_fc": True}),
        (EAGLE3, {"layer_ids": (0, 1, 2, 4, 6), "norm_output": True, "fc_norm": True, "num_layers": 2}),
        (EAGLE3, {"layer_ids": (6,)}),
        (EAGLE, {}),
        (EAGLE, {"num_layers": 2, "fc_bias": True}),
        (PEAGLE, {}),
        (PEAGLE, {"draft_vocab_size": 50, "layer_style": "qwen3", "fc_norm": True, "num_layers": 4}),
    ],
    ids=[
        "plain",
        "reduced-vocabulary",
        "qwen3-two-layers",
        "eagle3.1",
        "norms-before",
        "five-aux-layers",
        "one-aux-layer",
        "eagle",
        "eagle-two-layers",
        "peagle",
        "peagle-qwen3",
    ],
)
@pytest.mark.parametrize("k", [1, 2, 5])
def test_greedy_output_never_changes(target, prompts, plain, kind, settings, k):
    proposer = kind.proposer(head_of(target, kind, **settings), target.tensors(), k)
    engine = Engine(target, proposer, dataclasses.replace(CONFIG, num_draft_tokens=k, num_blocks=60))
    assert [o.token_ids for o in engine.generate(prompts, GREEDY)] == plain
    assert engine.statistics.draft_tokens > 0


class Recording(FeatureProposer):
    """Keeps every draft by (request, known tokens)."""

    def propose(self, step):
        drafts = super().propose(step)
        self.drafts = getattr(self, "drafts", {})
        for i, (request, length) in enumerate(zip(step.request_ids, step.seq_lens.tolist(), strict=True)):
            self.drafts[request, length] = drafts.token_ids[i, : drafts.lengths[i]].tolist()
        return drafts


def recording(kind: Kind) -> type[FeatureProposer]:
    return type("Recorded", (Recording, kind.proposer), {})


@pytest.mark.parametrize("kind", KINDS, ids=KIND_NAMES)
def test_drafts_do_not_depend_on_batch_chunks_or_preemption(target, prompts, plain, kind):
    seen = []
    for changes in ({}, {"max_batch_size": 1}, {"max_batch_tokens": 7}, {"num_blocks": 48}):
        proposer = recording(kind)(head_of(target, kind), target.tensors(), 4)
        engine = Engine(target, proposer, dataclasses.replace(CONFIG, num_draft_tokens=4, **changes))
        assert [o.token_ids for o in engine.generate(prompts, GREEDY)] == plain
        seen.append(proposer.drafts)
        assert ("num_blocks" in changes) == (engine.statistics.num_preemptions > 0)
    for drafts in seen[1:]:
        # which rows start a draft may differ, and blocks may leave room for fewer; what is drafted there may not
        common = seen[0].keys() & drafts.keys()
        assert len(common) > 100
        for key in common:
            shared = min(len(seen[0][key]), len(drafts[key]))
            assert seen[0][key][:shared] == drafts[key][:shared]


@pytest.mark.parametrize("kind", KINDS, ids=KIND_NAMES)
def test_drafts_end_where_the_head_ends(target, prompts, plain, kind):
    """A head made for fewer positions than its target drafts up to them and then leaves the target alone."""
    proposer = recording(kind)(head_of(target, kind, max_position_embeddings=24), target.tensors(), 4)
    engine = Engine(target, proposer, dataclasses.replace(CONFIG, num_draft_tokens=4))
    assert [o.token_ids for o in engine.generate(prompts, GREEDY)] == plain
    reached = [length + len(tokens) for (_, length), tokens in proposer.drafts.items() if tokens]
    assert max(reached) <= 25
    assert engine.statistics.num_decode_steps > 0


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_probabilistic_drafts_are_drawn_at_the_requests_temperature(target, temperature):
    proposer = Eagle3Proposer(head_of(target), target.tensors(), 1, "probabilistic")
    logits = torch.randn(2, 97, generator=torch.Generator().manual_seed(0))
    ones, slots = torch.ones(2, dtype=torch.int64), torch.arange(2)
    lengths = torch.tensor([3, 4])
    step = DraftStep([0, 1], slots, torch.zeros(2, 1), lengths, torch.zeros(2), ones, *_sampling(temperature))
    _, law = proposer._draw(logits, step, 0)
    torch.testing.assert_close(law.exp(), (logits / temperature).softmax(-1))


def _sampling(temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((2,), temperature), torch.tensor([0, 1])
