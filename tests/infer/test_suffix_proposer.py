"""Suffix drafts: trees read on cases worked out by hand; what is kept of earlier requests, and how it is saved."""

import json
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from spectrain.infer.proposers.base import ProposerError, Released
from spectrain.infer.proposers.suffix import SuffixProposer, SuffixSettings, check_installed
from spectrain.infer.proposers.suffix_responses import FORMAT, load_responses, save_responses
from spectrain.tests.infer.draft_steps import bound, drafted, drafts_for, host_step_of

pytest.importorskip("arctic_inference")
K = 8
NO_LIMITS = {"max_factor": 99.0, "min_token_prob": 0.0}


def speculate(text, responses=(), *, k=K, room=99, prompt_len=None, **settings):
    """(ids, probabilities) drafted behind a text after these earlier responses."""
    proposer = bound(SuffixProposer(k, SuffixSettings(**settings), responses), 1)
    lens = None if prompt_len is None else [prompt_len]
    (draft,) = proposer.speculate(host_step_of(proposer, [text], room=room, prompt_lens=lens))
    return draft.token_ids, pytest.approx(draft.probs)


class TestTrees:
    def test_a_request_finds_its_own_text_and_its_end_counts_as_an_occurrence(self) -> None:
        # 1 2 3 occurs twice, once followed by 4 and once by nothing yet
        assert speculate([1, 2, 3, 4, 5, 6, 1, 2, 3]) == ([4, 5, 6], [0.5, 0.5, 0.5])

    def test_a_draft_is_as_long_as_what_matched_times_the_factor(self) -> None:
        earlier = [[1, 2, 3, 4, 5, 6, 7]]
        assert speculate([9, 1, 2], earlier)[0] == [3, 4]
        assert speculate([9, 1, 2], earlier, max_factor=2.0)[0] == [3, 4, 5, 6]
        assert speculate([9, 1, 2], earlier, max_factor=0.5)[0] == [3]
        assert speculate([9, 1, 2], earlier, max_factor=0.4)[0] == []

    def test_the_whole_text_is_never_matched(self) -> None:
        assert speculate([1, 2, 3], [[1, 2, 3, 4, 5, 6]])[0] == [4, 5], "two tokens matched, not three"

    def test_the_more_frequent_continuation_with_its_frequency(self) -> None:
        earlier = [[7, 8, 9, 1], [7, 8, 5, 5], [7, 8, 9, 1], [7, 8, 9, 2]]
        ids, probs = speculate([0, 7, 8], earlier, max_factor=9.0)
        assert ids == [9, 1] and probs == [0.75, 0.5]

    def test_a_draft_ends_before_it_is_less_likely_than_asked(self) -> None:
        earlier = [[7, 8, 9, 1, 3], [7, 8, 9, 2, 3], [7, 8, 5, 5, 3]]
        assert speculate([0, 7, 8], earlier, max_factor=9.0, min_token_prob=0.5)[0] == [9]
        assert speculate([0, 7, 8], earlier, max_factor=9.0, min_token_prob=0.7)[0] == []
        assert len(speculate([0, 7, 8], earlier, max_factor=9.0, min_token_prob=0.3)[0]) == 3

    def test_the_tree_that_promises_more_is_followed(self) -> None:
        text = [7, 8, 1, 1, 7, 8]  # the request's own: 7 8 -> 1, half the time
        assert speculate(text, [[7, 8, 2, 2]] * 3)[0] == [2, 2]
        assert speculate(text, [[7, 8, 2, 2], [7, 8, 3, 3], [7, 8, 4, 4]])[0] == [1, 1]

    def test_depth_bounds_match_and_draft_together(self) -> None:
        line = list(range(1, 30))
        assert speculate([50, *line[:10]], [line], prompt_len=11, max_depth=6, **NO_LIMITS)[0] == [11, 12, 13, 14, 15]
        assert speculate([50, *line[:10]], [line], prompt_len=11, max_depth=24, **NO_LIMITS)[0] == line[10:18]

    def test_draft_tokens_and_room_cut(self) -> None:
        line = list(range(1, 30))
        assert speculate([50, *line[:10]], [line], k=3)[0] == [11, 12, 13]
        assert speculate([50, *line[:10]], [line], room=2)[0] == [11, 12]
        assert speculate([50, *line[:10]], [line], room=0)[0] == []

    def test_without_a_cache_only_the_own_text_counts(self) -> None:
        assert speculate([9, 1, 2], [[1, 2, 3, 4]], max_cached_requests=0)[0] == []
        assert speculate([1, 2, 3, 1, 2], [[1, 2, 7]] * 9, max_cached_requests=0)[0] == [3, 1]


def serve(proposer: SuffixProposer, request_id: int, prompt: list[int], output: list[int]) -> list[list[int]]:
    """Runs one request a token at a time; the draft at each step."""
    seen = []
    for known in range(len(prompt) + 1, len(prompt) + len(output) + 1):
        text = (prompt + output)[:known]
        seen += drafts_for(proposer, [text], request_ids=[request_id], prompt_lens=[len(prompt)])
    proposer.release(Released(request_id, [], len(prompt) + len(output) - 1, True))
    return seen


def test_responses_serve_later_requests_and_prompts_do_not() -> None:
    proposer = bound(SuffixProposer(K), 1)
    serve(proposer, 0, [41, 42, 43, 44], [11, 12, 13, 14, 15])
    later = serve(proposer, 1, [9, 9], [11, 12, 13, 14, 15])
    assert later == [[12], [13, 14], [14, 15], [15], []]
    assert serve(proposer, 2, [9, 9, 41, 42], [50])[0] == [], "an earlier request's prompt was drafted"


def test_the_oldest_response_goes_first() -> None:
    proposer = bound(SuffixProposer(K, SuffixSettings(max_cached_requests=2)), 1)
    for i in range(3):
        serve(proposer, i, [1], [10 * (i + 1) + j for j in range(5)])
    assert list(proposer.cache.cached_requests) == [1, 2] and not proposer.cache.active_requests
    assert serve(proposer, 3, [1], [30, 31])[1] == [32, 33]
    assert serve(proposer, 4, [1], [10, 11])[1] == []


def test_a_preempted_request_comes_back_whole() -> None:
    proposer = bound(SuffixProposer(K), 2)
    text = [5, 6, 7, 8, 9, 5, 6, 7]
    fields = {"request_ids": [3], "prompt_lens": [2], "num_rows": 2}
    drafts_for(proposer, [text[:6]], rows=[0], **fields)
    proposer.release(Released(3, [], 5, False))
    assert drafts_for(proposer, [text], rows=[1], **fields) == [[8, 9, 5]]
    assert list(proposer.cache.cached_requests) == [3]


def test_forgetting_goes_back_to_what_was_given() -> None:
    given = [np.array([11, 12, 13], dtype=np.int32)]
    proposer = bound(SuffixProposer(K, responses=given), 1)
    serve(proposer, 0, [1], [31, 32, 33])
    proposer.forget()
    assert serve(proposer, 0, [1], [31, 32])[1] == []
    assert serve(proposer, 1, [1], [11, 12])[1] == [13]


def test_memory_is_bounded_by_the_cache_and_not_by_what_was_served() -> None:
    proposer = bound(SuffixProposer(K, SuffixSettings(max_cached_requests=50)), 1)
    rng, sizes = np.random.default_rng(0), []
    for request in range(600):
        serve(proposer, request, rng.integers(0, 50, 5).tolist(), rng.integers(0, 50, 6).tolist())
        if request % 100 == 99:
            sizes.append(proposer.cache._global_tree.estimate_memory())
    assert len(proposer.cache.cached_requests) == 50
    assert max(sizes) < 1.3 * sizes[0]


@pytest.mark.slow
def test_memory_is_bounded_over_a_hundred_thousand_requests() -> None:
    import psutil

    proposer, process = bound(SuffixProposer(K), 1), psutil.Process()
    rng, resident = np.random.default_rng(0), {}
    for request in range(100_000):
        prompt, output = rng.integers(0, 32_000, 8).tolist(), rng.integers(0, 32_000, 16).tolist()
        drafts_for(proposer, [prompt + output], request_ids=[request], prompt_lens=[8])
        proposer.release(Released(request, [], 23, True))
        if request in (20_000, 99_999):
            resident[request] = process.memory_info().rss
    assert len(proposer.cache.cached_requests) == 10_000 and not proposer.cache.active_requests
    assert resident[99_999] < 1.2 * resident[20_000]


class TestSaving:
    RESPONSES = ([11, 12, 13, 14], [5], [7, 8, 9])

    def test_what_is_loaded_drafts_like_what_was_saved(self, tmp_path) -> None:
        path = tmp_path / "deep" / "cache.safetensors"
        save_responses(path, self.RESPONSES, "hash")
        loaded = load_responses(path, "hash", 20)
        assert [response.tolist() for response in loaded] == [list(r) for r in self.RESPONSES]
        for text in ([1, 11, 12], [1, 7], [2, 8]):
            assert speculate(text, loaded)[0] == speculate(text, self.RESPONSES)[0] != []
        assert [file.name for file in path.parent.iterdir()] == ["cache.safetensors"]
        assert b"pickle" not in path.read_bytes()

    def test_nothing_is_something_too(self, tmp_path) -> None:
        save_responses(tmp_path / "c", [], "hash")
        assert load_responses(tmp_path / "c", "hash", 20) == []

    def test_other_files_are_refused_in_one_line(self, tmp_path) -> None:
        path = tmp_path / "c"
        save_responses(path, self.RESPONSES, "hash")
        for arguments, expected in ((("other", 20), "another tokenizer"), (("hash", 10), "damaged")):
            with pytest.raises(ProposerError, match=expected):
                load_responses(path, *arguments)
        facts = {"format": FORMAT, "tokenizer": "hash"}
        tokens = np.arange(4, dtype=np.int32)
        for bounds in ([0, 3], [1, 4], [0, 5, 4], []):
            save_file({"tokens": tokens, "cu_seqlens": np.array(bounds, dtype=np.int64)}, path, metadata=facts)
            with pytest.raises(ProposerError, match="damaged"):
                load_responses(path, "hash", 20)
        save_file({"tokens": tokens}, path, metadata=facts)
        with pytest.raises(ProposerError, match="must be responses saved by spectrain"):
            load_responses(path, "hash", 20)
        path.write_text(json.dumps({"a": 1}))
        with pytest.raises(ProposerError, match="must be responses saved by spectrain"):
            load_responses(path, "hash", 20)


def test_the_missing_package_is_named_with_what_brings_it(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "arctic_inference.suffix_decoding", None)
    for call in (check_installed, lambda: SuffixProposer(4)):
        with pytest.raises(ProposerError, match=r"arctic-inference.*pip install 'spectrain\[suffix\]'"):
            call()


@pytest.mark.parametrize(
    "changes", [{"max_depth": 0}, {"max_cached_requests": -1}, {"max_factor": -0.1}, {"min_token_prob": 1.5}]
)
def test_settings_out_of_range(changes) -> None:
    (name,) = changes
    with pytest.raises(ProposerError, match=name):
        SuffixSettings(**changes)


def test_confidence_is_of_each_token_given_those_before_it() -> None:
    earlier = [[7, 8, 9, 1], [7, 8, 5, 5], [7, 8, 9, 1], [7, 8, 9, 2]]
    proposer = bound(SuffixProposer(3, SuffixSettings(max_factor=9.0), earlier), 2)
    drafts = proposer.propose(host_step_of(proposer, [[0, 7, 8], [3]], wants_confidence=True))
    assert drafted(drafts) == [[9, 1], []] and drafts.confidence is not None
    np.testing.assert_allclose(drafts.confidence, [[0.75, 2 / 3, 0.0], [0.0, 0.0, 0.0]], rtol=1e-6)
