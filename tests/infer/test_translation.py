"""Text between two tokenizers: nothing is lost on the way, and a text that grows is read as if it were read at once."""

import unicodedata

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import normalizers, pre_tokenizers

from spectrain.infer import translation as translations
from spectrain.infer.proposers.base import ProposerError
from spectrain.infer.token_text import TokenText
from spectrain.infer.translation import Reading, Translation
from spectrain.tests.chats import word_tokenizer
from spectrain.tests.text_tokenizers import LINES, MARKERS, OTHER_LINES, TOKENIZERS

ALL = sorted(TOKENIZERS)
EVERY_BYTE = ["gpt", "llama", "qwen"]
PAIRS = [(a, b) for a in EVERY_BYTE for b in ALL]
TEXTS = {name: TokenText(make(), name) for name, make in TOKENIZERS.items()}

WORDS = st.sampled_from([w for line in [*LINES, *OTHER_LINES] for w in line.split(" ")])
SPACES = st.sampled_from([" ", " ", " ", "  ", "\n", "\n\n", "", "\t", " \n "])
PARTS = st.one_of(
    WORDS, SPACES, st.sampled_from([*MARKERS, "🦊", "東京", "12345", "'re", "<|im_", "end|>"]), st.text(max_size=4)
)
ANY_TEXT = st.lists(PARTS, max_size=40).map("".join)
LONG_TEXT = st.lists(PARTS, min_size=25, max_size=50).map("".join)
PLAIN_TEXT = st.lists(st.tuples(WORDS, st.sampled_from([" ", " ", "\n", ", "])), min_size=1, max_size=30).map(
    lambda pairs: "".join(word + space for word, space in pairs)
)


def pair(target: str, draft: str) -> Translation:
    return Translation(TEXTS[target], TEXTS[draft])


def read(between: Translation, *parts: list[int]) -> Reading:
    reading = Reading(between)
    for part in parts:
        reading.extend(part)
    return reading


@pytest.mark.parametrize("name", EVERY_BYTE)
@given(text=ANY_TEXT)
@settings(max_examples=60, deadline=None)
def test_tokens_joined_are_the_text(name: str, text: str):
    text = unicodedata.normalize("NFC", text) if name == "qwen" else text
    assert TEXTS[name].text(TEXTS[name].encode(text)) == text.encode()


@pytest.mark.parametrize(("target", "draft"), PAIRS)
@example(text="x\n" + " " * 20 + "\nthe end", step=1)
@given(text=LONG_TEXT, step=st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_a_text_that_grows_is_read_as_at_once(target: str, draft: str, text: str, step: int):
    between, ids = pair(target, draft), TEXTS[target].encode(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(translations, "_UNSETTLED_TOKENS", 0)
        grown = Reading(between)
        for begin in range(0, len(ids), step):
            grown.extend(ids[begin : begin + step])
    assert grown.token_ids == read(between, ids).token_ids


@pytest.mark.parametrize(("target", "draft"), PAIRS)
@example(text="東京タワー " * 3, part=0.5)
@example(text="東京タワー" * 9, part=0.8)
@given(text=PLAIN_TEXT, part=st.floats(0.2, 1))
@settings(max_examples=25, deadline=None)
def test_a_draft_is_what_the_targets_tokenizer_makes_of_the_text(target: str, draft: str, text: str, part: float):
    """The draft model writes the rest of a text: the target's own tokens of it, wherever the draft begins."""
    between, ids = pair(target, draft), TEXTS[target].encode(text)
    known = ids[: max(1, int(part * len(ids)))]
    reading = read(between, *([token] for token in known))
    before = TEXTS[target].text(known).removesuffix(reading.pending).decode()
    drafted = TEXTS[draft].encode(text[len(before) :])
    if any(reading.ends(token) for token in drafted):
        return  # unigram does not know every character
    assert reading.continued(drafted) == ids[len(known) :]


@pytest.mark.parametrize("name", ALL)
@given(text=PLAIN_TEXT, data=st.data())
@settings(max_examples=25, deadline=None)
def test_a_tokenizer_with_itself_changes_nothing(name: str, text: str, data):
    tokens = TEXTS[name]
    ids = [*tokens.first_ids, *tokens.encode((" " if tokens.adds_space else "") + text)]
    cut = data.draw(st.integers(len(tokens.first_ids), len(ids)))
    reading = read(pair(name, name), ids[:cut])
    if not reading.pending:
        assert reading.token_ids == ids[:cut] or tokens.encode(tokens.text(ids[:cut]).decode()) != ids[:cut]
        assert reading.continued(ids[cut:]) == ids[cut:]


@pytest.mark.parametrize("draft", EVERY_BYTE)
def test_a_character_that_the_text_ends_within_is_drafted_to_its_end(draft: str):
    """The target ends within a fox of four bytes: the draft model has not read it and must write it as a whole."""
    between = pair("qwen", draft)
    fox = TEXTS["qwen"].encode("a 🦊")
    assert len(fox) > 3, "the fox must be several tokens"
    reading = read(between, fox[:-1])
    assert reading.pending and "🦊".encode().startswith(reading.pending)
    written: list[int] = []
    for token in TEXTS[draft].encode("🦊"):
        allowed = reading.allowed(written)
        assert allowed is not None and token in allowed
        kept = {TEXTS[draft].piece(i) for i in allowed}
        missing = reading.pending[len(TEXTS[draft].text(written)) :]
        assert all(piece.startswith(missing) or missing.startswith(piece) for piece in kept)
        written.append(token)
        if len(TEXTS[draft].text(written)) >= len(reading.pending):
            break
    assert reading.allowed(written) is None
    assert reading.continued(TEXTS[draft].encode("🦊")) == fox[-1:]
    assert reading.continued(TEXTS[draft].encode("🐕")) == [], "another character than the one begun"
    assert reading.continued(TEXTS[draft].encode("东")) == []


def test_special_tokens_go_by_content_then_by_role_then_as_text():
    gpt, qwen, llama = (TEXTS[name] for name in ("gpt", "qwen", "llama"))
    markers = {content: i for i, content in gpt.specials.items()}
    reading = read(pair("gpt", "qwen"), [markers["<|im_start|>"], *gpt.encode("user\nhi"), markers["<|im_end|>"]])
    ends = next(i for i, content in qwen.specials.items() if content == "<|eot|>")
    assert reading.token_ids == [*qwen.first_ids, *qwen.encode("<|im_start|>user\nhi"), ends]
    # the draft model's end is the target's; its beginning stands for nothing that the target could say
    assert reading.continued([ends]) == [markers["<|im_end|>"]]
    assert reading.ends(qwen.first_ids[0]) and not reading.ends(ends)
    # the target's own beginning is not read twice
    same = read(pair("llama", "qwen"), [*llama.first_ids, *llama.encode(" the sum")])
    assert same.token_ids == [*qwen.first_ids, *qwen.encode("the sum")]


def test_a_character_that_a_special_token_cuts_off_is_read_as_one_that_is_lost():
    gpt, qwen = TEXTS["gpt"], TEXTS["qwen"]
    end = next(i for i, content in gpt.specials.items() if content == "<|im_end|>")
    reading = read(pair("gpt", "qwen"), [*gpt.encode("a"), *(i for i, p in gpt._pieces.items() if p == b"\xc3"), end])
    assert reading.pending == b""
    ends = next(i for i, content in qwen.specials.items() if content == "<|eot|>")
    assert reading.token_ids == [*qwen.first_ids, *qwen.encode("a\ufffd"), ends]


@pytest.mark.parametrize("name", ALL)
def test_most_of_a_long_text_is_settled_and_not_cut_again(name: str):
    text = " ".join(OTHER_LINES[:3])
    found = TEXTS[name].encode_settled(text)
    assert len(text) - found.settled_chars < len(text) / 2
    settled, rest = text[: found.settled_chars], text[found.settled_chars :]
    assert TEXTS[name].encode(settled) + TEXTS[name].encode(rest) == found.token_ids


def test_a_byte_level_tokenizer_may_put_a_space_before_a_text():
    made = TOKENIZERS["gpt"].__wrapped__()
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    spaced, qwen = TokenText(made, "spaced"), TEXTS["qwen"]
    assert spaced.adds_space and made("the sum")["input_ids"] == spaced.encode(" the sum")
    assert read(Translation(qwen, spaced), qwen.encode("the sum")).token_ids == spaced.encode(" the sum")


def test_the_space_before_a_text_is_the_tokenizers_and_not_the_texts():
    llama, qwen = TEXTS["llama"], TEXTS["qwen"]
    assert llama.adds_space and TEXTS["unigram"].adds_space and not qwen.adds_space
    assert read(pair("qwen", "llama"), qwen.encode("the sum")).token_ids[1:] == llama.encode(" the sum")
    # a text that has not begun: a draft begins it as each of the two does
    empty = read(pair("llama", "qwen"), llama.first_ids)
    assert empty.continued(qwen.encode("the sum")) == llama.encode(" the sum")
    empty = read(pair("qwen", "llama"), qwen.first_ids)
    assert empty.continued(llama.encode(" the sum")) == qwen.encode("the sum")


def test_what_stands_before_decides_how_a_draft_is_cut():
    """Known "th" and drafted "e": the target's tokenizer has "the", but "th" stands; what follows is cut by itself."""
    gpt = TEXTS["gpt"]
    between = pair("gpt", "qwen")
    merged = gpt.encode("and the")
    assert gpt.text(merged[-1:]) == b" the"
    known = [*merged[:-1], *(gpt.encode(c)[0] for c in " th")]
    assert read(between, known).continued(TEXTS["qwen"].encode("e fox")) == [*gpt.encode("e"), *gpt.encode(" fox")]


def test_a_draft_is_cut_behind_about_half_of_the_known_tokens_from_a_word_on(monkeypatch: pytest.MonkeyPatch):
    """All 16 known tokens may begin within a word, and the last word alone says little of how its text was cut."""
    gpt, encoded = TEXTS["gpt"], []
    fox = gpt.encode(" fox")
    assert [gpt.piece(token) for token in fox] == [b" ", b"fo", b"x"], "the middle of the known tokens lies within it"
    known = gpt.encode(" the" * 6 + " fox" + " the" * 7)
    assert len(known) == translations.KNOWN_TOKENS and known[6:9] == fox
    reading, drafted = read(pair("gpt", "qwen"), gpt.encode(" the sum") + known), TEXTS["qwen"].encode(" the")
    encode = TokenText.encode
    monkeypatch.setattr(TokenText, "encode", lambda self, text: encoded.append(text) or encode(self, text))
    reading.continued(drafted)
    assert encoded == [" fox" + " the" * 8]


@pytest.mark.parametrize("draft", ALL)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_tokens_at_all_are_read_and_continued(draft: str, data):
    """A random model says anything: halves of characters, markers amid text, rows of padding that are no token."""
    between = pair("gpt", draft)
    reading = Reading(between)
    for _ in range(3):
        reading.extend(data.draw(st.lists(st.integers(0, 400), max_size=12)))
        drafted = data.draw(st.lists(st.integers(0, TEXTS[draft].num_ids - 1), max_size=5))
        found = reading.continued([token for token in drafted if not reading.ends(token)])
        assert all(0 <= token < TEXTS["gpt"].num_ids for token in found)


class Slow:
    """A tokenizer of Python code."""

    bos_token_id = None


def test_tokenizers_that_do_not_serve_are_refused_in_one_line():
    with pytest.raises(ProposerError, match="fast tokenizer, found Slow in small; convert it to tokenizer.json"):
        TokenText(Slow(), "small")
    with pytest.raises(ProposerError, match="found one in small that decodes with nothing"):
        TokenText(word_tokenizer(None), "small")
    lower = TOKENIZERS["gpt"].__wrapped__()
    lower.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(ProposerError, match="found that of small to make 'some words of text' of 'some Words of text'"):
        TokenText(lower, "small")
