"""Where an output ends: token by token, whatever blocks it comes in, and never inside a character."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from spectrain.infer.sampling import SamplingParams
from spectrain.infer.stopping import FinishReason, Stopper, TextStream
from spectrain.tests.chats import PLAIN, word_tokenizer

LETTERS = word_tokenizer(PLAIN)
TEXT = "So: «naïve» 日本 🙂🙂 e\u0301nd."


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, as the byte-level tokenizers of GPT-2 and Qwen have for what no merge covers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Words with a leading space mark, and bytes for the rest, as Llama's has."""
    words = ["<unk>", "▁So", "▁e", ":", "nd", ".", "▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend)


BYTES, FALLBACK = bytes_tokenizer(), fallback_tokenizer()
TEXT_IDS = BYTES.encode(TEXT)


def letters(text: str) -> list[int]:
    return LETTERS.convert_tokens_to_ids(text.split())


def stopper(params: SamplingParams, ends: tuple[int, ...] = (), prompt: tuple[int, ...] = (1,), **more: Any) -> Stopper:
    return Stopper(params, frozenset(ends), prompt, more.pop("max_length", 100), more.pop("tokenizer", LETTERS))


def run(
    token_ids: list[int], blocks: list[int], params: SamplingParams, **more: Any
) -> tuple[int, FinishReason | None, str | None]:
    """Tokens kept, why it ended, and the text, of tokens that come in blocks of the given sizes, over and over."""
    stops, kept, turn = stopper(params, **more), 0, 0
    while kept < len(token_ids):
        size = blocks[turn % len(blocks)]
        turn += 1
        taken, reason = stops.take(token_ids[kept : kept + size])
        kept += taken
        if reason is not None:
            return kept, reason, stops.text
    return kept, None, stops.text


class TestTokens:
    def test_the_first_rule_in_the_block_wins(self) -> None:
        for limit, expected in (
            (5, (3, FinishReason.STOP)),
            (3, (3, FinishReason.STOP)),
            (2, (2, FinishReason.LENGTH)),
        ):
            params = SamplingParams(max_tokens=limit, stop_token_ids=(8,))
            assert stopper(params, (8,)).take([6, 7, 8, 9, 10, 11]) == expected

    def test_the_context_ends_it_too(self) -> None:
        stops = stopper(SamplingParams(max_tokens=50), prompt=(1, 2, 3), max_length=8)
        assert stops.take([6] * 3) == (3, None)
        assert stops.take([6] * 9) == (2, FinishReason.LENGTH)

    def test_an_end_token_before_the_minimum_is_an_ordinary_token(self) -> None:
        stops = stopper(SamplingParams(min_tokens=2), (8,))
        assert stops.take([8, 8]) == (2, None)
        assert stops.take([8, 8]) == (1, FinishReason.STOP)

    def test_without_rules_it_goes_on(self) -> None:
        assert stopper(SamplingParams()).take([]) == (0, None)
        assert stopper(SamplingParams()).text is None


class TestStrings:
    def test_ids_count_and_text_end_with_the_string_early_in_a_block(self) -> None:
        ids = letters("a b c d e f g h")
        for blocks in ([8], [1], [4], [3, 5], [2]):
            found = run(ids, blocks, SamplingParams(stop=("d e",)))
            assert found[:2] == (5, FinishReason.STOP)
            assert found[2] is not None and found[2].split() == ["a", "b", "c"]

    def test_the_text_keeps_the_string_on_demand(self) -> None:
        *_, text = run(letters("a b c d e f"), [6], SamplingParams(stop=("d e",), include_stop_str=True))
        assert text is not None and text.split() == ["a", "b", "c", "d", "e"]

    def test_the_earliest_of_several_strings_cuts(self) -> None:
        for stop in (("f", "c d", "d"), ("d", "c d", "f")):
            kept, reason, text = run(letters("a b c d e f"), [6], SamplingParams(stop=stop))
            assert (kept, reason) == (4, FinishReason.STOP)
            assert text is not None and text.split() == ["a", "b"]

    def test_a_string_that_ends_exactly_at_the_limit_is_a_stop(self) -> None:
        assert run(letters("a b c d"), [4], SamplingParams(stop=("b c",), max_tokens=3))[1] is FinishReason.STOP
        assert run(letters("a b c d"), [4], SamplingParams(stop=("b c",), max_tokens=2))[1] is FinishReason.LENGTH

    def test_a_string_complete_before_the_minimum_does_not_count(self) -> None:
        ids = letters("a b c a b c")
        assert run(ids, [6], SamplingParams(stop=("a b",), min_tokens=2))[0] == 5
        assert run(ids, [6], SamplingParams(stop=("a b",), min_tokens=1))[0] == 2

    def test_the_prompt_is_no_part_of_the_text(self) -> None:
        prompt = tuple(letters("x d"))
        kept, reason, text = run(letters("e f"), [2], SamplingParams(stop=("d e", "x")), prompt=prompt)
        assert (kept, reason) == (2, None)
        assert text is not None and text.split() == ["e", "f"]

    def test_end_tokens_are_not_in_the_text(self) -> None:
        kept, reason, text = run(letters("a b c"), [3], SamplingParams(stop=("z",)), ends=tuple(letters("b")))
        assert (kept, reason) == (2, FinishReason.STOP)
        assert text is not None and text.split() == ["a"]

    def test_strings_need_a_tokenizer(self) -> None:
        with pytest.raises(ValueError, match="need a tokenizer"):
            stopper(SamplingParams(stop=("a",)), tokenizer=None)

    @settings(max_examples=100, deadline=None)
    @given(
        st.integers(0, len(TEXT) - 1),
        st.integers(1, 6),
        st.lists(st.integers(1, 9), min_size=1, max_size=4),
        st.integers(0, 12),
    )
    def test_any_part_of_the_text_stops_it_where_its_last_byte_comes(self, start, length, blocks, min_tokens) -> None:
        string = TEXT[start : start + length]
        found = run(TEXT_IDS, blocks, SamplingParams(stop=(string,), min_tokens=min_tokens), tokenizer=BYTES)
        # an occurrence counts if its last byte comes after the minimum
        at = TEXT.find(string)
        while at >= 0 and len((TEXT[:at] + string).encode()) <= min_tokens:
            at = TEXT.find(string, at + 1)
        if at < 0:
            assert found == (len(TEXT_IDS), None, TEXT)
        else:
            assert found == (len((TEXT[:at] + string).encode()), FinishReason.STOP, TEXT[:at])


class TestText:
    @pytest.mark.parametrize("tokenizer", [BYTES, FALLBACK], ids=["byte-level", "byte-fallback"])
    def test_characters_come_whole_and_in_order(self, tokenizer) -> None:
        names = [f"<0x{byte:02X}>" for byte in TEXT.encode()]
        ids = TEXT_IDS if tokenizer is BYTES else tokenizer.convert_tokens_to_ids(names)
        stream, text = TextStream(tokenizer, []), ""
        for i, token in enumerate(ids, start=1):
            text += stream.push(token)
            assert text == TEXT.encode()[:i].decode(errors="ignore")
        assert text + stream.flush() == TEXT

    def test_words_keep_the_space_before_them(self) -> None:
        ids = FALLBACK.convert_tokens_to_ids(["▁So", ":", "▁e", "nd", "▁e", "."])
        for split in range(len(ids)):
            stream = TextStream(FALLBACK, ids[:split])
            text = "".join(map(stream.push, ids[split:])) + stream.flush()
            assert text == FALLBACK.decode(ids)[len(FALLBACK.decode(ids[:split])) :]

    def test_special_tokens_leave_no_trace(self) -> None:
        ids = letters("a b c")
        stream = TextStream(LETTERS, [1])
        text = "".join(map(stream.push, [1, ids[0], 1, ids[1], 2, 2, ids[2]]))
        assert text.split() == ["a", "b", "c"] and text == LETTERS.decode(ids)

    def test_what_settles_before_a_torn_character_is_given_out_at_once(self) -> None:
        """One token may end a word and begin a character."""
        backend = Tokenizer(models.BPE({"a": 0, "Ã": 1, "aÃ": 2, "©": 3}, [("a", "Ã")]))
        backend.decoder = decoders.ByteLevel()
        stream = TextStream(PreTrainedTokenizerFast(tokenizer_object=backend), [])
        assert [stream.push(token) for token in (2, 3, 2, 0)] == ["a", "é", "a", "\ufffda"]

    def test_a_torn_end_is_shown_as_such(self) -> None:
        _, reason, text = run(TEXT_IDS[:6], [6], SamplingParams(stop=("zz",), max_tokens=5), tokenizer=BYTES)
        assert reason is FinishReason.LENGTH and text == "So: \ufffd"
