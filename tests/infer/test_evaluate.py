"""Evaluation through the real engine on a tiny target: figures that agree with each other, verdicts that notice."""

import dataclasses
import math

import pytest
import torch

from spectrain.infer import stages
from spectrain.infer.config import EngineConfig
from spectrain.infer.engine import Engine, EngineError
from spectrain.infer.evaluate import (
    Costs,
    Evaluation,
    Measured,
    best_num_draft_tokens,
    evaluate,
    noise_floor,
    step_costs,
)
from spectrain.infer.proposers.none import NoneProposer
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.scoring import score_probs, score_rows
from spectrain.infer.statistics import EngineStatistics
from spectrain.infer.target import Target
from spectrain.tests.infer.proposers import LawProposer, NoisyOracle
from spectrain.tests.models import lone_forward, rand_llama, succ_llama

K = 3


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.from_model(rand_llama(2, max_position_embeddings=128))


@pytest.fixture(scope="module")
def flat_target() -> Target:
    """Small logits, so that sampling really draws among many tokens."""
    model = rand_llama(2, max_position_embeddings=256)
    model.get_output_embeddings().weight.data.mul_(0.2)
    return Target.from_model(model)


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 97, (3 + i % 7,), generator=generator).tolist() for i in range(count)]


def config(k: int, batch_size: int) -> EngineConfig:
    return EngineConfig(
        num_draft_tokens=k, num_blocks=400, block_size=4, max_batch_tokens=64, max_batch_size=batch_size
    )


def work(count: int, *, batch_size: int = 4, k: int = K, max_tokens: int = 24, temperature: float = 0.0, **params):
    each = [
        SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True, seed=i, **params)
        for i in range(count)
    ]
    return Evaluation(
        method="stub",
        prompt_set="random",
        prompts=prompts(count),
        params=each,
        num_draft_tokens=k,
        batch_size=batch_size,
        dtype=torch.float32,
    )


def builder(target: Target, make):
    def build(k: int, batch_size: int) -> Engine:
        return Engine(target, make(k) if k else NoneProposer(), config(k, batch_size))

    return build


def oracle(target: Target, some: list[list[int]], error: float):
    outputs = Engine(target, NoneProposer(), config(0, 4)).generate(
        some, SamplingParams(max_tokens=24, ignore_eos=True)
    )
    truth = [o.prompt_token_ids + o.token_ids for o in outputs]
    return lambda k: NoisyOracle(truth, k, error, target.vocab_size)


def uniform_drafts(target: Target, **changes):
    law = torch.full((target.vocab_size, target.vocab_size), 1 / target.vocab_size)
    return lambda k: LawProposer(law, k, **changes)


def measure(evaluation: Evaluation, build) -> Measured:
    return evaluate(evaluation, build, lambda phase, finished: None)


@pytest.fixture(scope="module")
def greedy(target: Target) -> Measured:
    evaluation = work(9)
    return measure(evaluation, builder(target, oracle(target, evaluation.prompts, 0.3)))


def test_figures_follow_from_each_other(greedy: Measured) -> None:
    result = greedy.result
    assert result.lossless.passed and result.lossless.equal == 9
    assert result.output_tokens == 9 * 24 == sum(len(o.token_ids) for o in greedy.outputs)
    assert result.speedup == pytest.approx(result.tokens_per_second / result.baseline_tokens_per_second)
    assert result.draft_ms and result.verify_ms and result.decode_ms and result.acceptance_by_position
    assert result.break_even_acceptance_length == pytest.approx((result.draft_ms + result.verify_ms) / result.decode_ms)
    assert result.acceptance_length == pytest.approx(1 + sum(result.acceptance_by_position))
    assert 1 < result.acceptance_length < 1 + K
    assert result.acceptance_by_position == sorted(result.acceptance_by_position, reverse=True)
    assert result.noise_floor >= 0


def test_warm_up_and_calibration_do_not_count(greedy: Measured) -> None:
    """Tokens per step is per request over its own forwards: with all tokens counted it cannot exceed the length."""
    result = greedy.result
    assert result.tokens_per_step is not None and result.acceptance_length is not None
    assert 1 < result.tokens_per_step <= result.acceptance_length + 1e-9
    steps = sum(len(o.block_lengths) for o in greedy.outputs)
    assert result.tokens_per_step == pytest.approx(result.output_tokens / steps)


def test_perfect_draft_on_the_successor_target() -> None:
    target = Target.from_model(succ_llama())
    evaluation = dataclasses.replace(work(1, batch_size=1, k=4, max_tokens=21), prompts=[[5]])
    truth = [[(5 + i) % 41 for i in range(40)]]
    build = builder(target, lambda k: NoisyOracle(truth, k, 0.0, target.vocab_size))
    result = measure(evaluation, build).result
    assert result.acceptance_length == 5.0
    assert result.draft_acceptance_rate == 1.0
    assert result.output_tokens == 21
    # the prefill's own token, then four blocks of five
    assert result.tokens_per_step == pytest.approx(21 / 5)


def test_useless_draft_is_reported_as_it_is(target: Target) -> None:
    evaluation = work(4, k=8)
    result = measure(evaluation, builder(target, lambda k: NoisyOracle([], k, 1.0, target.vocab_size))).result
    assert result.acceptance_length is not None and result.acceptance_length < 1.2
    assert result.lossless.passed
    assert result.best_k is not None and result.speedup > 0
    assert result.best_k_by_batch_size and result.best_k_by_batch_size[result.batch_size] == result.best_k


def test_plain_decoding_has_no_drafting_figures(target: Target) -> None:
    result = measure(dataclasses.replace(work(3), method="none", num_draft_tokens=0), builder(target, None)).result
    drafting = ("acceptance_length", "draft_ms", "verify_ms", "break_even_acceptance_length", "best_k")
    assert [getattr(result, name) for name in drafting] == [None] * 5
    assert result.tokens_per_step == 1.0 and result.lossless.passed


@pytest.mark.parametrize("params", [{}, {"top_k": 20}, {"top_p": 0.8}], ids=["full", "top_k", "top_p"])
def test_sampled_drafting_follows_the_law(flat_target: Target, params: dict[str, float]) -> None:
    evaluation = work(16, batch_size=16, max_tokens=32, temperature=1.0, **params)
    result = measure(evaluation, builder(flat_target, uniform_drafts(flat_target))).result
    assert result.lossless.mode == "sampled"
    assert result.lossless.passed, result.lossless.reason
    assert result.acceptance_length is not None and result.acceptance_length > 1.02
    assert result.lossless.num_tokens == 16 * 32


def accept_everything(*args, **options):
    """A verifier that takes each draft unseen."""
    from spectrain.infer.verify import verify_drafts

    drafts = args[1]
    out = verify_drafts(*args, **options)
    tokens, counts = out.token_ids.clone(), out.num_emitted.clone()
    for i, length in enumerate((drafts >= 0).sum(dim=1).tolist()):
        if length:
            tokens[i, :length], counts[i] = drafts[i, :length], length
            tokens[i, length:] = -1
    return out._replace(token_ids=tokens, num_emitted=counts)


def test_a_verifier_that_accepts_everything_is_caught_greedily(target: Target, monkeypatch) -> None:
    evaluation = work(5)
    build = builder(target, oracle(target, evaluation.prompts, 0.5))
    monkeypatch.setattr(stages, "verify_drafts", accept_everything)
    lossless = measure(evaluation, build).result.lossless
    assert not lossless.passed and lossless.excused == 0 and lossless.equal is not None and lossless.equal < 5


def test_a_verifier_that_accepts_everything_is_caught_when_sampling(flat_target: Target, monkeypatch) -> None:
    monkeypatch.setattr(stages, "verify_drafts", accept_everything)
    law = torch.full((97, 97), 0.001)
    law[:, :10] = 1.0
    law /= law.sum(-1, keepdim=True)
    evaluation = work(16, batch_size=16, max_tokens=24, temperature=1.0)
    lossless = measure(evaluation, builder(flat_target, lambda k: LawProposer(law, k))).result.lossless
    assert not lossless.passed and lossless.p_value is not None and lossless.p_value < 1e-4


def test_an_argmax_draft_scored_with_its_softmax_is_caught(flat_target: Target) -> None:
    """The draft takes its favourite each time but claims to have drawn it."""

    class Liar(LawProposer):
        def propose(self, step):
            drafts = super().propose(step)
            return drafts._replace(token_ids=drafts.log_probs.argmax(-1))

    law = torch.ones(97, 97)
    law[:, 5] = 1.1
    law /= law.sum(-1, keepdim=True)
    evaluation = work(16, batch_size=16, max_tokens=32, temperature=1.0)
    lossless = measure(evaluation, builder(flat_target, lambda k: Liar(law, k))).result.lossless
    assert not lossless.passed


def test_scores_are_the_targets_own_and_the_blocks_come_back(target: Target) -> None:
    ids = [torch.randint(3, 97, (1,), generator=torch.Generator().manual_seed(i)).item() for i in range(50)]
    engine = Engine(target, NoneProposer(), config(0, 4))
    rows = [0, 7, 31, 32, 49]
    logits = score_rows(engine, ids, rows)
    expected, _ = lone_forward(rand_llama(2, max_position_embeddings=128), ids)
    torch.testing.assert_close(logits, expected[rows], atol=1e-4, rtol=1e-4)
    singly = score_rows(engine, ids, rows[1:], one_by_one=True)
    torch.testing.assert_close(singly, expected[rows[1:]], atol=1e-4, rtol=1e-4)
    assert engine.pool.num_free == engine.pool.num_blocks - 1
    probs = score_probs(engine, SamplingParams(temperature=0.5), ids, rows, 1)
    torch.testing.assert_close(probs, (expected[rows] / 0.5).softmax(-1), atol=1e-4, rtol=1e-3)


def test_scoring_a_busy_engine_is_refused(target: Target) -> None:
    engine = Engine(target, NoneProposer(), config(0, 4))
    engine.add_request([3, 4], SamplingParams(max_tokens=4))
    with pytest.raises(EngineError, match="idle engine"):
        score_rows(engine, [3, 4], [1])


def test_scoring_more_than_the_cache_holds_is_refused_and_takes_nothing(target: Target) -> None:
    engine = Engine(target, NoneProposer(), dataclasses.replace(config(0, 4), num_blocks=4))
    with pytest.raises(EngineError, match="raise --num-blocks"):
        score_rows(engine, [3] * 13, [0])
    assert engine.pool.num_free == 3


def test_best_k_maximises_tokens_per_time() -> None:
    """decode 10; k costs 12, 14, 16: (1.9, 2.3, 2.4) tokens give speed-ups 1.583, 1.643, 1.5."""
    best, predicted = best_num_draft_tokens([0.9, 0.4, 0.1], Costs([12.0, 14.0, 16.0], 10.0))
    assert best == 2
    assert predicted == pytest.approx([19 / 12, 23 / 14, 24 / 16])


def test_best_k_is_zero_when_no_k_pays() -> None:
    assert best_num_draft_tokens([0.1, 0.0], Costs([20.0, 30.0], 10.0))[0] == 0


def timed(steps: int, draft: float, verify: float) -> EngineStatistics:
    statistics = EngineStatistics()
    for _ in range(steps):
        statistics.count_step("verify", target_seconds=verify / 1000, draft_seconds=draft / 1000)
    return statistics


def test_step_costs_run_straight_between_the_measured_ends() -> None:
    costs = step_costs(timed(2, 6.0, 14.0), timed(3, 2.0, 12.0), 10.0, 3)
    assert costs.drafting == pytest.approx([14.0, 17.0, 20.0])
    assert costs.decode == 10.0


def test_step_costs_without_a_measurement_at_one_grow_from_a_plain_step() -> None:
    assert step_costs(timed(2, 6.0, 16.0), None, 10.0, 3).drafting == pytest.approx([14.0, 18.0, 22.0])


def test_noise_floor_is_the_spread_over_the_mean() -> None:
    assert noise_floor([90.0, 110.0]) == pytest.approx(0.2)
    assert noise_floor([50.0, 50.0]) == 0.0
    assert math.isfinite(noise_floor([0.0, 0.0]))
