"""Prompt files of every shape, rendered once and tokenised without a second set of special tokens."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from spectrain.infer.prompts import (
    encode_rendered,
    has_template,
    load_prompts,
    render,
    template_hash,
    tokenizer_hash,
)
from spectrain.infer.rows import DataError, RowError, normalise_messages, read_rows

WORDS = ["<pad>", "<s>", "</s>", "<unk>", "<u>", "<a>", "<e>", *"abcdefghijklmnopqrstuvwxyz"]
TEMPLATE = (
    "<s> {% for tool in tools or [] %}{{ tool.name }} {% endfor %}{% for m in messages %}"
    "{{ '<a>' if m.role == 'assistant' else '<u>' }} {{ m.content }} <e> {% endfor %}"
    "{% if add_generation_prompt %}<a> {% endif %}"
)


def word_level(template: str | None = TEMPLATE, words: list[str] = WORDS) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return word_level()


def write(folder: Path, *rows: Any, name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a b", "task_id": "HumanEval/0", "test": "x"},
        {"question": "a b", "answer": "c"},
        {"problem": "a b", "solution": "c"},
        {"turns": ["a b", "c"], "category": "writing"},
        {"messages": [{"role": "user", "content": "a b"}]},
        {"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]},
        {"conversations": [{"from": "human", "value": "a b"}, {"from": "gpt", "value": "c"}]},
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": "a b"}]}]},
        {"prompt_token_ids": [1, 4, 7, 8, 6, 5]},
    ],
    ids=lambda row: next(iter(row)),
)
def test_every_row_shape_is_one_user_message(tokenizer: Any, tmp_path: Path, row: dict[str, Any]) -> None:
    [prompt] = load_prompts([write(tmp_path, row)], tokenizer)
    assert prompt.token_ids == (1, 4, 7, 8, 6, 5)  # one <s>, the header of the answer last
    assert prompt.text == (None if "prompt_token_ids" in row else "<s> <u> a b <e> <a> ")
    assert prompt.index == 0 and prompt.source == f"{tmp_path / 'rows.jsonl'}:1"


def test_only_trailing_answers_are_dropped(tokenizer: Any, tmp_path: Path) -> None:
    roles = ["user", "assistant", "user", "assistant", "assistant"]
    row = {"messages": [{"role": role, "content": letter} for role, letter in zip(roles, "abcde", strict=True)]}
    [prompt] = load_prompts([write(tmp_path, row)], tokenizer)
    assert prompt.text == "<s> <u> a <e> <a> b <e> <u> c <e> <a> "


def test_turns_and_limit(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path, {"turns": ["a", "b", "c"]}, {"turns": ["d", "e"]})
    assert [p.text for p in load_prompts([path], tokenizer)] == ["<s> <u> a <e> <a> ", "<s> <u> d <e> <a> "]
    every = load_prompts([path, path], tokenizer, all_turns=True, limit=7)
    assert [p.token_ids[2] - 7 for p in every] == [0, 1, 2, 3, 4, 0, 1]
    assert [p.index for p in every] == list(range(7))
    assert every[1].source.endswith("rows.jsonl:1#1")


def test_tools_reach_the_template(tokenizer: Any, tmp_path: Path) -> None:
    [prompt] = load_prompts([write(tmp_path, {"prompt": "a", "tools": [{"name": "z"}]})], tokenizer)
    assert prompt.text == "<s> z <u> a <e> <a> "


@pytest.mark.parametrize("raw", [False, True])
def test_raw_text_gets_the_tokenizers_own_special_tokens(tmp_path: Path, raw: bool) -> None:
    tokenizer = word_level(TEMPLATE if raw else None)
    rows = [{"prompt": "a b"}, {"messages": [{"role": "system", "content": "c"}, {"role": "user", "content": "d"}]}]
    prompts = load_prompts([write(tmp_path, *rows)], tokenizer, raw=raw)
    assert [p.token_ids for p in prompts] == [(1, 7, 8), (1, 9, 10)]
    assert prompts[1].text == "c\nd"


def test_compressed_array_and_single_documents(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "b.json").write_text(json.dumps(rows[0], indent=1))
    (tmp_path / "lines.json").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "array.jsonl").write_text(json.dumps(rows))
    with gzip.open(tmp_path / "c.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write("\n\n".join(map(json.dumps, rows)))
    counts = {
        name: [p.source.removeprefix(str(tmp_path / name)) for p in load_prompts([tmp_path / name], tokenizer)]
        for name in ("a.json", "b.json", "lines.json", "array.jsonl", "c.jsonl.gz")
    }
    assert counts == {
        "a.json": ["[0]", "[1]"],
        "b.json": [":1"],
        "lines.json": [":1", ":2"],
        "array.jsonl": ["[0]", "[1]"],
        "c.jsonl.gz": [":1", ":3"],
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "a"}\n{"prompt": "b', r"rows.jsonl:2 is not valid JSON .* truncated"),
        (b'{"prompt": "a"}\n{"prompt": "\xff"}\n', r"rows.jsonl:2 is not UTF-8 \(byte 0xff\)"),
        (b'{"prompt": "a"}\n{"text": "b"}\n', r"rows.jsonl:2: expected one of prompt, messages.* found text"),
        (b'{"prompt": "a"}\n["b"]\n', r"rows.jsonl:2: expected an object with a prompt, found list"),
        (b'[{"prompt": "a"}, {"prompt"', r"rows.jsonl:1 is not valid JSON"),
        (b'{"turns": []}', r"rows.jsonl:1: turns are not a list of texts"),
        (b'{"messages": [{"role": "assistant", "content": "x"}]}', r"rows.jsonl:1: no message but the assistant's own"),
        (b'{"messages": [{"role": "robot", "content": "x"}]}', r"rows.jsonl:1: unknown role 'robot'"),
        (b'{"prompt_token_ids": ["a"]}', r"rows.jsonl:1: prompt_token_ids are not a list of token ids"),
        (b"", r"expected at least one row in .*rows.jsonl, found an empty file"),
        (b"\n \n", r"expected at least one row in .*rows.jsonl"),
    ],
)
def test_bad_files_name_file_and_line(tokenizer: Any, tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        load_prompts([tmp_path / "rows.jsonl"], tokenizer)
    assert "\n" not in str(error.value)


def test_missing_and_damaged_files(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="absent.jsonl, found none"):
        load_prompts([tmp_path / "absent.jsonl"], tokenizer)
    with pytest.raises(DataError, match="at least one prompt, found none"):
        load_prompts([], tokenizer)
    damaged = tmp_path / "cut.jsonl.gz"
    damaged.write_bytes(gzip.compress(b'{"prompt": "a"}\n' * 500)[:-9])
    with pytest.raises(DataError, match=r"cut.jsonl.gz:\d+ cannot be read"):
        load_prompts([damaged], tokenizer)
    damaged.write_bytes(b"plain text")
    with pytest.raises(DataError, match=r"cut.jsonl.gz cannot be read"):
        load_prompts([damaged], tokenizer)


def test_a_template_that_refuses_names_the_row(tmp_path: Path) -> None:
    tokenizer = word_level("{{ raise_exception('users only') }}")
    with pytest.raises(DataError, match=r"rows.jsonl:1: the chat template refused it: users only"):
        load_prompts([write(tmp_path, {"prompt": "a"})], tokenizer)


def test_tool_calls_reach_templates_as_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    odd = {"id": "2", "type": "function", "function": {"name": "g", "arguments": "{not json"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call, odd], "reasoning_content": "why"}
    [out] = normalise_messages([message])
    assert out["content"] == "" and out["reasoning_content"] == "why"
    assert [c["function"]["arguments"] for c in out["tool_calls"]] == [{"x": 1}, "{not json"]
    assert call["function"]["arguments"] == '{"x": 1}'  # the caller's row is left alone
    [sharegpt] = normalise_messages([{"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'}])
    assert sharegpt["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "no messages"),
        ("hello", "messages are not a list"),
        (["hello"], "a message is not an object"),
        ([{"role": "user", "content": None}], "content is null"),
        ([{"role": "user"}], "content is null"),
        ([{"role": "user", "content": 3}], "content is not text"),
        ([{"role": "user", "content": [{"type": "image"}]}], "content holds something other than text"),
        ([{"from": "narrator", "value": "x"}], "unknown role 'narrator'"),
        ([{"content": "x"}], "unknown role None"),
        ([{"role": "assistant", "tool_calls": [{"id": 1}]}], "a tool call has no function name"),
        ([{"from": "function_call", "value": "f(x)"}], "a function_call is not JSON"),
    ],
)
def test_unusable_messages_have_a_reason(messages: Any, reason: str) -> None:
    with pytest.raises(RowError) as error:
        normalise_messages(messages)
    assert str(error.value) == reason


def test_hashes_follow_what_changes_the_ids(tokenizer: Any) -> None:
    swapped = [*WORDS[:7], "b", "a", *WORDS[9:]]
    assert template_hash(tokenizer) == template_hash(word_level())
    assert template_hash(tokenizer) != template_hash(word_level(TEMPLATE + " "))
    assert template_hash(word_level(None)) == "none" and not has_template(word_level(None))
    assert tokenizer_hash(tokenizer) != tokenizer_hash(word_level(words=swapped))
    before = tokenizer_hash(tokenizer)
    tokenizer(["a b", "a"], padding=False, truncation=True, max_length=2)
    assert tokenizer_hash(tokenizer) == before == tokenizer_hash(word_level(None))


def test_rows_without_a_prompt_can_be_skipped_by_reason(tokenizer: Any, tmp_path: Path) -> None:
    skipped: list[tuple[str, str]] = []
    path = write(tmp_path, {"messages": []}, {"prompt": "a"}, {"messages": [{"role": "user", "content": None}]})
    [prompt] = load_prompts([path], tokenizer, skip=lambda source, reason: skipped.append((source, reason)))
    assert prompt.messages == ({"role": "user", "content": "a"},) and prompt.index == 0
    assert skipped == [(f"{path}:1", "no messages"), (f"{path}:3", "content is null")]


def test_encoding_rendered_text_adds_nothing(tokenizer: Any) -> None:
    text = render(tokenizer, [{"role": "user", "content": "a"}], add_generation_prompt=True)
    assert encode_rendered(tokenizer, text) == [1, 4, 7, 6, 5]


def test_real_prompt_files(tmp_path: Path) -> None:
    default = Path(__file__).resolve().parents[2].parent / "shared" / "data"
    folder = Path(os.environ.get("SPECTRAIN_TEST_DATA", default)) / "prompts"
    if not folder.is_dir():
        pytest.skip(f"no test data at {folder}")
    counts = {path.name: len(load_prompts([path], word_level())) for path in sorted(folder.iterdir())}
    assert counts == {
        "HumanEval.jsonl.gz": 164,
        "gsm8k_test200.jsonl": 200,
        "gsm8k_train1500.jsonl": 1500,
        "math500.jsonl": 500,
        "mt_bench.jsonl": 80,
        "spec_bench.jsonl": 480,
    }
    assert len(load_prompts([folder / "mt_bench.jsonl"], word_level(), all_turns=True)) == 160
    assert len(list(read_rows(folder / "HumanEval.jsonl.gz"))) == 164
