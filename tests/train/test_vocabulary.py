"""Which ids a head can propose: counted, completed, forced, sorted."""

from types import SimpleNamespace

import pytest
import torch

from spectrain.tests.chats import CHATML, word_tokenizer
from spectrain.train.vocabulary import (
    VocabularyError,
    forced_token_ids,
    select_draft_vocabulary,
    spare_token_id,
)


def counted(pairs: dict[int, int], vocab: int = 97) -> torch.Tensor:
    counts = torch.zeros(vocab, dtype=torch.int64)
    for token, count in pairs.items():
        counts[token] = count
    return counts


def test_most_frequent_ids_win_ties_go_to_the_lower_id() -> None:
    chosen = select_draft_vocabulary(counted({9: 5, 3: 2, 6: 2, 5: 2, 80: 1}), 3)
    assert chosen.token_ids.tolist() == [3, 5, 9]
    assert chosen.coverage == pytest.approx(9 / 12)
    # many ties: sorting that is not stable would pick at random
    counts = torch.full((50_000,), 2, dtype=torch.int64)
    counts[::7] = 3
    expected = [*range(0, 50_000, 7), *(i for i in range(1200) if i % 7)]
    assert select_draft_vocabulary(counts, len(expected)).token_ids.tolist() == sorted(expected)


@pytest.mark.parametrize("size", [16, 64, 97])
def test_fewer_seen_ids_than_asked_are_filled_with_unseen_ones(size: int) -> None:
    seen = {i * 5: 1 + i for i in range(15)}
    chosen = select_draft_vocabulary(counted(seen), size, forced=[1, 2][: 16 - 15 if size == 16 else 2])
    ids = chosen.token_ids
    assert len(ids) == size and (ids.diff() > 0).all() and ids[-1] < 97 and ids[0] >= 0
    assert set(seen) <= set(ids.tolist()) and chosen.coverage == 1.0


def test_forced_ids_are_inside_and_cost_the_rarest() -> None:
    chosen = select_draft_vocabulary(counted({3: 9, 4: 8, 5: 7}), 3, forced=[90, 4, 500])
    assert chosen.token_ids.tolist() == [3, 4, 90]


def test_more_forced_ids_than_room_and_no_counts_are_refused() -> None:
    with pytest.raises(VocabularyError, match="draft_vocab_size"):
        select_draft_vocabulary(counted({1: 1}), 2, forced=[1, 2, 3])
    with pytest.raises(VocabularyError, match="found none"):
        select_draft_vocabulary(counted({}), 2)
    with pytest.raises(VocabularyError, match="between 1 and 97"):
        select_draft_vocabulary(counted({1: 1}), 98)


def test_offsets_and_flags_of_a_known_vocabulary() -> None:
    """used = {3, 5, 6, 9}: d2t = [3, 4, 4, 6]."""
    from spectrain.heads.base import TargetFacts
    from spectrain.heads.eagle3 import Eagle3Config, Eagle3Head
    from spectrain.tests.models import rand_llama

    facts = TargetFacts.from_config(rand_llama(4).config)
    head = Eagle3Head(Eagle3Config.derive(facts, {"draft_vocab_size": 4, "layer_ids": [1, 2, 3]}))
    ids = select_draft_vocabulary(counted({9: 1, 6: 2, 5: 3, 3: 4}), 4).token_ids
    head.set_draft_vocab(ids)
    assert head.d2t.tolist() == [3, 4, 4, 6]
    mapped = head.draft_to_target()
    assert mapped is not None and mapped.tolist() == [3, 5, 6, 9] == head.t2d.nonzero().flatten().tolist()


def test_specials_byte_fallback_and_markers_are_forced() -> None:
    added = {90: "<|im_end|>", 91: "<think>", 92: "<tool_call>", 93: "<unused>", 94: "<|user|>"}
    tokenizer = SimpleNamespace(
        bos_token_id=1,
        eos_token_id=2,
        all_special_ids=[1, 2, 90],
        added_tokens_decoder=added,
        get_vocab=lambda: {"<0x0A>": 10, "<0xfF>": 11, "<0x0>": 12, "a": 13} | {v: k for k, v in added.items()},
    )
    forced = forced_token_ids(tokenizer, [2, 7], counted({90: 3, 94: 1, 13: 5}))
    assert forced == {1, 2, 7, 90, 91, 92, 94, 10, 11}
    assert forced_token_ids(None, [2], counted({})) == {2}


def test_the_mask_token_is_an_id_no_text_uses() -> None:
    counts = torch.zeros(60, dtype=torch.int64)
    counts[:30] = 1
    tokenizer = word_tokenizer(CHATML)
    beyond = len(tokenizer)
    assert beyond < 60
    # without a tokenizer the last unused row; with one the first row beyond it, then special tokens out of use
    assert spare_token_id(None, {59}, counts) == 58
    assert spare_token_id(tokenizer, {2}, counts) == beyond
    tokenizer.add_special_tokens({"additional_special_tokens": ["<spare>", "<|im_start|>"]})
    narrow = torch.ones(len(tokenizer), dtype=torch.int64)
    spare, start = tokenizer.convert_tokens_to_ids(["<spare>", "<|im_start|>"])
    narrow[[spare, start, 20]] = 0  # id 20 is a word of the text's own that happens not to occur
    assert spare_token_id(tokenizer, {2}, narrow) == spare
    narrow[spare] = 1
    assert spare_token_id(tokenizer, {2}, narrow) == 20
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    assert spare_token_id(tokenizer, {2}, torch.zeros(80, dtype=torch.int64)) == tokenizer.mask_token_id
    with pytest.raises(VocabularyError, match="set head.mask_token_id"):
        spare_token_id(None, {1}, torch.tensor([3, 0, 5]))
