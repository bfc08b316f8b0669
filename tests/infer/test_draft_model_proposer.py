"""Draft models and PARD in the engine: lossless, and drafting what transformers says they draft, whatever the batch."""

import dataclasses
from pathlib import Path

import pytest

from spectrain.heads.pard import Pard
from spectrain.infer.config import EngineConfig
from spectrain.infer.engine import Engine
from spectrain.infer.proposers.base import Proposer
from spectrain.infer.proposers.none import NoneProposer
from spectrain.infer.proposers.pard import PardProposer
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.target import Target
from spectrain.tests.fresh import proposer_of
from spectrain.tests.infer.proposers import keep_drafts
from spectrain.tests.language_models import MASK, chain_drafts, in_transformers, parallel_logits, random_draft_model

CONFIG = EngineConfig(num_blocks=200, block_size=4, max_batch_tokens=64, max_batch_size=16)
NEW_TOKENS = 25
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
METHODS = ["draft_model", "pard"]


@pytest.fixture(scope="module")
def plain(target: Target, prompts: list[list[int]]) -> list[list[int]]:
    return [o.token_ids for o in Engine(target, NoneProposer(), CONFIG).generate(prompts, GREEDY)]


def random_proposer(method: str, target: Target, k: int) -> Proposer:
    return proposer_of(random_draft_model(target.facts, parallel=method == "pard"), target, k)


@pytest.mark.usefixtures("poisoned_padding")
@pytest.mark.parametrize("method", METHODS)
def test_drafts_are_those_of_transformers_whatever_batch_chunks_or_preemptions(
    target, prompts, plain, method, tmp_path: Path
):
    k, expected = 4, {}
    model = in_transformers(random_proposer(method, target, k).head, tmp_path / "head")
    texts = [prompt + output for prompt, output in zip(prompts, plain, strict=True)]
    for changes in ({"num_blocks": 33}, {"launch_ahead": True, "max_batch_tokens": 7}):
        proposer = random_proposer(method, target, k)
        drafts = keep_drafts(proposer)
        engine = Engine(target, proposer, dataclasses.replace(CONFIG, num_draft_tokens=k, **changes))
        assert [o.token_ids for o in engine.generate(prompts, GREEDY)] == plain
        assert ("num_blocks" in changes) == (engine.statistics.num_preemptions > 0)
        compared = 0
        for (request, length), tokens in drafts.items():
            text = texts[request]
            # a request that ended takes one more step, of which nobody knows the text
            if length % 3 == 0 and length < len(text):
                if (request, length) not in expected:
                    expected[request, length] = reference_drafts(method, model, text[:length], k)
                assert tokens == expected[request, length][: len(tokens)]
                compared += len(tokens) > 0
        assert compared > 25


def reference_drafts(method: str, model, text: list[int], k: int) -> list[int]:
    return (
        parallel_logits(model, text, MASK, k).argmax(-1).tolist() if method == "pard" else chain_drafts(model, text, k)
    )


def test_a_parallel_draft_is_fed_the_whole_text_then_masks_at_contiguous_positions(target):
    """Prompt 5 6 7 and k = 4: the next token and three masks follow it, and all four are read."""
    head = random_draft_model(target.facts, parallel=True)
    assert isinstance(head, Pard)
    proposer = PardProposer(head, target.tensors(), 4)
    seen: list[tuple[list[int], list[int]]] = []
    read = proposer._read

    def spy(batch):
        seen.append((batch.token_ids.tolist(), batch.positions.tolist()))
        return read(batch)

    proposer._read = spy
    engine = Engine(target, proposer, dataclasses.replace(CONFIG, num_draft_tokens=4))
    prompt = [5, 6, 7]
    engine.add_request(prompt, SamplingParams(max_tokens=9, ignore_eos=True))
    engine.step()
    (first,) = plain_tokens(target, prompt, 1)
    assert seen == [([5, 6, 7, first, MASK, MASK, MASK], [0, 1, 2, 3, 4, 5, 6])]
    engine.step()
    # whatever was rejected went, and the row after the newest token's begins again at its position
    tokens, positions = seen[1]
    kept = [i for i in range(len(tokens)) if positions[i] == 3 + i]
    known = [first, *plain_tokens(target, prompt + [first], len(kept) - 4)]
    assert [tokens[i] for i in kept] == [*known, MASK, MASK, MASK]


def plain_tokens(target: Target, prompt: list[int], count: int) -> list[int]:
    engine = Engine(target, NoneProposer(), CONFIG)
    tokens = engine.generate([prompt], SamplingParams(max_tokens=count, ignore_eos=True))[0].token_ids
    return tokens
