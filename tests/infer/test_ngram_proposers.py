"""N-gram drafts on the host and on the device against five lines that search the text from scratch."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrain.infer.proposers.base import ProposerError, Released
from spectrain.infer.proposers.ngram import NgramProposer
from spectrain.infer.proposers.ngram_gpu import NgramGpuProposer
from spectrain.infer.proposers.ngram_rule import NgramRule
from spectrain.tests.infer.draft_steps import bound, drafted, drafts_for, host_step_of, step_of

K = 4
BOTH = pytest.mark.parametrize("kind", [NgramProposer, NgramGpuProposer])


def brute_force(text: list[int], rule: NgramRule, most: int) -> list[int]:
    for n in range(min(rule.max_n, len(text) - 1), rule.min_n - 1, -1):
        places = [p for p in range(len(text) - n) if text[p : p + n] == text[-n:]]
        if places:
            begin = places[0 if rule.occurrence == "earliest" else -1] + n
            return text[begin : begin + max(most, 0)]
    return []


@st.composite
def contexts(draw) -> tuple[NgramRule, list[list[int]], list[int]]:
    """Texts over few ids, so that everything occurs again and overlaps itself, some of one repeated piece."""
    low = draw(st.integers(1, 4))
    rule = NgramRule(
        min_n=low, max_n=low + draw(st.integers(0, 3)), occurrence=draw(st.sampled_from(["earliest", "latest"]))
    )
    texts = []
    for _ in range(5):
        alphabet = draw(st.integers(1, 5))
        piece = [byte % alphabet for byte in draw(st.binary(min_size=1, max_size=30))]
        texts.append((piece * draw(st.integers(1, 4)))[: draw(st.integers(1, 60))])
    return rule, texts, draw(st.lists(st.integers(0, 6), min_size=5, max_size=5))


# each case is five texts, and each text two contexts: at a random point on its way, and at its end
@settings(max_examples=1000, deadline=None, database=None)
@given(contexts(), st.data())
def test_host_and_device_draft_what_a_search_from_scratch_finds(case, data) -> None:
    rule, texts, room = case
    host, device = bound(NgramProposer(K, rule), 5), bound(NgramGpuProposer(K, rule), 5)
    cuts = [data.draw(st.integers(1, len(text))) for text in texts]
    for known in ([text[:cut] for text, cut in zip(texts, cuts, strict=True)], texts):
        expected = [brute_force(text, rule, min(K, left)) for text, left in zip(known, room, strict=True)]
        assert drafts_for(host, known, room=room) == expected
        assert drafts_for(device, known, room=room) == expected


@BOTH
def test_longest_match_wins_and_ties_go_to_the_earliest_or_the_latest(kind) -> None:
    text = [1, 2, 9, 1, 2, 8, 1, 2]
    for occurrence, expected in (("earliest", [9, 1, 2, 8]), ("latest", [8, 1, 2])):
        rule = NgramRule(min_n=1, max_n=3, occurrence=occurrence)
        assert drafts_for(bound(kind(K, rule), 1), [text]) == [expected]
    # a match of two tokens beats the earlier one of one token
    assert drafts_for(bound(kind(K, NgramRule(min_n=1, max_n=2)), 1), [[2, 5, 1, 2, 6, 1, 2]]) == [[6, 1, 2]]


@BOTH
def test_output_is_searched_like_the_prompt(kind) -> None:
    proposer = bound(kind(K, NgramRule(min_n=2, max_n=2)), 1)
    assert drafts_for(proposer, [[1, 2, 3]]) == [[]]
    assert drafts_for(proposer, [[1, 2, 3, 4, 5, 3, 4]]) == [[5, 3, 4]]


@BOTH
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_texts_shorter_than_the_ngram_draft_nothing_and_an_ngram_never_matches_itself(kind, length) -> None:
    proposer = bound(kind(K, NgramRule(min_n=2, max_n=5)), 1)
    assert drafts_for(proposer, [list(range(10, 10 + length))]) == [[]]
    assert drafts_for(bound(kind(K, NgramRule(min_n=5, max_n=5)), 1), [[3] * length]) == [[]]


@BOTH
def test_an_occurrence_may_overlap_the_end_of_the_text(kind) -> None:
    assert drafts_for(bound(kind(K, NgramRule(min_n=2, max_n=5)), 1), [[3] * 6]) == [[3]]
    assert drafts_for(bound(kind(K, NgramRule(min_n=2, max_n=2)), 1), [[3] * 6]) == [[3, 3, 3, 3]]


@BOTH
def test_room_near_the_context_limit_cuts_the_draft(kind) -> None:
    for left, expected in ((0, []), (1, [7]), (2, [7, 8]), (99, [7, 8, 1, 2])):
        proposer = bound(kind(K, NgramRule(min_n=2, max_n=2)), 1)
        assert drafts_for(proposer, [[1, 2, 7, 8, 1, 2]], room=left, width=6 + K + 2) == [expected]
    # a table without a place behind the text
    assert drafts_for(bound(kind(K, NgramRule(min_n=2, max_n=2)), 1), [[1, 2, 7, 1, 2]], width=5) == [[7, 1, 2]]


@BOTH
def test_a_row_that_passes_to_another_request_forgets_the_first(kind) -> None:
    proposer = bound(kind(K, NgramRule(min_n=2, max_n=2)), 2)
    assert drafts_for(proposer, [[1, 2, 3, 1, 2]], request_ids=[5], num_rows=2) == [[3, 1, 2]]
    proposer.release(Released(5, [], 4, True))
    assert drafts_for(proposer, [[4, 4, 9, 1, 2, 6]], request_ids=[6], num_rows=2) == [[]]
    assert drafts_for(proposer, [[4, 4, 9, 1, 2, 6, 1, 2]], request_ids=[6], num_rows=2) == [[6, 1, 2]]
    # one that comes back in another row, as after a preemption, is known there too
    assert drafts_for(proposer, [[1, 2, 3, 1, 2, 8, 1, 2]], request_ids=[5], rows=[1]) == [[3, 1, 2, 8]]


def test_padding_drafts_nothing() -> None:
    proposer = bound(NgramGpuProposer(K, NgramRule(min_n=1, max_n=2)), 3)
    step = step_of([[1, 2, 3, 1, 2], [7], [7]], request_ids=[4], rows=[0, 2, 2], room=[9, 0, 0])
    assert drafted(proposer.propose(step)) == [[3, 1, 2], [], []]


@BOTH
def test_steps_that_did_not_draft_are_caught_up_with(kind) -> None:
    """An adaptive engine rests: more tokens than a step emits may be new."""
    rng = np.random.default_rng(0)
    text = rng.integers(0, 4, 60).tolist()
    proposer, rule = bound(kind(K, NgramRule(min_n=2, max_n=4)), 1), NgramRule(min_n=2, max_n=4)
    for known in (3, 4, 20, 25, 59, 60):
        assert drafts_for(proposer, [text[:known]]) == [brute_force(text[:known], rule, K)]


def test_a_step_costs_the_tokens_it_adds_and_not_the_context() -> None:
    rng = np.random.default_rng(2)

    def seconds(length: int) -> float:
        rule = NgramRule(min_n=2, max_n=4)
        text = rng.integers(0, 50, length + 200).tolist()
        proposer, took = bound(NgramProposer(K, rule), 1), []
        proposer.propose(host_step_of(proposer, [text[:length]], width=length + 300))
        for known in range(length + 1, length + 201):
            step = host_step_of(proposer, [text[:known]])
            begun = time.perf_counter()
            drafts = proposer.propose(step)
            took.append(time.perf_counter() - begun)
            if known % 50 == 0:
                assert drafted(drafts) == [brute_force(text[:known], rule, K)]
        return sorted(took)[100]

    assert seconds(20_000) < 3 * seconds(2_000)


@BOTH
@pytest.mark.parametrize("occurrence", ["earliest", "latest"])
def test_a_long_text_grows_the_index_and_keeps_what_it_knew(kind, occurrence) -> None:
    rng = np.random.default_rng(3)
    rule = NgramRule(min_n=2, max_n=5, occurrence=occurrence)
    texts = [rng.integers(0, high, 1500).tolist() for high in (3, 30, 3000)]
    proposer = bound(kind(K, rule), 3)
    for known in (*range(1, 1500, 97), 1500):
        some = [text[:known] for text in texts]
        assert drafts_for(proposer, some, width=1510) == [brute_force(text, rule, K) for text in some]


def test_bounds_that_are_missing_or_wrong() -> None:
    assert NgramRule.between(None, None) == NgramRule(min_n=5, max_n=5)
    assert NgramRule.between(2, None) == NgramRule(min_n=2, max_n=2)
    assert NgramRule.between(None, 3) == NgramRule(min_n=3, max_n=3)
    for low, high in ((0, 3), (4, 3), (-1, -1)):
        with pytest.raises(ProposerError, match="1 <= min <= max"):
            NgramRule.between(low, high)
