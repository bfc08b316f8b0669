"""Survival is learned from what is verified, and the likeliest drafts of the whole batch are chosen without peeking."""

import itertools
import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from spectrain.infer.survival import (
    UNKNOWN_CONFIDENCE,
    UNKNOWN_LOG_ODDS,
    SurvivalEstimator,
    expected_accepted,
    log_odds_of,
    select,
)

CPU = torch.device("cpu")
CHAT = (0.70, 0.45, 0.30, 0.20, 0.13, 0.09, 0.06)  # probability that a draft and all before it are accepted


def acceptance(estimator: SurvivalEstimator, odds: torch.Tensor) -> torch.Tensor:
    """Of each draft [batch, k], all before it accepted."""
    bias, slope = estimator.model.coefficients.unbind(1)
    return torch.sigmoid(bias + slope * odds)


def teach(estimator, law, steps: int, batch: int, generator, *, constant: bool = False) -> None:
    """`steps` verifications of drafts accepted by `law(position, log_odds)`, of different lengths."""
    k = estimator.model.coefficients.shape[0]
    for _ in range(steps):
        confidence = torch.rand(batch, k, generator=generator) * 0.9 + 0.05
        odds = torch.full((batch, k), UNKNOWN_LOG_ODDS) if constant else log_odds_of(confidence)
        probs = torch.stack([law(j, odds[:, j]) for j in range(k)], dim=1)
        accepted = (torch.rand(batch, k, generator=generator) < probs).long().cumprod(1)
        verified = torch.randint(0, k + 1, (batch,), generator=generator)
        emitted = torch.minimum(accepted.sum(1), verified) + 1
        estimator.observe(odds, verified, emitted.int())


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_learns_how_confidence_tells_acceptance(batch):
    bias, slope = (-0.5, 0.4, 0.0), (1.5, 0.6, 1.0)
    generator = torch.Generator().manual_seed(0)
    estimator = SurvivalEstimator(3, CPU, memory=4000)
    teach(estimator, lambda j, z: torch.sigmoid(bias[j] + slope[j] * z), 6000 // batch, batch, generator)
    odds = torch.linspace(-2, 2, 9)[:, None].expand(-1, 3)
    expected = torch.sigmoid(torch.tensor(bias) + torch.tensor(slope) * odds)
    torch.testing.assert_close(acceptance(estimator, odds), expected, atol=0.08, rtol=0)


@pytest.mark.parametrize("batch", [1, 16])
def test_learns_rates_by_position_where_confidence_is_not_told(batch):
    rates = [now / before for now, before in zip(CHAT, (1.0, *CHAT), strict=False)]
    generator = torch.Generator().manual_seed(1)
    estimator = SurvivalEstimator(7, CPU, memory=4000)
    teach(estimator, lambda j, z: torch.full_like(z, rates[j]), 8000 // batch, batch, generator, constant=True)
    odds = torch.full((1, 7), UNKNOWN_LOG_ODDS)
    survival = estimator.survival(odds, torch.tensor([7]))
    torch.testing.assert_close(survival[0], torch.tensor(CHAT), atol=0.05, rtol=0)


def test_follows_a_change():
    generator = torch.Generator().manual_seed(2)
    estimator = SurvivalEstimator(2, CPU, memory=300)
    odds = torch.full((1, 2), UNKNOWN_LOG_ODDS)
    for rate in (0.95, 0.2, 0.8):
        teach(estimator, lambda j, z, rate=rate: torch.full_like(z, rate), 400, 8, generator, constant=True)
        assert acceptance(estimator, odds)[0].tolist() == pytest.approx([rate] * 2, abs=0.1)


def test_a_position_never_reached_believes_the_one_before():
    generator = torch.Generator().manual_seed(3)
    estimator = SurvivalEstimator(4, CPU)
    for _ in range(300):
        accepted = torch.rand(8, generator=generator) < 0.35
        estimator.observe(torch.full((8, 4), UNKNOWN_LOG_ODDS), torch.ones(8).long(), 1 + accepted.int())
    probs = acceptance(estimator, torch.full((1, 4), UNKNOWN_LOG_ODDS))[0]
    assert probs[0] == pytest.approx(0.35, abs=0.06)
    torch.testing.assert_close(probs[1:], probs[:1].expand(3), atol=0.02, rtol=0)


def test_before_anything_is_known_a_confidence_is_taken_as_it_is():
    estimator = SurvivalEstimator(3, CPU)
    odds = log_odds_of(torch.tensor([[0.9, 0.5, 0.2]]))
    torch.testing.assert_close(estimator.survival(odds, torch.tensor([3])), torch.tensor([[0.9, 0.45, 0.09]]))
    torch.testing.assert_close(torch.sigmoid(torch.tensor(UNKNOWN_LOG_ODDS)).item(), UNKNOWN_CONFIDENCE)


def test_padding_and_failed_requests_teach_nothing():
    odds, states = torch.randn(3, 4, generator=torch.Generator().manual_seed(4)), []
    for rows in ([0, 1], [0, 1, 2, 2, 2]):
        estimator = SurvivalEstimator(4, CPU)
        verified = torch.tensor([4, 2, 0, 0, 3])[: len(rows)]
        emitted = torch.tensor([3, 3, 1, 0, 0])[: len(rows)]  # the last two: nobody, and a request that failed
        for _ in range(5):
            estimator.observe(odds[rows], verified, emitted.int())
        states.append(estimator.model.coefficients)
    torch.testing.assert_close(*states)
    assert (states[0] - torch.tensor([0.0, 1.0])).abs().max() > 0.1


@pytest.mark.parametrize("confidence", [0.0, 1.0, math.nan])
def test_extreme_confidences_stay_finite(confidence):
    estimator = SurvivalEstimator(2, CPU)
    odds = log_odds_of(torch.full((3, 2), confidence))
    for emitted in (1, 3, 1, 2) * 50:
        estimator.observe(odds, torch.full((3,), 2), torch.full((3,), emitted, dtype=torch.int32))
    survival = estimator.survival(odds, torch.full((3,), 2))
    assert survival.isfinite().all() and (survival >= 0).all() and (survival <= 1).all()


def drafts(batch: int, k: int, seed: int) -> tuple[SurvivalEstimator, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    estimator = SurvivalEstimator(k, CPU)
    odds = torch.randn(batch, k, generator=generator).round()  # so that some tie
    return estimator, odds, torch.randint(0, k + 1, (batch,), generator=generator)


@pytest.mark.parametrize(("batch", "k", "seed"), [(1, 1, 0), (3, 3, 1), (5, 2, 2), (4, 3, 3)])
def test_chooses_the_likeliest_prefixes_and_as_many_as_fit(batch, k, seed):
    estimator, odds, lengths = drafts(batch, k, seed)
    survival = estimator.survival(odds, lengths)
    for num_slots in range(batch * k + 2):
        counts = select(survival, num_slots)
        assert int(counts.sum()) == min(num_slots, int(lengths.sum()))
        assert (counts <= lengths).all()
        chosen = sum(float(survival[b, : counts[b]].sum()) for b in range(batch))
        best = max(
            sum(float(survival[b, :n].sum()) for b, n in enumerate(other))
            for other in itertools.product(*(range(int(n) + 1) for n in lengths))
            if sum(other) == int(counts.sum())
        )
        assert chosen == pytest.approx(best, abs=1e-6)


def test_ties_go_by_position_then_request():
    survival = torch.tensor([[0.5, 0.5, 0.5], [0.5, 0.5, -1.0], [0.5, -1.0, -1.0]])
    assert [select(survival, n).tolist() for n in range(8)] == [
        [0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1], [2, 2, 1], [3, 2, 1], [3, 2, 1],
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_whether_a_slot_is_taken_ignores_what_its_own_token_could_tell(seed):
    """Confidences behind slot j depend on the token drawn there; whatever they are, slot j is taken or not."""
    batch, k = 5, 4
    estimator, odds, lengths = drafts(batch, k, seed)
    generator = torch.Generator().manual_seed(100 + seed)
    for num_slots, b, j in itertools.product((1, 4, 9), range(batch), range(k)):
        taken = set()
        for _ in range(10):
            other = odds.clone()
            other[b, j + 1 :] = 3 * torch.randn(k - j - 1, generator=generator)
            taken.add(bool(select(estimator.survival(other, lengths), num_slots)[b] > j))
        assert len(taken) == 1


def test_survival_never_rises_with_the_position():
    estimator = SurvivalEstimator(16, CPU)
    survival = estimator.survival(torch.full((64, 16), 20.0), torch.full((64,), 16))
    assert (survival.diff(dim=1) <= 0).all()


def test_expected_accepted_counts_only_requests_that_count():
    survival = torch.tensor([[0.9, 0.6], [0.5, 0.1], [-1.0, -1.0], [-1.0, -1.0]])
    expected = expected_accepted(survival, torch.tensor([True, True, False, False]), torch.tensor([1, 2, 3]))
    torch.testing.assert_close(expected, torch.tensor([0.0, 1.5 / 2, 2.1 / 2]))
    expected = expected_accepted(survival, torch.tensor([True, False, False, False]), torch.tensor([1, 2, 3]))
    torch.testing.assert_close(expected, torch.tensor([0.0, 0.9, 1.5]))
    expected = expected_accepted(survival, torch.tensor([False, True, False, False]), torch.tensor([1, 2, 3]))
    torch.testing.assert_close(expected, torch.tensor([0.0, 0.5, 0.6]))
    assert expected_accepted(survival, torch.zeros(4, dtype=torch.bool), torch.tensor([1, 2])).isnan().all()


def test_nothing_is_read_on_the_host():
    with FakeTensorMode(allow_non_fake_inputs=True):
        estimator = SurvivalEstimator(3, CPU)
        odds, lengths = log_odds_of(torch.rand(5, 3)), torch.full((5,), 3)
        estimator.observe(odds, lengths, torch.ones(5, dtype=torch.int32))
        survival = estimator.survival(odds, lengths)
        assert select(survival, 7).shape == (5,)
        assert expected_accepted(survival, lengths > 1, torch.tensor([1, 2, 4])).shape == (3,)


def test_a_head_whose_doubts_are_worth_more_than_its_confidence_is_not_followed_backwards():
    """Accepted where it doubts and rejected where it is sure: noise, which must not turn the ranking round."""
    estimator = SurvivalEstimator(1, CPU)
    sure = torch.tensor([[3.0]] * 50 + [[-3.0]] * 50)
    emitted = torch.tensor([1] * 50 + [2] * 50, dtype=torch.int32)
    for _ in range(20):
        estimator.observe(sure, torch.ones(100, dtype=torch.int64), emitted)
    high, low = estimator.survival(torch.tensor([[3.0], [-3.0]]), torch.ones(2, dtype=torch.int64))[:, 0]
    assert high >= low
