"""Draft models and PARD in the engine: lossless, and drafting what transformers says they draft, whatever the batch."""

import dataclasses
from pathlib import Path

import pytest
import torch

from spectrain.heads.draft_model import DraftModel
from spectrain.heads.pard import Pard
from spectrain.infer.engine import Engine, EngineConfig
from spectrain.infer.proposers.draft_model import DraftModelProposer
from spectrain.infer.proposers.none import NoneProposer
from spectrain.infer.proposers.pard import PardProposer
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.target import Target
from spectrain.tests.language_models import MASK, chain_drafts, in_transformers, parallel_logits, random_draft_model
from spectrain.tests.models import rand_llama

CONFIG = EngineConfig(num_blocks=200, block_size=4, max_batch_tokens=64, max_batch_size=16)
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
METHODS = ["draft_model", "pard"]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.from_model(rand_llama(max_position_embeddings=128))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 97, (n,), generator=generator).tolist() for n in (1, 3, 5, 17, 26, 2, 9)]


@pytest.fixture(scope="module")
def plain(target: Target, prompts: list[list[int]]) -> list[list[int]]:
    return [o.token_ids for o in Engine(target, NoneProposer(), CONFIG).generate(prompts, GREEDY)]


class Recorder:
    """Keeps every draft by (request, known tokens)."""

    drafts: dict[tuple[int, int], list[int]]

    def propose(self, step):
        drafts = super().propose(step)  # pyright: ignore[reportAttributeAccessIssue]
        self.drafts = getattr(self, "drafts", {})
        for i, (request, length) in enumerate(zip(step.request_ids, step.seq_lens.tolist(), strict=True)):
            self.drafts[request, length] = drafts.token_ids[i, : drafts.lengths[i]].tolist()
        return drafts


class RecordingDraftModel(Recorder, DraftModelProposer):
    pass


class RecordingPard(Recorder, PardProposer):
    pass


def proposer_of(method: str, target: Target, k: int, sampling: str = "greedy", **settings):
    head = random_draft_model(target.facts, parallel=method == "pard", **settings)
    kind = RecordingPard if method == "pard" else RecordingDraftModel
    return kind(head, target.tensors(), k, sampling)


@pytest.mark.parametrize("settings", [{}, {"family": "qwen3"}, {"family": "qwen2", "tie_word_embeddings": True}])
@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("method", METHODS)
def test_greedy_output_never_changes(target, prompts, plain, method, k, settings):
    proposer = proposer_of(method, target, k, **settings)
    engine = Engine(target, proposer, dataclasses.replace(CONFIG, num_draft_tokens=k, num_blocks=60))
    assert [o.token_ids for o in engine.generate(prompts, GREEDY)] == plain
    assert engine.statistics.draft_tokens > 0


@pytest.mark.parametrize("method", METHODS)
def test_drafts_are_those_of_transformers_whatever_batch_chunks_or_preemptions(
    target, prompts, plain, method, tmp_path: Path
):
    k, checked = 4, {}
    model = None
    for changes in ({}, {"max_batch_size": 1}, {"max_batch_tokens": 7}, {"num_blocks": 48}, {"launch_ahead": True}):
        proposer = proposer_of(method, target, k)
        model = model or in_transformers(proposer.head, tmp_path / "head")
        engine = Engine(target, proposer, dataclasses.replace(CONFIG, num_draft_tokens=k, **changes))
        assert [o.token_ids for o in engine.generate(prompts, GREEDY)] == plain
        assert ("num_blocks" in changes) == (engine.statistics.num_preemptions > 0)
        assert len(proposer.drafts) > 100
        for (request, length), tokens in proposer.drafts.items():
            if (request, length) not in checked:
                text = (prompts[request] + plain[request])[:length]
                if method == "pard":
                    checked[request, length] = parallel_logits(model, text, MASK, k).argmax(-1).tolist()
                else:
                    checked[request, length] = chain_drafts(model, text, k)
            if length < len(prompts[request]) + 40:  # a request that ended takes one more step, whose text is not known
                assert tokens == checked[request, length][: len(tokens)]
