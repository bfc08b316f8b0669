"""Block and synthetic verification through the whole engine, and the free drafts that need no head."""

import dataclasses
import math

import pytest
import torch

from spectrain.infer.config import EngineConfig
from spectrain.infer.engine import Engine, EngineError
from spectrain.infer.evaluate import Evaluation, evaluate
from spectrain.infer.proposers.base import DraftStep, Proposer
from spectrain.infer.proposers.none import NoneProposer
from spectrain.infer.proposers.synthetic import SyntheticProposer
from spectrain.infer.report import advice, verdict
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.synthetic import conditional, parse_rates, survival_of_length
from spectrain.infer.target import Target
from spectrain.kernels import dispatch, reference
from spectrain.kernels.records import RejectionInputs, RejectionOutputs, VerifyMode
from spectrain.tests.infer.proposers import LawProposer
from spectrain.tests.infer.test_engine_law import (
    CONFIG,
    DEPTH,
    PROMPT,
    SAMPLES,
    VOCAB,
    bigram_law,
    chi_square_p,
    eagle3,
    exact_law,
    model,
)

BLOCK = dataclasses.replace(CONFIG, verify_mode=VerifyMode.BLOCK)
RATES = (0.9, 0.6, 0.45, 0.1)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.from_model(model())


def counts_of(engine: Engine, **params) -> dict[tuple[int, ...], int]:
    each = [SamplingParams(max_tokens=DEPTH + 2, seed=i, **params) for i in range(SAMPLES)]
    counts: dict[tuple[int, ...], int] = {}
    for output in engine.generate([PROMPT] * SAMPLES, each):
        key = tuple(output.token_ids[:DEPTH])
        counts[key] = counts.get(key, 0) + 1
    return counts


@pytest.mark.parametrize("policy", ["fixed", "adaptive"])
@pytest.mark.parametrize("name", ["law", "eagle3"])
def test_block_verification_keeps_the_joint_law_of_three_tokens(target, name, policy):
    proposer: Proposer = LawProposer(bigram_law(), 3) if name == "law" else eagle3(target, 3)
    engine = Engine(target, proposer, dataclasses.replace(BLOCK, draft_policy=policy))
    p = chi_square_p(counts_of(engine, temperature=1.0), exact_law(SamplingParams(temperature=1.0)), SAMPLES)
    print(f"block, {name}, {policy}: p = {p:.3g}, accepted {engine.statistics.acceptance_by_position}")
    assert p > 1e-4
    assert engine.statistics.accepted_tokens > 0.03 * engine.statistics.draft_tokens


def test_block_verification_keeps_more_drafts(target):
    kept = []
    for mode in (VerifyMode.STANDARD, VerifyMode.BLOCK):
        engine = Engine(target, LawProposer(bigram_law(), 3), dataclasses.replace(CONFIG, verify_mode=mode))
        counts_of(engine, temperature=1.0)
        kept.append(engine.statistics.acceptance_length)
    assert kept[1] > kept[0] + 0.01, "the rule was not the block rule"


def test_greedy_output_does_not_depend_on_the_rule(target):
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    prompts = [[1, 2], PROMPT, [4], [0, 0, 3]]
    plain = Engine(target, NoneProposer(), dataclasses.replace(CONFIG, num_draft_tokens=0)).generate(prompts, params)
    for config in (CONFIG, BLOCK):
        drafted = Engine(target, eagle3(target), config).generate(prompts, params)
        assert [o.token_ids for o in drafted] == [o.token_ids for o in plain]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_given_rates_are_reached_whatever_is_drafted(target, temperature):
    config = EngineConfig(
        num_draft_tokens=4,
        num_blocks=800,
        block_size=4,
        max_batch_size=32,
        verify_mode=VerifyMode.SYNTHETIC,
        acceptance_rates=RATES,
    )
    engine = Engine(target, SyntheticProposer(4, VOCAB), config)
    params = [SamplingParams(max_tokens=40, ignore_eos=True, temperature=temperature, seed=i) for i in range(96)]
    outputs = engine.generate([PROMPT] * 96, params)
    assert all(len(o.token_ids) == 40 for o in outputs)
    counts = engine.statistics
    reached = zip(counts.reached_per_position, counts.accepted_per_position, strict=True)
    for (tried, kept), rate in zip(reached, conditional(RATES), strict=True):
        assert abs(kept / tried - rate) < 4.5 * math.sqrt(rate * (1 - rate) / tried)
        assert tried > 100


def test_rates_of_a_mean_length_give_that_length(target):
    rates = tuple(survival_of_length(2.6, 4))
    config = EngineConfig(
        num_draft_tokens=4, num_blocks=400, verify_mode=VerifyMode.SYNTHETIC, acceptance_rates=rates, max_batch_size=16
    )
    engine = Engine(target, SyntheticProposer(4, VOCAB), config)
    engine.generate([PROMPT] * 48, [SamplingParams(max_tokens=40, ignore_eos=True, seed=i) for i in range(48)])
    drafts = engine.statistics.num_drafts
    # drafts that the output limit cut short keep fewer: they are the last step or two of 48 requests
    assert engine.statistics.acceptance_length == pytest.approx(2.6, abs=0.05 + 5 * 0.5 / math.sqrt(drafts))


def test_rates_belong_to_synthetic_verification_alone():
    with pytest.raises(EngineError, match="takes acceptance rates; found none were given"):
        EngineConfig(num_draft_tokens=2, verify_mode=VerifyMode.SYNTHETIC)
    with pytest.raises(EngineError, match="the mode is block"):
        EngineConfig(num_draft_tokens=2, verify_mode=VerifyMode.BLOCK, acceptance_rates=(0.5, 0.4))
    with pytest.raises(EngineError, match="3 drafts need as many acceptance rates, found 2"):
        EngineConfig(num_draft_tokens=3, verify_mode=VerifyMode.SYNTHETIC, acceptance_rates=(0.5, 0.4))


def test_without_drafts_synthetic_verification_decodes_plainly(target):
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    config = EngineConfig(num_blocks=50, verify_mode=VerifyMode.SYNTHETIC, acceptance_rates=(0.5,))
    plain = EngineConfig(num_blocks=50)
    texts = [Engine(target, NoneProposer(), c).generate([PROMPT], params)[0].token_ids for c in (config, plain)]
    assert texts[0] == texts[1]


def step(seeds: list[int], seq_lens: list[int]) -> DraftStep:
    batch = len(seeds)
    zeros = torch.zeros(batch, dtype=torch.int64)
    return DraftStep(
        [], zeros, zeros[:, None].int(), torch.tensor(seq_lens), zeros, zeros + 6, zeros.float(), torch.tensor(seeds)
    )


def test_free_drafts_depend_on_seed_and_position_alone():
    proposer = SyntheticProposer(6, 1000)
    together = proposer.propose(step([5, 2**62 + 1, 5, 6], [9, 9, 11, 9])).token_ids
    assert torch.equal(together[:1], proposer.propose(step([5], [9])).token_ids)
    assert torch.equal(together[0, 2:], together[2, :4]), "a position's id does not depend on where the draft began"
    assert not torch.equal(together[0], together[3]) and not torch.equal(together[0], together[1])


@pytest.mark.parametrize("vocab", [2, 97, 151_936])
def test_free_drafts_are_ids_of_the_vocabulary_and_spread_over_it(vocab):
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(0, 2**63 - 1, (4000,), generator=generator).tolist()
    ids = SyntheticProposer(3, vocab).propose(step(seeds, [7] * 4000)).token_ids
    assert ids.min() >= 0 and ids.max() < vocab
    assert float(ids.double().mean()) == pytest.approx((vocab - 1) / 2, rel=0.05)


def test_free_drafts_change_nothing_where_drafts_are_judged(target):
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    prompts = [[1, 2], PROMPT, [4]]
    plain = Engine(target, NoneProposer(), dataclasses.replace(CONFIG, num_draft_tokens=0)).generate(prompts, params)
    drafted = Engine(target, SyntheticProposer(3, VOCAB), CONFIG).generate(prompts, params)
    assert [o.token_ids for o in drafted] == [o.token_ids for o in plain]


def test_a_synthetic_evaluation_says_that_nothing_was_checked(target):
    def build(k: int, batch_size: int) -> Engine:
        config = EngineConfig(
            num_draft_tokens=k,
            num_blocks=200,
            max_batch_size=batch_size,
            verify_mode=VerifyMode.SYNTHETIC,
            acceptance_rates=(0.9, 0.8, 0.7),
        )
        return Engine(target, SyntheticProposer(k, VOCAB) if k else NoneProposer(), config)

    work = Evaluation(
        method="synthetic",
        prompt_set="small",
        prompts=[PROMPT, [1, 2], [4]],
        params=[SamplingParams(max_tokens=40, ignore_eos=True, seed=i) for i in range(3)],
        num_draft_tokens=3,
        batch_size=3,
        dtype=torch.float32,
        synthetic=True,
    )
    result = evaluate(work, build, lambda phase, finished: None).result
    assert result.lossless.mode == "synthetic" and not result.lossless.passed and not result.lossless.tested
    assert result.lossless.checked == 0 and result.lossless.num_tokens == 120
    assert verdict(result).startswith("not lossless, not checked: drafts were kept by given rates")
    assert result.acceptance_length is not None and result.acceptance_length > 2.8
    assert "rates that were given and not measured" in advice(dataclasses.replace(result, best_k=3))


def test_rates_as_text_or_file(tmp_path):
    assert parse_rates(".9,0.5, .25") == [0.9, 0.5, 0.25]
    path = tmp_path / "rates.json"
    path.write_text('{"acceptance_by_position": [0.5, 0.25]}')
    assert parse_rates(str(path)) == [0.5, 0.25]
    with pytest.raises(ValueError, match="numbers between commas or a JSON file"):
        parse_rates("0.5;0.4")


@pytest.mark.parametrize("wide", [False, True])
def test_noise_in_float64_is_asked_for_by_the_engines_config(target, wide, monkeypatch):
    asked: list[bool] = []

    def watched(inputs: RejectionInputs, *, fp64_gumbel: bool = False) -> RejectionOutputs:
        asked.append(fp64_gumbel)
        return reference.rejection.verify(inputs, fp64_gumbel=fp64_gumbel)

    monkeypatch.setattr(dispatch, "verify", watched)
    engine = Engine(target, NoneProposer(), EngineConfig(num_blocks=20, fp64_gumbel=wide))
    engine.generate([[1, 2]], SamplingParams(max_tokens=2, temperature=1.0, seed=1))
    assert set(asked) == {wide}
