"""The prefix cache in the real engine: with it and without it the same tokens, the same drafts, the same acceptance."""

import dataclasses

import pytest
import torch

from spectrain.infer.config import EngineConfig
from spectrain.infer.engine import Engine
from spectrain.infer.proposers.base import DraftStep
from spectrain.infer.proposers.eagle3 import Eagle3Proposer
from spectrain.infer.proposers.extract_hidden_states import ExtractHiddenStatesProposer
from spectrain.infer.proposers.none import NoneProposer
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.scoring import score_rows
from spectrain.infer.target import Target
from spectrain.tests.fresh import loud_head, tiny_head_config
from spectrain.tests.infer.block_invariants import WatchedEngine
from spectrain.tests.infer.proposers import RecordingProposer
from spectrain.tests.models import lone_forward, rand_llama

K = 3
CONFIG = EngineConfig(num_draft_tokens=K, num_blocks=200, block_size=4, max_batch_tokens=64, max_batch_size=4)
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.from_model(rand_llama(3, max_position_embeddings=128))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Twelve that begin alike for 0 to 17 tokens; among them pairs that part right at a block's end."""
    generator = torch.Generator().manual_seed(5)
    system = torch.randint(3, 97, (17,), generator=generator).tolist()
    tails = [torch.randint(3, 97, (n,), generator=generator).tolist() for n in (1, 3, 9, 4, 2, 7)]
    return [*(system + tail for tail in tails), *(system[: 4 * i] + tails[5] for i in range(5)), system + tails[0]]


class Logged(Eagle3Proposer):
    """Keeps the draft logits by (request, known tokens, draft)."""

    def __init__(self, target: Target, *, blind: bool = False) -> None:
        tensors = target.tensors()
        # a fresh head hardly attends
        super().__init__(loud_head(tiny_head_config("eagle3", target.facts), tensors, random_norms=True), tensors, K)
        if blind:
            self.requirements = dataclasses.replace(self.requirements, next_token=False)
        self.logits: dict[tuple[int, int, int], torch.Tensor] = {}

    def _draw(self, logits: torch.Tensor, step: DraftStep, k: int):
        for i, (request, length) in enumerate(zip(step.request_ids, step.seq_lens.tolist(), strict=True)):
            if k < int(step.room[i]):
                self.logits[request, length, k] = logits[i].clone()
        return super()._draw(logits, step, k)


def finished(engine: Engine) -> Engine:
    assert engine.pool.num_free == engine.pool.num_blocks - 1, "a block leaked"
    return engine


def difference(one: Logged, other: Logged) -> float:
    """Of the draft logits that both computed, the largest difference."""
    common = one.logits.keys() & other.logits.keys()
    assert len(common) > 200
    return max((one.logits[key] - other.logits[key]).abs().max().item() for key in common)


@pytest.fixture(scope="module")
def uncached(target, prompts):
    proposer = Logged(target)
    engine = Engine(target, proposer, dataclasses.replace(CONFIG, prefix_cache=False))
    outputs = engine.generate(prompts, GREEDY)
    assert finished(engine).statistics.cached_prompt_tokens == 0
    return proposer, outputs, engine.statistics


@pytest.mark.parametrize(
    "changes",
    [{}, {"max_batch_tokens": 5}, {"max_batch_size": 1}, {"block_size": 1}, {"launch_ahead": True}],
    ids=str,
)
def test_tokens_drafts_and_acceptance_are_those_without_it(target, prompts, uncached, changes):
    expected_proposer, expected, _ = uncached
    proposer = Logged(target)
    engine = WatchedEngine(target, proposer, dataclasses.replace(CONFIG, **changes))
    outputs = engine.generate(prompts, GREEDY)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    if "max_batch_tokens" not in changes:  # a small budget may leave drafts out, differently where prompts are shorter
        assert [o.block_lengths for o in outputs] == [o.block_lengths for o in expected]
    assert difference(proposer, expected_proposer) < 1e-4
    statistics = finished(engine).statistics
    assert statistics.prompt_tokens == sum(map(len, prompts))
    assert statistics.cached_prompt_tokens > 40 and statistics.cache_hits >= 6
    if "max_batch_size" not in changes:
        assert engine.most_shared > 1


def test_without_the_look_ahead_token_drafts_would_start_from_another_texts_rows(target, prompts, uncached):
    """The guard of the tests above: they see a draft plane whose shared rows are wrong."""
    proposer = Logged(target, blind=True)
    engine = Engine(target, proposer, CONFIG)
    outputs = engine.generate(prompts, GREEDY)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in uncached[1]]  # drafting is lossless all the same
    assert difference(proposer, uncached[0]) > 0.1


def test_preempted_requests_start_from_their_own_blocks(target, prompts, uncached):
    expected_proposer, expected, _ = uncached
    proposer = Logged(target)
    engine = WatchedEngine(target, proposer, dataclasses.replace(CONFIG, num_blocks=16, max_batch_size=6))
    resumed = []
    schedule = engine.scheduler.schedule

    def watched():
        waiting = set(engine.scheduler.waiting)
        scheduled, preempted = schedule()
        resumed.extend(r.start for r in scheduled if r.request in waiting and r.request.num_preemptions)
        return scheduled, preempted

    engine.scheduler.schedule = watched
    outputs = engine.generate(prompts, GREEDY)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert difference(proposer, expected_proposer) < 1e-4
    assert finished(engine).statistics.num_preemptions == len(resumed) > 3
    assert sum(start > 0 for start in resumed) > 1


def test_a_conversation_continues_from_its_own_answer(target):
    """Turns end in the middle of accepted drafts; what was computed beyond the end must not come back."""
    generator = torch.Generator().manual_seed(2)
    texts = {}
    for cached in (False, True):
        generator.manual_seed(2)
        engine = WatchedEngine(target, Logged(target), dataclasses.replace(CONFIG, prefix_cache=cached))
        text = torch.randint(3, 97, (5,), generator=generator).tolist()
        for turn in range(6):
            params = SamplingParams(max_tokens=3 + turn % 3, ignore_eos=True)
            (output,) = engine.generate([text], params)
            text = text + output.token_ids + torch.randint(3, 97, (4,), generator=generator).tolist()
        texts[cached] = text
        assert bool(finished(engine).statistics.cached_prompt_tokens) == cached
    assert texts[True] == texts[False]


@pytest.mark.parametrize("seed", range(3))
def test_a_storm_of_cancellations_leaks_nothing_and_spares_the_others(target, prompts, uncached, seed):
    engine = WatchedEngine(target, Logged(target), dataclasses.replace(CONFIG, num_blocks=20, max_batch_size=6))
    generator = torch.Generator().manual_seed(seed)
    outputs, ids = {}, []
    for i in range(40):
        ids.append(engine.add_request(prompts[i % len(prompts)], GREEDY))
        alive = [n for n in ids if n not in outputs]
        if i % 2:
            victim = alive[int(torch.randint(len(alive), (), generator=generator))]
            outputs[victim] = engine.cancel(victim)
            assert engine.cancel(victim) is None
        outputs |= {o.request_id: o for o in engine.step()}
    while engine.has_unfinished():
        outputs |= {o.request_id: o for o in engine.step()}
    finished(engine)
    for i, n in enumerate(ids):
        expected, got = uncached[1][i % len(prompts)].token_ids, outputs[n].token_ids
        assert got == expected[: len(got)]
        assert outputs[n].finish_reason.value == "cancelled" or got == expected


def test_scoring_borrows_cached_blocks_and_leaves_no_trace(target, prompts, uncached):
    engine = WatchedEngine(target, Logged(target), dataclasses.replace(CONFIG, num_blocks=40))
    for _ in range(2):
        outputs = engine.generate(prompts, GREEDY)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in uncached[1]]
        text = [(7 * i) % 90 + 3 for i in range(100)]
        keys = set(engine.pool._block_of)
        expected, _ = lone_forward(rand_llama(3, max_position_embeddings=128), text)
        torch.testing.assert_close(score_rows(engine, text, [3, 99]), expected[[3, 99]], atol=2e-4, rtol=1e-4)
        assert set(engine.pool._block_of) < keys  # some were evicted, none was added
        engine.check()


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_rows_that_the_cache_holds_are_not_observed_again(target, prompts, prefix_cache):
    config = dataclasses.replace(CONFIG, num_draft_tokens=0, prefix_cache=prefix_cache, max_batch_size=1)
    proposer = RecordingProposer()
    engine = Engine(target, proposer, config)
    outputs = engine.generate([prompts[2], prompts[2]], GREEDY)
    first, second = ([position for position, *_ in proposer.rows[o.request_id]] for o in outputs)
    length = len(prompts[2]) + 15
    assert first == list(range(length))
    assert second == list(range(24 if prefix_cache else 0, length))


def test_extracted_states_are_whole_even_where_rows_were_cached(target, prompts):
    """Extraction runs with the cache off; where a user leaves it on, states come from the shared blocks."""
    states: dict[int, torch.Tensor] = {}
    proposer = ExtractHiddenStatesProposer(target, (0, 2, 3), lambda i, s: states.__setitem__(i, s.clone()))
    engine = Engine(target, proposer, dataclasses.replace(CONFIG, num_draft_tokens=0))
    outputs = engine.generate(prompts, SamplingParams(max_tokens=1))
    assert engine.statistics.cached_prompt_tokens > 0
    for output, prompt in zip(outputs, prompts, strict=True):
        _, layers = lone_forward(rand_llama(3, max_position_embeddings=128), prompt)
        expected = torch.stack([layers[i] for i in (0, 2, 3)], dim=1)
        torch.testing.assert_close(states[output.request_id], expected, atol=2e-5, rtol=1e-4)


def test_forgetting_starts_from_nothing(target, prompts):
    engine = Engine(target, NoneProposer(), dataclasses.replace(CONFIG, num_draft_tokens=0))
    engine.generate(prompts[:1], GREEDY)
    engine.pool.forget()
    engine.generate(prompts[:1], GREEDY)
    assert engine.statistics.cached_prompt_tokens == 0
    engine.generate(prompts[:1], GREEDY)
    assert engine.statistics.cached_prompt_tokens == 16
