"""The policy picks what earns most tokens a millisecond, tries the rest now and then, and never looks ahead."""

import itertools

import pytest

from spectrain.infer.costs import Rehearsal, StepCosts, measure_costs
from spectrain.infer.draft_policy import Choice, DraftPolicy, draft_widths

WIDTHS = draft_widths(7)


def costs(verify, draft: float = 0.0, rest: float = 0.0) -> StepCosts:
    """`verify(rows)` milliseconds for any batch."""
    batches = (1, 4, 64)
    table = tuple(tuple(verify(batch * width) for width in WIDTHS) for batch in batches)
    return StepCosts(batches=batches, widths=WIDTHS, verify_ms=table, draft_ms=(draft,) * 3, rest_ms=(rest,) * 3)


def policy_of(step_costs: StepCosts, **settings) -> DraftPolicy:
    return DraftPolicy(WIDTHS, step_costs, **{"probe_share": 0.0, **settings})


def run(policy: DraftPolicy, accepted: list[float], steps: int, requests=range(4)) -> list[Choice]:
    """Choices of `steps` steps whose drafts all promise `accepted` by width."""
    choices, waits = [], False
    for _ in range(steps):
        choices.append(policy.choose(requests, len(requests), waits))
        waits = choices[-1].drafts
        if waits:
            policy.promise(requests).accepted = accepted
    return choices


def promised(rates) -> list[float]:
    total = [0.0, *itertools.accumulate(rates)]
    return [total[width - 1] for width in WIDTHS]


STRONG = promised((0.947, 0.890, 0.832, 0.778, 0.728, 0.678, 0.628))
CHAT = promised((0.70, 0.45, 0.30, 0.20, 0.13, 0.09, 0.06))


def test_widths_run_from_plain_to_all_drafts():
    assert draft_widths(1) == (1, 2)
    assert draft_widths(5) == (1, 2, 3, 4, 6)
    assert WIDTHS == (1, 2, 3, 4, 6, 8)


@pytest.mark.parametrize("accepted", [STRONG, CHAT])
def test_where_rows_are_free_all_drafts_are_verified(accepted):
    assert run(policy_of(costs(lambda rows: 5.0)), accepted, 40)[-1] == Choice(8, True)


@pytest.mark.parametrize("accepted", [STRONG, CHAT])
def test_where_rows_cost_in_full_nothing_is_drafted(accepted):
    choices = run(policy_of(costs(lambda rows: float(rows))), accepted, 200)
    assert choices[-1] == Choice(1, False)


def test_where_drafting_costs_more_than_it_saves_it_rests():
    assert run(policy_of(costs(lambda rows: 5.0, draft=30.0)), STRONG, 40)[-1] == Choice(1, False)
    assert run(policy_of(costs(lambda rows: 5.0, draft=30.0, rest=30.0)), STRONG, 40)[-1] == Choice(8, True)


@pytest.mark.parametrize("accepted", [STRONG, CHAT], ids=["strong", "chat"])
@pytest.mark.parametrize("slope", [0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("draft", [0.0, 0.7, 3.0])
def test_the_choice_is_the_best_of_all(accepted, slope, draft):
    table = costs(lambda rows: 4 + slope * rows, draft)
    policy = policy_of(table)
    policy._accepted = list(accepted)
    last = run(policy, accepted, 3)[-1]
    rates = {Choice(1, False): 4 / table.verify(4, 1)}
    for width, gain in zip(WIDTHS[1:], accepted[1:], strict=True):
        rates[Choice(width, True)] = 4 * (1 + gain) / (table.verify(4, width) + draft)
    assert rates[last] == pytest.approx(max(rates.values()), rel=1e-6)


def test_padding_takes_slots_that_others_use():
    """Three requests in a bucket of four: the fourth's slots are theirs, so that less width is needed."""
    policy = policy_of(costs(lambda rows: 4.0 if rows <= 8 else 40.0))
    policy._accepted = CHAT
    assert policy._tokens(3, 4)[2] == pytest.approx(3 * (1 + CHAT[1] + (CHAT[2] - CHAT[1]) / 3))


@pytest.mark.parametrize("share", [0.005, 0.05])
def test_resting_costs_no_more_than_its_share(share):
    table = costs(lambda rows: 4 + 0.25 * rows, draft=6.0)
    choices = run(policy_of(table, probe_share=share), CHAT, 3000)
    tail = choices[1000:]
    assert 0 < sum(choice.drafts for choice in tail) < 6 * share * len(tail)
    spent = sum(table.verify(4, c.width) + table.propose(4, c.drafts) for c in tail)
    tokens = sum(1 + CHAT[WIDTHS.index(c.width)] for c in tail)
    assert 1 < (spent / tokens) / table.verify(4, 1) < 1 + 1.1 * share
    # what is drafted is verified: otherwise nothing would be learned from it
    assert all(after.width > 1 for before, after in itertools.pairwise(tail) if before.drafts)


def test_drafting_starts_again_when_it_pays():
    table = costs(lambda rows: 4 + 0.1 * rows, draft=2.0)
    policy = policy_of(table, probe_share=0.01)
    assert not run(policy, promised([0.05] * 7), 500)[-2].drafts
    assert all(choice.drafts for choice in run(policy, STRONG, 2000)[-10:])


def test_other_widths_are_tried_within_the_share():
    table = costs(lambda rows: 4 + 0.8 * rows)
    choices = run(policy_of(table, probe_share=0.01), STRONG, 2000)[200:]
    common = max({c.width for c in choices}, key=[c.width for c in choices].count)
    wider = [c for c in choices if c.width > common]
    assert wider and len(wider) < 0.1 * len(choices)


def test_a_promise_is_not_looked_at_before_its_drafts_are_on_their_way():
    """Two policies that differ in what the waiting drafts promise choose alike; the step after, they differ."""
    table = costs(lambda rows: 4 + 0.5 * rows)
    chosen = []
    for accepted in (STRONG, promised([0.01] * 7)):
        policy = policy_of(table, memory=0.01)
        first = policy.choose(range(4), 4, False)
        policy.promise(range(4)).accepted = accepted
        second = policy.choose(range(4), 4, True)
        policy.promise(range(4)).accepted = STRONG
        third = policy.choose(range(4), 4, True)
        chosen.append((first, second, third))
    (first, second, third), (other_first, other_second, other_third) = chosen
    assert (first, second) == (other_first, other_second)
    assert third != other_third


def test_a_promise_waits_for_the_request_that_was_left_out():
    policy = policy_of(costs(lambda rows: 4.0), memory=0.01)
    before = list(policy._accepted)
    policy.promise(range(3)).accepted = STRONG
    policy.choose([0, 1], 2, True)
    policy.choose([0, 1], 2, True)
    assert policy._accepted == before
    policy.choose([2], 1, True)
    policy.choose([0], 1, True)
    assert policy._accepted == pytest.approx(STRONG)


@pytest.mark.parametrize("finished", [True, False])
def test_a_request_that_leaves_does_not_hold_a_promise_up(finished):
    policy = policy_of(costs(lambda rows: 4.0), memory=0.01)
    before = list(policy._accepted)
    policy.promise(range(3)).accepted = STRONG
    policy.choose([0, 1], 2, True)
    policy.forget(2, finished)
    policy.choose([0, 1], 2, True)
    # one that was preempted drafts again where it drafted before, so that what was promised there stays unread
    assert policy._accepted == pytest.approx(STRONG if finished else before)


def test_a_promise_that_says_nothing_changes_nothing():
    policy = policy_of(costs(lambda rows: 4.0), memory=0.01)
    before = list(policy._accepted)
    policy.promise([]).accepted = [float("nan")] * len(WIDTHS)
    policy.choose([0], 1, False)
    assert policy._accepted == before and not policy._promises


def test_steps_that_take_longer_than_measured_are_believed():
    """Long contexts make every step dearer, and drafting worth more."""
    table = costs(lambda rows: 1 + 0.4 * rows, draft=1.0)
    policy = policy_of(table)
    assert not run(policy, CHAT, 50)[-1].drafts
    for _ in range(200):
        policy.count_step(Choice(1, False), 4, 4, verify_ms=20.0, propose_ms=0.0)
    assert run(policy, CHAT, 2)[-1].drafts


def test_costs_are_read_between_what_was_measured():
    table = StepCosts(
        batches=(1, 9), widths=(1, 5), verify_ms=((1.0, 5.0), (9.0, 13.0)), draft_ms=(1.0, 3.0), rest_ms=(0.0, 1.0)
    )
    assert table.verify(5, 3) == pytest.approx(7.0)
    assert table.verify(99, 9) == pytest.approx(13.0)
    assert (table.propose(5, True), table.propose(5, False)) == (pytest.approx(2.0), pytest.approx(0.5))


@pytest.mark.parametrize(("verify", "expected"), [(lambda rows: 5.0, 7), (lambda rows: 5.0 * rows, 0)])
def test_best_number_of_drafts_at_the_ends(verify, expected):
    assert costs(verify).best_num_draft_tokens(4, (0.70, 0.45, 0.30, 0.20, 0.13, 0.09, 0.06)) == expected


def test_measuring_asks_every_pair_and_smooths_noise():
    asked = []

    def rehearse(batch: int, width: int) -> Rehearsal:
        asked.append((batch, width))
        return Rehearsal(lambda: batch * (3 if width == 2 else width), lambda: 0.5, lambda: 0.25)

    table = measure_costs(rehearse, (1, 2), (1, 2, 3), lambda function: float(function()))
    assert set(asked) == {(b, w) for b in (1, 2) for w in (1, 2, 3)}
    assert table.verify_ms == ((1.0, 3.0, 3.0), (2.0, 6.0, 6.0))
    assert (table.rest_ms, table.draft_ms) == ((0.5, 0.5), (0.75, 0.75))
