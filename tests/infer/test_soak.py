"""Random requests for a long time: arrivals, cancellations, long and short, every sampling setting, too few blocks.

What is provable without equal logits: a greedy request gives the tokens of plain decoding (this target's winners are
clear of float32 rounding), a cancelled one a beginning of them, and no block is lost or overwritten.

Sampled tokens depend on the logits bit for bit, and float32 logits depend on the shape of the batch in the last bit.
So their rerun needs a target whose logits are exact: one product a logit and no sum to order. There the same seed gives
the same tokens in another batch composition, under preemption and cancellation, where nothing is drafted. Where drafts
are, the tokens also depend on how many are offered at each position, so blocks and budget must suffice in both runs;
where they do not, what is left to prove is that every token follows the target's law.
"""

import dataclasses
import math
import random
from typing import NamedTuple

import pytest
import torch

from spectrain.infer.config import EngineConfig
from spectrain.infer.engine import Engine
from spectrain.infer.losslessness import Generation, Losslessness, check_sampled
from spectrain.infer.proposers.base import Drafts, DraftStep, Proposer
from spectrain.infer.proposers.none import NoneProposer
from spectrain.infer.request import FinishReason, RequestOutput
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.scoring import apply_settings
from spectrain.infer.target import Target
from spectrain.tests.fresh import loud_proposer
from spectrain.tests.infer.block_invariants import WatchedEngine
from spectrain.tests.infer.proposers import RecordingProposer
from spectrain.tests.models import rand_llama, succ_llama

K = 3
TIGHT = EngineConfig(num_draft_tokens=K, num_blocks=30, block_size=4, max_batch_tokens=24, max_batch_size=8)
AMPLE = EngineConfig(num_draft_tokens=K, num_blocks=2000, block_size=4, max_batch_tokens=512, max_batch_size=32)
EXACT_VOCAB = 41


class Work(NamedTuple):
    prompt: list[int]
    params: SamplingParams
    arrives: int  # step
    cancelled: int | None  # steps after arrival


def work(count: int, seed: int, vocab_size: int) -> list[Work]:
    """Short and long texts, half of them with one of three common beginnings; half greedy; one in ten cancelled."""
    rng = random.Random(seed)
    beginnings = [[rng.randrange(3, vocab_size) for _ in range(n)] for n in (8, 13, 30)]
    items, step = [], 0
    for i in range(count):
        step += rng.choice((0, 0, 1, 2, 5))
        prompt = list(rng.choice(beginnings)) if rng.random() < 0.5 else []
        prompt += [rng.randrange(3, vocab_size) for _ in range(rng.choice((1, 2, 5, 11, 40)))]
        limits = {
            "max_tokens": rng.choice((0, 1, 2, 6, 12, 30)),
            "stop_token_ids": tuple(rng.sample(range(vocab_size), 2)),
            "ignore_eos": rng.random() < 0.5,
        }
        if rng.random() < 0.5:
            limits |= {
                "temperature": rng.choice((0.3, 1.0, 1.7)),
                "top_k": rng.choice((0, 1, 5)),
                "top_p": rng.choice((1.0, 0.8)),
                "min_p": rng.choice((0.0, 0.05)),
            }
        params = SamplingParams(seed=i, min_tokens=rng.choice((0, limits["max_tokens"] // 2)), **limits)
        items.append(Work(prompt, params, step, rng.randrange(20) if rng.random() < 0.1 else None))
    return items


def soak(engine: Engine, items: list[Work]) -> list[RequestOutput]:
    """Runs requests as they arrive; outputs in their order."""
    outputs: dict[int, RequestOutput] = {}
    ids: list[int] = []
    doomed: dict[int, int] = {}
    step = 0
    while len(ids) < len(items) or engine.has_unfinished():
        while len(ids) < len(items) and items[len(ids)].arrives <= step:
            item = items[len(ids)]
            ids.append(engine.add_request(item.prompt, item.params))
            if item.cancelled is not None:
                doomed[ids[-1]] = step + item.cancelled
        for request_id in [n for n, when in doomed.items() if when <= step]:
            del doomed[request_id]
            if output := engine.cancel(request_id):
                outputs[request_id] = output
        outputs |= {o.request_id: o for o in engine.step()}
        step += 1
    assert engine.pool.num_free == engine.pool.num_blocks - 1, "a block leaked"
    return [outputs[n] for n in ids]


def plainly(target: Target, items: list[Work]) -> list[RequestOutput]:
    """Every request in full by plain decoding, nothing shared and nothing scarce."""
    engine = Engine(target, NoneProposer(), dataclasses.replace(AMPLE, num_draft_tokens=0, prefix_cache=False))
    return engine.generate([item.prompt for item in items], [item.params for item in items])


def check_equal(outputs: list[RequestOutput], expected: list[RequestOutput], items: list[Work]) -> int:
    """Equal tokens and end, or their beginning where cancelled; returns how many were compared whole."""
    whole = 0
    for output, right, item in zip(outputs, expected, items, strict=True):
        if output.finish_reason is FinishReason.CANCELLED:
            assert item.cancelled is not None
            assert output.token_ids == right.token_ids[: len(output.token_ids)]
        else:
            assert (output.token_ids, output.finish_reason) == (right.token_ids, right.finish_reason)
            whole += 1
    return whole


def eagle3(target: Target) -> Proposer:
    return loud_proposer("eagle3", target, K, "probabilistic")


def greedy_soak(count: int, *, launch_ahead: bool) -> None:
    target = Target.from_model(rand_llama(3, max_position_embeddings=128))
    items = work(count, seed=count, vocab_size=97)
    config = dataclasses.replace(TIGHT, launch_ahead=launch_ahead, max_batch_tokens=8 * (K + 1))
    outputs = soak(engine := WatchedEngine(target, eagle3(target), config), items)
    expected = plainly(target, items)
    greedy = [i for i, item in enumerate(items) if item.params.temperature == 0]
    compared = check_equal(*([rows[i] for i in greedy] for rows in (outputs, expected, items)))
    assert compared > count / 3
    for output, item in zip(outputs, items, strict=True):
        assert output.error is None
        assert len(output.token_ids) <= item.params.max_tokens
        assert sum(output.block_lengths) == len(output.token_ids)
        stopped = item.params.stop_token_ids
        assert not set(output.token_ids[item.params.min_tokens : -1]) & set(stopped), "tokens behind a stop"
    statistics = engine.statistics
    assert statistics.num_preemptions > count / 20 and statistics.cache_hits > count / 10
    assert 0 < statistics.accepted_tokens < statistics.draft_tokens


@pytest.mark.parametrize("launch_ahead", [False, True])
def test_sixty_random_requests(launch_ahead):
    greedy_soak(60, launch_ahead=launch_ahead)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("launch_ahead", [False, True])
def test_a_thousand_random_requests(launch_ahead):
    greedy_soak(1000, launch_ahead=launch_ahead)


@pytest.fixture(scope="module")
def exact() -> Target:
    """A bigram target: embeddings of one entry each, so each logit is one product, whatever the batch."""
    model = succ_llama()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(torch.eye(64)[:EXACT_VOCAB])
        model.get_output_embeddings().weight.copy_(0.3 * torch.randn(EXACT_VOCAB, 64, generator=generator))
    return Target.from_model(model)


class FavouriteProposer(RecordingProposer):
    """Drafts a fixed walk from the newest token: equal drafts in every batch."""

    def __init__(self, walk: torch.Tensor) -> None:
        super().__init__()
        self.walk = walk

    def propose(self, step: DraftStep) -> Drafts:
        tokens = [step.last_token_ids]
        for _ in range(K):
            tokens.append(self.walk[tokens[-1]])
        return Drafts(torch.stack(tokens[1:], dim=1), step.room.clamp(max=K), None)


def walker(target: Target) -> Proposer:
    return FavouriteProposer(target.model.get_output_embeddings().weight[:, :EXACT_VOCAB].argmax(0))


def follows_the_law(exact: Target, items: list[Work], outputs: list[RequestOutput], heat: float = 1.0) -> Losslessness:
    """Whether sampled tokens were drawn from the processed bigram law; `heat` misstates the temperature.

    Tokens go by their rank in the law, so that a law too flat or too sharp does not average out over token ids.
    """
    table = exact.model.get_output_embeddings().weight[:, :EXACT_VOCAB].T  # [token, next token]
    generations, laws = [], []
    for item, output in zip(items, outputs, strict=True):
        if item.params.temperature == 0 or not output.token_ids:
            continue
        params = dataclasses.replace(item.params, temperature=heat * item.params.temperature)
        text, first = [*item.prompt, *output.token_ids], len(item.prompt) - 1
        rows = range(first, first + len(output.token_ids))
        raw = table[torch.tensor(text)[rows]] / math.sqrt(1 / 64 + 1e-6)
        law = apply_settings(raw, params, params.stop_token_ids, text, rows, len(item.prompt)).softmax(-1)
        ordered, order = law.sort(descending=True, stable=True)
        ranks = (order == torch.tensor(output.token_ids)[:, None]).int().argmax(-1)
        generations.append(Generation(item.prompt, ranks.tolist(), output.block_lengths))
        laws.append(ordered)
    queue = iter(laws)
    return check_sampled(generations, lambda known, rows, prompt_len: next(queue), torch.Generator().manual_seed(0))


def sampled_soak(exact: Target, count: int) -> list[tuple[list[Work], list[RequestOutput]]]:
    items = work(count, seed=count, vocab_size=EXACT_VOCAB)
    without = dataclasses.replace(TIGHT, num_draft_tokens=0)
    outputs = soak(engine := WatchedEngine(exact, RecordingProposer(), without), items)
    assert engine.statistics.num_preemptions > count / 20
    assert check_equal(outputs, plainly(exact, items), items) > count / 2
    some = dataclasses.replace(AMPLE, max_batch_size=3)
    drafted = [soak(Engine(exact, walker(exact), config), items) for config in (AMPLE, some)]
    alone = Engine(exact, walker(exact), dataclasses.replace(AMPLE, max_batch_size=1))
    expected = alone.generate([item.prompt for item in items], [item.params for item in items])
    assert 0 < alone.statistics.accepted_tokens < alone.statistics.draft_tokens
    for outputs in drafted:
        assert check_equal(outputs, expected, items) > count / 2
    scarce = soak(engine := WatchedEngine(exact, walker(exact), TIGHT), items)
    assert engine.statistics.num_preemptions > 0 and engine.statistics.accepted_tokens > 0
    return [(items, outputs) for outputs in (*drafted, scarce)]


def test_sixty_sampled_requests_equal_their_rerun_in_another_batch(exact):
    for items, outputs in sampled_soak(exact, 60):
        assert follows_the_law(exact, items, outputs).passed


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_sampled_requests_equal_their_rerun_in_another_batch(exact):
    for items, outputs in sampled_soak(exact, 1000):
        verdict = follows_the_law(exact, items, outputs)
        print(f"p = {verdict.p_value:.3g}, n = {verdict.num_tokens}")
        assert verdict.passed and verdict.tested
        assert not follows_the_law(exact, items, outputs, heat=1.5).passed
