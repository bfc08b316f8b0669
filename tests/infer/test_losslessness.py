"""The judge is judged: right samplers pass, each kind of wrong one fails, ties are excused and bugs are not."""

import math

import pytest
import torch
from torch import Tensor

from spectrain.infer.losslessness import (
    Generation,
    block_positions,
    chance_limit,
    check_greedy,
    check_sampled,
    count_differences,
    ks_p_value,
    probability_integrals,
    rounding_bound,
)

P = torch.tensor([0.6, 0.2, 0.1, 0.1])
Q = torch.tensor([0.7, 0.2, 0.05, 0.05])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def generation(tokens: list[int], prompt: tuple[int, ...] = (1, 2), lengths: list[int] | None = None) -> Generation:
    return Generation(prompt, tokens, lengths or [1] * len(tokens))


def constant_law(law: Tensor):
    return lambda token_ids, rows, prompt_len: law.expand(len(rows), -1)


def sampled(law: Tensor, count: int, length: int, seed: int = 0) -> list[Generation]:
    tokens = torch.multinomial(law, count * length, replacement=True, generator=generator(seed))
    return [generation(row) for row in tokens.view(count, length).tolist()]


@pytest.mark.parametrize("seed", range(5))
def test_right_sampler_passes(seed: int) -> None:
    check = check_sampled(sampled(P, 50, 40, seed), constant_law(P), generator(seed + 100))
    assert check.passed, check.reason
    assert check.num_tokens == 2000 and check.checked == 50


def test_sampler_of_the_draft_law_fails() -> None:
    check = check_sampled(sampled(Q, 100, 60), constant_law(P), generator(1))
    assert not check.passed and "do not follow" in check.reason


def test_argmax_in_place_of_sampling_fails() -> None:
    check = check_sampled([generation([0] * 60) for _ in range(5)], constant_law(P), generator(1))
    assert not check.passed


def test_bias_at_one_block_position_fails_although_the_pool_hides_it() -> None:
    """Positions 0 and 1 are biased against each other so that the pooled law is exactly right."""
    up, down = torch.tensor([0.7, 0.1, 0.1, 0.1]), torch.tensor([0.5, 0.3, 0.1, 0.1])
    first = torch.multinomial(up, 3000, replacement=True, generator=generator(3))
    second = torch.multinomial(down, 3000, replacement=True, generator=generator(4))
    tokens = torch.stack([first, second], dim=1).view(60, 100)
    outputs = [generation(row, lengths=[2] * 50) for row in tokens.tolist()]
    assert check_sampled(outputs, constant_law(P), generator(5), by_position=False).passed
    check = check_sampled(outputs, constant_law(P), generator(5))
    assert not check.passed
    assert [d["block_position"] for d in check.details] == [0, 1]


def test_tokens_outside_the_target_law_fail() -> None:
    law = torch.tensor([0.5, 0.5, 0.0, 0.0])
    check = check_sampled(sampled(P, 40, 40), constant_law(law), generator(1))
    assert not check.passed and "probability 0" in check.reason


def test_too_few_tokens_is_no_pass() -> None:
    check = check_sampled([generation([0, 1])], constant_law(P), generator(1))
    assert not check.passed and check.p_value is None and "too few" in check.reason


def test_law_is_asked_for_the_row_before_each_output_token() -> None:
    asked = []

    def law(token_ids, rows, prompt_len):
        asked.append((list(token_ids), list(rows), prompt_len))
        return P.expand(len(rows), -1)

    check_sampled([Generation([7, 8, 9], [1, 2], [2])], law, generator())
    assert asked == [([7, 8, 9, 1], [2, 3], 3)]


def test_integral_stays_inside_its_token_interval() -> None:
    values = probability_integrals(P.expand(4, -1), torch.tensor([0, 1, 2, 3]), generator())
    edges = torch.tensor([0.0, 0.6, 0.8, 0.9, 1.0]).double()
    assert ((values >= edges[:-1] - 1e-7) & (values <= edges[1:] + 1e-7)).all()


def test_ks_p_value_of_known_distances() -> None:
    """D of the n midpoints is 1/(2n); Kolmogorov's own table gives Q(1.36) = 0.0505 and Q(1.63) = 0.0098."""
    n = 10_000
    midpoints = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    assert ks_p_value(midpoints) == 1.0
    for x, expected in ((1.36, 0.0494), (1.63, 0.0098)):
        shift = x / (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) - 0.5 / n
        assert ks_p_value((midpoints + shift).clamp(max=1)) == pytest.approx(expected, abs=2e-4)


def test_ks_p_values_of_uniform_samples_are_themselves_spread() -> None:
    p = [ks_p_value(torch.rand(200, generator=generator(seed), dtype=torch.float64)) for seed in range(300)]
    assert ks_p_value(torch.tensor(p, dtype=torch.float64)) > 1e-3


def test_block_positions_count_from_each_step() -> None:
    assert block_positions([1, 3, 2]) == [0, 0, 1, 2, 0, 1]


def logits_with(first: float, second: float) -> Tensor:
    row = torch.full((8,), -5.0)
    row[3], row[4] = first, second
    return row


def scores_of(row: Tensor):
    return lambda token_ids, rows, prompt_len: row.expand(len(rows), -1)


def many_equal(count: int = 99) -> list[Generation]:
    return [generation([5, 6, 7]) for _ in range(count)]


def compare(row: Tensor, tokens: tuple[int, int] = (3, 4), dtype: torch.dtype = torch.float32, equal: int = 99, **more):
    plain = [*many_equal(equal), generation([5, tokens[0], 1])]
    drafted = [*many_equal(equal), generation([5, tokens[1], 2])]
    return check_greedy(plain, drafted, scores_of(row), dtype, more.get("plain_differences"))


def test_equal_runs_pass_without_asking_the_target() -> None:
    def never(token_ids, rows, prompt_len):
        raise AssertionError("asked without a divergence")

    check = check_greedy(many_equal(), many_equal(), never, torch.float32, None)
    assert check.passed and check.equal == 99 and check.divergences == 0 and check.num_tokens == 297


def test_a_true_tie_is_excused() -> None:
    check = compare(logits_with(2.0, 2.0))
    assert check.passed and check.divergences == 1 and check.excused == 1 and check.equal == 99
    assert check.details[0]["position"] == 1 and check.details[0]["gap"] == 0.0


@pytest.mark.parametrize("dtype,gap", [(torch.float32, 0.1), (torch.bfloat16, 1.0)])
def test_a_shifted_logit_is_not_excused(dtype: torch.dtype, gap: float) -> None:
    check = compare(logits_with(2.0 + gap, 2.0), dtype=dtype)
    assert not check.passed and check.excused == 0 and "beyond the rounding" in check.reason


def test_a_third_token_is_not_excused_by_a_tie_of_two_others() -> None:
    check = compare(logits_with(2.0, 2.0), tokens=(3, 0))
    assert not check.passed and check.excused == 0


def test_more_than_one_percent_of_ties_fails_in_full_precision() -> None:
    assert compare(logits_with(2.0, 2.0), equal=99).passed
    check = compare(logits_with(2.0, 2.0), equal=98)
    assert not check.passed and "1 %" in check.reason


def test_low_precision_is_measured_against_plain_decoding_itself() -> None:
    assert compare(logits_with(2.0, 2.0), dtype=torch.bfloat16, equal=2, plain_differences=0).passed
    plain, drafted = [generation([3])] * 20, [generation([4])] * 20
    row = scores_of(logits_with(2.0, 2.0))
    assert not check_greedy(plain, drafted, row, torch.bfloat16, 0).passed
    assert check_greedy(plain, drafted, row, torch.bfloat16, 12).passed


def test_an_output_that_stops_early_is_a_failure() -> None:
    check = check_greedy([generation([5, 6, 7])], [generation([5, 6])], scores_of(P), torch.float32, None)
    assert not check.passed and check.details[0]["drafted_token"] is None


def test_a_failed_request_is_a_failure() -> None:
    plain, drafted = generation([5]), Generation((1, 2), [5], [1], failed=True)
    assert not check_greedy([plain], [drafted], scores_of(P), torch.float32, None).passed


def test_rounding_bound_grows_with_the_logits_and_the_type() -> None:
    small, large = logits_with(1.0, 0.0) / 5, logits_with(40.0, 0.0)
    assert rounding_bound(small, torch.float32) < rounding_bound(large, torch.float32) < 1e-3
    assert rounding_bound(large, torch.bfloat16) > 1


@pytest.mark.parametrize(("measured", "passed"), [(0.0, False), (0.2, False), (0.4, True)])
def test_a_measured_bound_excuses_what_was_measured_and_no_more(measured: float, passed: bool) -> None:
    row = logits_with(2.0, 1.7)
    plain, drafted = [generation([5, 3, 1])], [generation([5, 4, 2])]
    check = check_greedy(plain, drafted, scores_of(row), torch.bfloat16, 1, measured_bound=measured)
    assert check.passed == passed


def test_differences_are_counted_by_prompt() -> None:
    assert count_differences([generation([1]), generation([2, 3])], [generation([1]), generation([2, 4])]) == 1
    assert chance_limit(0) < 3


def test_forbidden_tokens_neither_widen_the_bound_nor_are_excused() -> None:
    row = logits_with(2.0, 2.0)
    row[0] = -math.inf
    assert rounding_bound(row, torch.float32) == rounding_bound(logits_with(2.0, 2.0), torch.float32)
    assert compare(row).passed
    assert not compare(row, tokens=(3, 0)).passed
