"""Counts and rates on sequences worked out by hand."""

import pytest

from spectrain.infer.statistics import EngineStatistics


def counted(*requests: tuple[int, int, int]) -> EngineStatistics:
    statistics = EngineStatistics()
    for drafted, accepted, emitted in requests:
        statistics.count_request(drafted=drafted, accepted=accepted, emitted=emitted)
    return statistics


def test_perfect_draft_emits_five_and_accepts_four() -> None:
    statistics = counted(*[(4, 4, 5)] * 4)
    assert statistics.acceptance_length == 5.0
    assert statistics.accepted_tokens / statistics.num_drafts == 4.0
    assert statistics.draft_acceptance_rate == 1.0
    assert statistics.tokens_per_step == 5.0
    assert statistics.output_tokens == 20


def test_useless_draft_counts_one() -> None:
    statistics = counted(*[(8, 0, 1)] * 6)
    assert statistics.acceptance_length == 1.0
    assert statistics.draft_acceptance_rate == 0.0
    assert statistics.acceptance_by_position == [0.0] * 8


def test_plain_decoding_gives_one_token_a_step_and_no_drafting_figures() -> None:
    statistics = counted(*[(0, 0, 1)] * 7)
    assert statistics.tokens_per_step == 1.0
    assert statistics.acceptance_length is None
    assert statistics.acceptance_by_position is None
    assert statistics.conditional_acceptance_by_position is None
    assert statistics.draft_acceptance_rate is None


def test_steps_that_could_not_draft_do_not_lower_the_acceptance_length() -> None:
    statistics = counted((4, 4, 5), (0, 0, 1), (0, 0, 1))
    assert statistics.acceptance_length == 5.0
    assert statistics.tokens_per_step == pytest.approx(7 / 3)


def test_a_stop_cuts_the_kept_count_only() -> None:
    statistics = counted((4, 4, 2), (4, 2, 3))
    assert statistics.acceptance_length == 1 + 6 / 2
    assert statistics.acceptance_length_kept == 1 + 4 / 2


def test_unconditional_and_conditional_rates_of_a_draft_wrong_at_the_third() -> None:
    statistics = counted(*[(4, 2, 3)] * 5)
    assert statistics.acceptance_by_position == [1.0, 1.0, 0.0, 0.0]
    assert statistics.conditional_acceptance_by_position == [1.0, 1.0, 0.0, None]


def test_conditional_rate_of_the_second_is_one_when_only_the_first_fails() -> None:
    statistics = counted(*[(2, 0, 1), (2, 2, 3)] * 4)
    assert statistics.acceptance_by_position == [0.5, 0.5]
    assert statistics.conditional_acceptance_by_position == [0.5, 1.0]


def test_short_drafts_do_not_count_as_rejected_at_positions_they_never_held() -> None:
    statistics = counted((1, 1, 2), (3, 3, 4))
    assert statistics.acceptance_by_position == [1.0, 0.5, 0.5]
    assert statistics.conditional_acceptance_by_position == [1.0, 1.0, 1.0]


def test_milliseconds_are_means_over_steps_of_their_kind() -> None:
    statistics = EngineStatistics()
    statistics.count_step("prefill", target_seconds=9.0, draft_seconds=9.0)
    statistics.count_step("verify", target_seconds=0.004, draft_seconds=0.001)
    statistics.count_step("verify", target_seconds=0.006, draft_seconds=0.003)
    statistics.count_step("decode", target_seconds=0.002)
    assert statistics.verify_ms == pytest.approx(5.0)
    assert statistics.draft_ms == pytest.approx(2.0)
    assert statistics.decode_ms == pytest.approx(2.0)
    assert statistics.num_steps == 4


def test_no_steps_give_no_milliseconds() -> None:
    statistics = EngineStatistics()
    assert (statistics.draft_ms, statistics.verify_ms, statistics.decode_ms) == (None, None, None)
