"""Adaptive drafting in the engine: the output's law and its greedy tokens are those of plain decoding."""

import dataclasses

import pytest
import torch

from spectrain.infer.config import EngineConfig
from spectrain.infer.costs import StepCosts
from spectrain.infer.draft_policy import DraftPolicy, draft_widths
from spectrain.infer.engine import Engine
from spectrain.infer.proposers.none import NoneProposer
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.survival import SurvivalEstimator
from spectrain.infer.target import Target
from spectrain.tests.fresh import fresh_proposer
from spectrain.tests.infer import test_engine_law as law
from spectrain.tests.infer.proposers import LawProposer, NoisyOracle, ScriptedProposer

GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)


def costs(k: int, verify, draft: float = 0.0) -> StepCosts:
    """`verify(width)` milliseconds at any batch size."""
    widths = draft_widths(k)
    table = (tuple(verify(width) for width in widths),)
    return StepCosts(batches=(1,), widths=widths, verify_ms=table, draft_ms=(draft,), rest_ms=(0.0,))


FLAT = costs(4, lambda width: 1.0)
STEEP = costs(4, lambda width: 9.0**width, draft=1.0)
NARROW = costs(4, lambda width: 1.0 if width <= 2 else 50.0)
CONFIG = EngineConfig(
    num_draft_tokens=4, num_blocks=200, block_size=4, max_batch_tokens=64, max_batch_size=8, draft_policy="adaptive"
)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 97, (n,), generator=generator).tolist() for n in (1, 3, 5, 17, 26, 2, 9, 4, 11, 6)]


@pytest.fixture(scope="module")
def plain(target, prompts) -> list[list[int]]:
    config = dataclasses.replace(CONFIG, num_draft_tokens=0)
    return [o.token_ids for o in Engine(target, NoneProposer(), config).generate(prompts, GREEDY)]


def proposer_of(name: str, target: Target, prompts, plain):
    texts = [prompt + tokens + [0] * 8 for prompt, tokens in zip(prompts, plain, strict=True)]
    if name == "eagle3":
        return fresh_proposer("eagle3", target, 4)
    if name == "scripted":
        return ScriptedProposer({n: [n % 97, -1, 5][: n % 4] for n in range(200)}, 4)
    return NoisyOracle(texts, 4, 0.2, target.vocab_size)


@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
@pytest.mark.parametrize("step_costs", [FLAT, STEEP, NARROW, None], ids=["flat", "steep", "narrow", "measured"])
@pytest.mark.parametrize("name", ["eagle3", "oracle", "scripted"])
def test_greedy_output_never_changes(target, prompts, plain, name, step_costs, ahead):
    config = dataclasses.replace(CONFIG, launch_ahead=ahead, num_blocks=80)
    engine = Engine(target, proposer_of(name, target, prompts, plain), config, step_costs)
    assert [o.token_ids for o in engine.generate(prompts, GREEDY)] == plain
    assert engine.pool.num_free == engine.pool.num_blocks - 1
    assert engine.runner.policy is not None


@pytest.mark.parametrize("budget", [3, 6, 13])
def test_a_budget_below_the_batch_leaves_drafts_waiting(target, prompts, plain, budget):
    config = dataclasses.replace(CONFIG, max_batch_tokens=budget)
    engine = Engine(target, proposer_of("oracle", target, prompts, plain), config, NARROW)
    assert [o.token_ids for o in engine.generate(prompts, GREEDY)] == plain
    assert engine.statistics.accepted_tokens > 0


def counts_of(target, prompts, plain, step_costs, **changes):
    engine = Engine(
        target, proposer_of("oracle", target, prompts, plain), dataclasses.replace(CONFIG, **changes), step_costs
    )
    engine.generate(prompts[:8], GREEDY)
    return engine.statistics


def test_free_rows_verify_every_draft(target, prompts, plain):
    adaptive = counts_of(target, prompts, plain, FLAT)
    fixed = counts_of(target, prompts, plain, None, draft_policy="fixed")
    assert (adaptive.draft_tokens, adaptive.num_steps) == (fixed.draft_tokens, fixed.num_steps)


def test_dear_rows_decode_plainly(target, prompts, plain):
    statistics = counts_of(target, prompts, plain, STEEP)
    assert statistics.draft_tokens == 0 and statistics.num_decode_steps >= 38


def test_a_step_has_room_for_as_many_drafts_as_pay(target, prompts, plain):
    statistics = counts_of(target, prompts, plain, NARROW)
    assert 0 < statistics.draft_tokens <= statistics.request_forwards
    assert statistics.acceptance_by_position is not None


def test_slots_go_to_the_requests_that_survive(target, prompts, plain):
    """Half of the requests draft nonsense and say so: the others get the slots."""

    class Honest(NoisyOracle):
        def propose(self, step):
            drafts = super().propose(step)
            hopeless = torch.tensor([request_id % 2 == 0 for request_id in step.request_ids])
            ids = torch.where(hopeless[:, None], (drafts.token_ids + 1) % self.vocab_size, drafts.token_ids)
            confidence = torch.where(hopeless[:, None], 0.05, 0.95).expand(-1, self.k)
            return drafts._replace(token_ids=ids, confidence=confidence)

    texts = [prompt + tokens + [0] * 8 for prompt, tokens in zip(prompts, plain, strict=True)]
    engine = Engine(target, Honest(texts, 4, 0.0, target.vocab_size), CONFIG, NARROW)
    outputs = engine.generate(prompts[:8], GREEDY)
    assert [o.token_ids for o in outputs] == plain[:8]
    lengths = [len(o.token_ids) / len(o.block_lengths) for o in outputs]
    assert min(lengths[1::2]) > 2 and max(lengths[::2]) < 1.4


def test_requests_about_to_end_do_not_speak_against_drafting(target, prompts, plain):
    """Their drafts are cut by the output limit; what the policy expects afterwards is what whole drafts promised."""
    engine = Engine(target, proposer_of("oracle", target, prompts, plain), CONFIG, FLAT)
    engine.generate(prompts[:8], GREEDY)
    policy = engine.runner.policy
    assert policy is not None and policy._accepted[-1] > 1.85  # 1.6 with the short ones


@pytest.mark.parametrize("policy", ["fixed", "adaptive"])
def test_the_best_k_is_named_for_every_batch_size(target, prompts, plain, policy):
    config = dataclasses.replace(CONFIG, draft_policy=policy)
    engine = Engine(target, proposer_of("oracle", target, prompts, plain), config)
    if policy == "fixed":
        assert engine.best_num_draft_tokens() == {}  # nothing was drafted yet
    engine.generate(prompts, GREEDY)
    best = engine.best_num_draft_tokens()
    assert list(best) == [1, 2, 4, 8] and all(0 <= k <= 4 for k in best.values())
    assert [o.token_ids for o in engine.generate(prompts, GREEDY)] == plain


class Peeking(LawProposer):
    """Speaks well of some tokens once it has drawn them: what the contract forbids."""

    def confidence(self, rows, drawn):
        return torch.where(drawn % 2 == 0, 0.95, 0.05)


@pytest.fixture(scope="module")
def toy() -> Target:
    return Target.from_model(law.model())


@pytest.fixture
def credulous(monkeypatch):
    """Confidence is believed as it is told: what is learned about these drafts would leave little to choose."""
    monkeypatch.setattr(SurvivalEstimator, "observe", lambda *arguments: None)


TOY = costs(3, lambda width: 1.0 if width <= 2 else 50.0)
TOGETHER = 1000


def joint_p(toy: Target, proposer, temperature: float = 1.0) -> float:
    """p value of the joint law of the first tokens under adaptive selection."""
    sizes = {"num_blocks": 4 * TOGETHER, "max_batch_size": TOGETHER, "max_batch_tokens": 4 * TOGETHER}
    engine = Engine(toy, proposer, dataclasses.replace(law.CONFIG, draft_policy="adaptive", **sizes), TOY)
    each = [SamplingParams(max_tokens=law.DEPTH + 2, temperature=temperature, seed=i) for i in range(law.SAMPLES)]
    counts: dict[tuple[int, ...], int] = {}
    for first in range(0, law.SAMPLES, TOGETHER):
        # one batch after the other: steps that also read prompts cut every request's drafts alike
        some = each[first : first + TOGETHER]
        for output in engine.generate([law.PROMPT] * len(some), some):
            key = tuple(output.token_ids[: law.DEPTH])
            counts[key] = counts.get(key, 0) + 1
    positions = engine.statistics.drafted_per_position
    # slots are taken from some requests for others: otherwise there is no selection to test
    assert len(positions) > 1 and 0 < positions[1] < positions[0]
    return law.chi_square_p(counts, law.exact_law(each[0]), law.SAMPLES)


def peaked_law() -> torch.Tensor:
    """Some tokens are followed by one that is nearly sure, others by nothing in particular."""
    rows = 0.6 * torch.randn(law.VOCAB, law.VOCAB, generator=torch.Generator().manual_seed(3))
    rows[:2, 0] += 3
    return rows.softmax(-1)


@pytest.mark.parametrize("name", ["law", "sampled drafts as point masses", "eagle3", "eagle3, reduced vocabulary"])
def test_joint_law_of_three_tokens(toy, name, credulous):
    proposer = {
        "law": lambda: LawProposer(peaked_law(), 3),
        "sampled drafts as point masses": lambda: LawProposer(peaked_law(), 3, point_mass=True),
        "eagle3": lambda: law.eagle3(toy),
        "eagle3, reduced vocabulary": lambda: law.eagle3(toy, 3),
    }[name]()
    # an untrained head is nearly undecided at temperature 1
    assert joint_p(toy, proposer, 0.15 if "eagle3" in name else 1.0) > 1e-4


def test_the_law_test_sees_a_choice_that_peeks_at_the_drawn_token(toy, credulous):
    assert joint_p(toy, Peeking(peaked_law(), 3)) < 1e-6


class Wavering(LawProposer):
    """Promises much where its second draft is token 1; that is known before the third is drawn, so it may be told."""

    def propose(self, step):
        drafts = super().propose(step)
        confidence = torch.full((len(drafts.token_ids), 3), 0.9)
        confidence[:, 2] = torch.where(drafts.token_ids[:, 1] == 1, 0.99, 0.01)
        return drafts._replace(confidence=confidence)


WAVERING = costs(3, lambda width: {1: 9.0, 2: 9.0, 3: 99.0, 4: 14.5}[width])
"""Two rows or four, as the drafts promise."""


@pytest.mark.slow
@pytest.mark.parametrize("peeks", [False, True], ids=["as it is", "broken: not one step behind"])
def test_the_size_of_a_step_does_not_follow_the_drafts_it_verifies(toy, peeks, credulous, monkeypatch):
    """One request at a time and no smoothing, so that a size which did would show."""
    monkeypatch.setattr(DraftPolicy.__init__, "__defaults__", (0.01, *DraftPolicy.__init__.__defaults__[1:]))
    if peeks:
        promise = DraftPolicy.promise

        def at_once(policy, request_ids):
            made = promise(policy, request_ids)
            made.waiting.clear()
            return made

        monkeypatch.setattr(DraftPolicy, "promise", at_once)
    monkeypatch.setattr(law, "DEPTH", 4)
    config = dataclasses.replace(law.CONFIG, draft_policy="adaptive", max_batch_size=1)
    draft_law = torch.tensor([0.11, 0.36, 0.18, 0.15, 0.2]).expand(law.VOCAB, -1)
    engine, total = Engine(toy, Wavering(draft_law, 3), config, WAVERING), 450
    each = [SamplingParams(max_tokens=law.DEPTH + 3, temperature=1.0, seed=i) for i in range(total)]
    outputs = engine.generate([law.PROMPT] * total, each)
    seen = torch.tensor([output.token_ids[2:4].count(1) for output in outputs]).double()
    expected = sum(mass * tokens[2:4].count(1) for tokens, mass in law.exact_law(each[0]).items())
    deviation = abs(seen.mean() - expected) / (seen.std() / total**0.5)
    positions = engine.statistics.drafted_per_position
    assert 0 < positions[2] < positions[0]
    assert deviation > 5 if peeks else deviation < 4, deviation


def test_a_dropped_draft_is_not_drawn_again_with_the_same_noise(target):
    """Its successors' confidence told about its token; the same noise at the same position would draw it again."""
    proposer = fresh_proposer("eagle3", target, 3, "probabilistic")
    logits = torch.zeros(1, 97)
    step = {"seeds": torch.tensor([5]), "temperature": torch.ones(1)}
    draws = [int(proposer._draw(logits, _step(known, **step), k)[0]) for known, k in ((10, 2), (11, 1), (12, 0))]
    assert len(set(draws)) > 1


def _step(known: int, **fields):
    from spectrain.infer.proposers.base import DraftStep

    one = torch.ones(1, dtype=torch.int64)
    return DraftStep([0], one, torch.zeros(1, 1), known * one, one, one, **fields)
