"""Exact ids and exact mask positions, for every kind of template."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spectrain.extract.conversations import BadRow, Conversation, ExactTokens, read_conversations
from spectrain.extract.masks import ChatMasker, MaskedTokens, exact_tokens
from spectrain.infer.prompts import load_prompts, render
from spectrain.infer.rows import RowError

WordLevel = Callable[..., Any]
CONV = [("user", "a b"), ("assistant", "c d"), ("user", "e"), ("assistant", "f g h")]
CONV_IDS = [1, 4, 7, 8, 6, 5, 9, 10, 6, 4, 11, 6, 5, 12, 13, 14, 6]
CONV_MASK = [6, 7, 8, 13, 14, 15, 16]


def chat(turns: Sequence[tuple[str, str]], tools: list[Any] | None = None) -> Conversation:
    return Conversation(0, "test:1", [{"role": role, "content": content} for role, content in turns], tools)


def positions(tokens: MaskedTokens) -> list[int]:
    return np.flatnonzero(tokens.loss_mask).tolist()


def supervised(tokenizer: Any, tokens: MaskedTokens) -> str:
    return " ".join(tokenizer.convert_ids_to_tokens(tokens.token_ids[tokens.loss_mask].tolist()))


@pytest.fixture(params=["plain", "marked"])
def template(request: pytest.FixtureRequest, plain_template: str, marked_template: str) -> str:
    return plain_template if request.param == "plain" else marked_template


def test_mask_with_and_without_generation_markers(word_level: WordLevel, template: str) -> None:
    tokens = ChatMasker(word_level(template))(chat(CONV))
    assert tokens.token_ids.tolist() == CONV_IDS  # one <s>: the post-processor's own is not added
    assert positions(tokens) == CONV_MASK
    assert tokens.token_ids.dtype == np.int32 and tokens.loss_mask.dtype == bool


def test_extraction_and_prompts_share_one_rendering(word_level: WordLevel, template: str, tmp_path: Path) -> None:
    tokenizer = word_level(template)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": [{"role": r, "content": c} for r, c in CONV]}) + "\n")
    prompt = load_prompts([path], tokenizer)[0]
    ids = ChatMasker(tokenizer)(chat(CONV)).token_ids.tolist()
    assert list(prompt.token_ids) == ids[: len(prompt.token_ids)] == CONV_IDS[:13]


@pytest.mark.parametrize(
    ("limit", "expected"), [(8, [6, 7]), (15, [6, 7, 8, 13, 14]), (17, CONV_MASK), (99, CONV_MASK)]
)
def test_cut_answers_keep_what_survives(word_level: WordLevel, template: str, limit: int, expected: list[int]) -> None:
    assert positions(ChatMasker(word_level(template))(chat(CONV), limit)) == expected


def test_a_cut_before_the_first_answer_names_its_reason(word_level: WordLevel, template: str) -> None:
    with pytest.raises(RowError, match="no supervised token within --max-length"):
        ChatMasker(word_level(template))(chat(CONV), 6)


@pytest.mark.parametrize("marked", [False, True])
def test_index_zero_is_an_index(word_level: WordLevel, marked: bool) -> None:
    begin, end = ("{% generation %}", "{% endgeneration %}") if marked else ("", "")
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}" + begin + "{{ m.content }}" + end + " {% else %}"
        "{{ m.content }} {% endif %}{% endfor %}"
    )
    turns = [("assistant", "a"), ("user", "b c")]
    tokens = ChatMasker(word_level(template))(chat(turns))
    assert tokens.loss_mask.tolist() == [True, False, False]
    tokens = ChatMasker(word_level(template))(chat([*turns, ("assistant", "d")]))
    assert tokens.loss_mask.tolist() == [True, False, False, True]


def test_dropped_reasoning_keeps_the_mask_on_the_whole_rendering(word_level: WordLevel) -> None:
    template = (
        "<s> {% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}"
        "<a> {{ m.content if loop.index0 == ns.last else m.content.split('think')[-1].strip() }} <e> {% else %}"
        "<u> {{ m.content }} <e> {% endif %}{% endfor %}{% if add_generation_prompt %}<a> {% endif %}"
    )
    tokenizer = word_level(template)
    conversation = chat([("user", "a"), ("assistant", "b think c"), ("user", "d"), ("assistant", "b think c")])
    tokens = ChatMasker(tokenizer)(conversation)
    whole = tokenizer(render(tokenizer, conversation.messages), add_special_tokens=False)["input_ids"]
    assert tokens.token_ids.tolist() == whole
    assert supervised(tokenizer, tokens) == "c <e> b think c <e>"
    assert positions(tokens) == [5, 6, 11, 12, 13, 14]


@pytest.mark.parametrize("marked", [False, True])
def test_tokens_of_the_generation_prompt_are_not_supervised(word_level: WordLevel, marked: bool) -> None:
    begin, end = ("{% generation %}", "{% endgeneration %}") if marked else ("", "")
    template = (
        "<s> {% for m in messages %}{% if m.role == 'assistant' %}<a> "
        + begin
        + "think {{ m.content }} <e> "
        + end
        + ""
        "{% else %}<u> {{ m.content }} <e> {% endif %}{% endfor %}{% if add_generation_prompt %}<a> think {% endif %}"
    )
    tokenizer = word_level(template)
    assert supervised(tokenizer, ChatMasker(tokenizer)(chat([("user", "a"), ("assistant", "c d")]))) == "c d <e>"


def test_a_generation_prompt_the_rendering_does_not_repeat(word_level: WordLevel) -> None:
    template = (
        "<s> {% for m in messages %}{{ '<a>' if m.role == 'assistant' else '<u>' }} {{ m.content }} <e> {% endfor %}"
        "{% if add_generation_prompt %}<a> think {% endif %}"
    )
    tokenizer = word_level(template)
    turns = [("user", "a"), ("assistant", "t h"), ("user", "b"), ("assistant", "c")]
    assert supervised(tokenizer, ChatMasker(tokenizer)(chat(turns))) == "t h <e> c <e>"


def test_a_template_that_strips_content(word_level: WordLevel) -> None:
    template = (
        "<s> {% for m in messages %}{{ '<a>' if m.role == 'assistant' else '<u>' }} {{ m.content | trim }} <e> "
        "{% endfor %}{% if add_generation_prompt %}<a> {% endif %}"
    )
    tokenizer = word_level(template)
    tokens = ChatMasker(tokenizer)(
        chat([("user", " a "), ("assistant", "\n c d \n"), ("user", "b"), ("assistant", " e")])
    )
    assert supervised(tokenizer, tokens) == "c d <e> e <e>"


def test_a_template_without_generation_prompt(word_level: WordLevel) -> None:
    template = "{% for m in messages %}{{ m.content }}{{ ' </s> ' if m.role == 'assistant' else ' <e> ' }}{% endfor %}"
    tokenizer = word_level("<s> " + template)
    tokens = ChatMasker(tokenizer)(chat(CONV))
    assert supervised(tokenizer, tokens) == "c d </s> f g h </s>"


def test_an_end_printed_once_after_the_whole_conversation(word_level: WordLevel) -> None:
    template = (
        "<s> {% for m in messages %}{{ '<a>' if m.role == 'assistant' else '<u>' }} {{ m.content }} <e> {% endfor %}"
        "{{ '<a> ' if add_generation_prompt else '</s>' }}"
    )
    tokenizer = word_level(template)
    assert supervised(tokenizer, ChatMasker(tokenizer, {6})(chat(CONV))) == "c d <e> f g h <e>"


@pytest.mark.parametrize("num_turns", [1, 2, 3, 5])
def test_multi_turn_rows_supervise_what_their_turns_do_alone(
    word_level: WordLevel, template: str, num_turns: int
) -> None:
    masker = ChatMasker(word_level(template))
    turns = [[("user", "a " * n + "b"), ("assistant", "c " * (n + 1) + "d")] for n in range(num_turns)]
    together = masker(chat([message for turn in turns for message in turn]))
    alone = [masker(chat(turn)) for turn in turns]
    assert supervised(masker.tokenizer, together) == " ".join(supervised(masker.tokenizer, one) for one in alone)


def test_an_end_token_equal_to_the_padding_token_is_supervised(word_level: WordLevel, plain_template: str) -> None:
    tokenizer = word_level(plain_template.replace("<e>", "</s>"), pad="</s>")
    tokens = ChatMasker(tokenizer)(chat(CONV))
    assert positions(tokens) == CONV_MASK
    assert (tokens.token_ids[[8, 16]] == 2).all()


def test_answers_that_quote_the_header_or_earlier_text(word_level: WordLevel) -> None:
    template = (
        "<s> {% for m in messages %}{{ '<a>' if m.role == 'assistant' else '<u>' }} {{ m.content | trim }} <e> "
        "{% endfor %}{% if add_generation_prompt %}<a> think {% endif %}"
    )
    tokenizer = word_level(template)
    turns = [("user", "<a> think c"), ("assistant", " c "), ("user", "c <a> think"), ("assistant", "c <a> c")]
    tokens = ChatMasker(tokenizer)(chat(turns))
    assert supervised(tokenizer, tokens) == "c <e> c <a> c <e>"


def test_a_quoted_generation_prompt_is_not_the_header_of_a_rewritten_turn(word_level: WordLevel) -> None:
    template = (
        "<s> {% for m in messages %}{% if m.role == 'assistant' %}<a> {{ m.content if loop.revindex <= 2 else 'z' }} "
        "{% else %}<u> {{ m.content }} {% endif %}<e> {% endfor %}{% if add_generation_prompt %}<a> think {% endif %}"
    )
    tokenizer = word_level(template)
    turns = [("user", "a"), ("assistant", "b"), ("user", "<a> think c"), ("assistant", "c d")]
    assert supervised(tokenizer, ChatMasker(tokenizer)(chat(turns))) == "c d <e>"


def test_markers_hold_only_for_the_rendering_that_is_tokenised(word_level: WordLevel, marked_template: str) -> None:
    tokenizer = word_level(marked_template.replace("<u> ", "<u> {{ m.name }} "))
    conversation = chat(CONV)
    conversation.messages[0]["name"] = None  # one renderer drops it, the other prints None
    assert supervised(tokenizer, ChatMasker(tokenizer)(conversation)) == "c d <e> f g h <e>"


def test_an_answer_printed_elsewhere_too_is_not_located_by_it(word_level: WordLevel) -> None:
    template = "<s> {{ messages[-1].content }} {% for m in messages %}{{ '<a>' if m.role == 'assistant' else '<u>' }} "
    template += "{{ m.content }} <e> {% endfor %}{% if add_generation_prompt %}<a> {% endif %}"
    tokenizer = word_level(template)
    tokens = ChatMasker(tokenizer)(chat(CONV))
    assert supervised(tokenizer, tokens) == "c d <e>"
    assert tokens.skipped_turns == ("its place in the rendered conversation could not be found",)


def test_masks_that_teach_nothing_are_refused(word_level: WordLevel, template: str) -> None:
    with pytest.raises(RowError, match="every token is supervised"):
        ChatMasker(word_level("{% for m in messages %}{{ m.content }} {% endfor %}"))(chat([("assistant", "a b")]))
    if "generation %}" not in template:
        with pytest.raises(RowError, match="no supervised token .empty answer."):
            ChatMasker(word_level(template))(chat([("user", "a"), ("assistant", "")]))


def test_a_template_that_hides_answers_is_refused_by_reason(word_level: WordLevel) -> None:
    template = "<s> {% for m in messages %}{% if m.role != 'assistant' %}{{ m.content }} {% endif %}{% endfor %}"
    with pytest.raises(RowError, match="could not be found"):
        ChatMasker(word_level(template))(chat(CONV))


def test_a_template_that_raises_is_a_bad_row(word_level: WordLevel) -> None:
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('a user speaks first') }}{% endif %}<s>"
    with pytest.raises(RowError, match="chat template refused it: a user speaks first"):
        ChatMasker(word_level(template))(chat([("assistant", "a"), ("user", "b")]))


def test_tokenizers_that_cannot_be_masked_are_refused(word_level: WordLevel) -> None:
    with pytest.raises(ValueError, match="chat template"):
        ChatMasker(word_level(None))


def test_ids_the_target_wrote_are_taken_as_they_are() -> None:
    conversation = Conversation(0, "x:1", [], None, ExactTokens([1, 4, 7], [9, 9, 6], "h"))
    tokens = exact_tokens(conversation, 5)
    assert tokens.token_ids.tolist() == [1, 4, 7, 9, 9]
    assert positions(tokens) == [3, 4]


def real(masker: ChatMasker, path: Path, limit: int) -> list[tuple[Conversation, MaskedTokens]]:
    rows = [row for row in read_conversations([path], limit) if isinstance(row, Conversation)]
    return [(row, masker(row)) for row in rows]


@pytest.mark.parametrize("name", ["oasst_en_paths", "tau_airline60", "sharegpt_gpteacher1000"])
def test_real_conversations_supervise_each_answer_and_its_end(chatml: Any, real_data: Path, name: str) -> None:
    masker = ChatMasker(chatml)
    found = real(masker, real_data / "chat" / f"{name}.jsonl", 25)
    assert len(found) == 25
    for row, tokens in found:
        whole = render(chatml, row.messages)
        assert tokens.token_ids.tolist() == chatml(whole, add_special_tokens=False)["input_ids"]
        answers = [message for message in row.messages if message["role"] == "assistant"]
        pieces = whole.split("<|im_start|>assistant\n")[1:]
        expected = [piece[: piece.index("<|im_end|>")] + "<|im_end|>" for piece in pieces]
        assert len(answers) == len(expected)
        assert chatml.decode(tokens.token_ids[tokens.loss_mask]) == "".join(expected)
        assert not tokens.skipped_turns


def test_markers_and_prefixes_agree_on_real_conversations(chatml: Any, real_data: Path) -> None:
    marked = type(chatml)(tokenizer_object=chatml.backend_tokenizer, eos_token="<|im_end|>", bos_token="<|im_start|>")
    marked.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    path = real_data / "chat" / "oasst_en_paths.jsonl"
    for (_, one), (_, other) in zip(
        real(ChatMasker(chatml), path, 40), real(ChatMasker(marked), path, 40), strict=True
    ):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.loss_mask.tolist() == other.loss_mask.tolist()


def test_stand_in_search_agrees_with_prefixes_on_tool_calls(
    chatml: Any, real_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = real_data / "chat" / "tau_airline60.jsonl"
    by_prefix = real(ChatMasker(chatml), path, 6)

    class Searching(ChatMasker):
        """Never sees a prefix hold, so that every turn takes the search."""

        def _try_render(self, messages: Any, conversation: Conversation, generation: bool = False) -> str:
            text = super()._try_render(messages, conversation, generation)
            return text if len(messages) == len(conversation.messages) or "\ue000" in text else "~" + text

    for (_, one), (_, other) in zip(by_prefix, real(Searching(chatml), path, 6), strict=True):
        assert one.loss_mask.tolist() == other.loss_mask.tolist()


def test_odd_rows_keep_reasons(chatml: Any, real_data: Path) -> None:
    masker = ChatMasker(chatml)
    [(_, empty)] = real(masker, real_data / "odd" / "conversation.missingturns.json", 5)
    assert empty.skipped_turns == ("empty answer",)
    assert empty.loss_mask.any()
    rows = list(read_conversations([real_data / "odd" / "tool_use_conversation.jsonl"]))
    assert rows and not any(isinstance(row, BadRow) for row in rows)
    for row in rows:
        tokens = masker(row)
        text = chatml.decode(tokens.token_ids[tokens.loss_mask])
        assert "search_file" in text and "tool content" not in text


REASONING = (  # thoughts are kept after the last question only
    "{% set ns = namespace(query=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.query = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<|im_start|>"
    "{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.query %}<think>\n"
    "{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content.strip() }}"
    "{% for call in m.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("thinking", [True, False])
def test_reasoning_and_tool_calls_after_the_last_question(chatml: Any, thinking: bool) -> None:
    tokenizer = type(chatml)(tokenizer_object=chatml.backend_tokenizer, eos_token="<|im_end|>")
    header = "assistant\n" if thinking else "assistant\n<think>\n\n</think>\n\n"
    tokenizer.chat_template = REASONING.replace("<|im_start|>assistant\n{% endif", f"<|im_start|>{header}{{% endif")
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "x"}}}
    why = "why" if thinking else ""
    messages = [
        {"role": "user", "content": "how"},
        {"role": "assistant", "content": " that \n", "reasoning_content": "because"},
        {"role": "user", "content": "what"},
        {"role": "assistant", "content": "", "reasoning_content": why, "tool_calls": [call]},
        {"role": "tool", "content": "this"},
        {"role": "assistant", "content": "the answer", "reasoning_content": why},
    ]
    tokens = ChatMasker(tokenizer)(Conversation(0, "x:1", messages, None))
    thought = "<think>\nwhy\n</think>\n\n" if thinking else ""
    expected = [
        "that<|im_end|>",
        thought + '<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call><|im_end|>',
        thought + "the answer<|im_end|>",
    ]
    assert tokenizer.decode(tokens.token_ids[tokens.loss_mask]) == "".join(expected)
    assert not tokens.skipped_turns
