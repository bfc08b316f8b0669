"""Every row is kept or counted by reason, and the counts add up to the input."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from spectrain.extract.conversations import BadRow, Conversation, ExactTokens, RowCounts, read_conversations
from spectrain.infer.rows import DataError


def write(folder: Path, rows: list[Any], name: str = "chats.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def message(role: str, content: Any = "a") -> dict[str, Any]:
    return {"role": role, "content": content}


def test_bad_rows_are_counted_by_reason_and_named(tmp_path: Path) -> None:
    rows = [
        {"messages": []},
        {"messages": [message("assistant"), message("user")]},
        {"messages": [message("system")]},
        {"messages": [message("user")]},
        {"messages": [message("user"), message("assistant", None)]},
        {"messages": [message("user"), message("assistant")]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "narrator", "value": "b"}]},
        {"text": "a"},
        ["a"],
        {"messages": [message("user"), message("assistant")], "tools": "none"},
    ]
    path = write(tmp_path, rows)
    found = list(read_conversations([path]))
    assert [row.row for row in found] == list(range(len(rows)))
    assert [row.row for row in found if isinstance(row, Conversation)] == [1, 5]
    counts = RowCounts(kept=2)
    for row in found:
        if isinstance(row, BadRow):
            counts.drop(row)
    assert counts.rows == len(rows)
    assert counts.dropped == Counter(
        {
            "no assistant message": 2,
            "no messages": 1,
            "content is null": 1,
            "unknown role 'narrator'": 1,
            "neither messages nor conversations": 1,
            "the row is not an object": 1,
            "tools are not a list": 1,
        }
    )
    assert counts.sources["no assistant message"] == [f"{path}:3", f"{path}:4"]
    assert counts.lines()[0] == "10 rows: 2 kept, 8 left out"
    assert any(f"1 left out: content is null ({path}:5)" in line for line in counts.lines())


def test_only_the_first_rows_of_a_reason_are_named() -> None:
    counts = RowCounts()
    for number in range(9):
        counts.drop(BadRow(number, f"f:{number}", "content is null"))
    assert counts.lines()[1] == "  9 left out: content is null (f:0, f:1, f:2, f:3, f:4 ...)"


def test_limit_counts_input_rows_over_all_files(tmp_path: Path) -> None:
    good, bad = {"messages": [message("user"), message("assistant")]}, {"messages": []}
    first, second = write(tmp_path, [good, bad], "a.jsonl"), write(tmp_path, [good, good], "b.jsonl")
    found = list(read_conversations([first, second], 3))
    assert [type(row) for row in found] == [Conversation, BadRow, Conversation]
    assert found[2].source == f"{second}:1"


def test_sharegpt_roles_and_both_spellings(tmp_path: Path) -> None:
    speakers = ["system", "human", "gpt", "tool", "gpt"]
    rows = [
        {"conversations": [{"from": speaker, "value": "a"} for speaker in speakers]},
        {"conversations": [message("user"), message("assistant")], "tools": [{"name": "f"}]},
    ]
    first, second = read_conversations([write(tmp_path, rows)])
    assert isinstance(first, Conversation) and isinstance(second, Conversation)
    assert [m["role"] for m in first.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert second.tools == [{"name": "f"}] and first.tools is None


def test_rows_with_the_targets_own_ids(tmp_path: Path) -> None:
    chat = [message("user"), message("assistant")]
    ids = {"messages": chat, "prompt_token_ids": [1, 2], "token_ids": [3]}
    rows = [{**ids, "tokenizer_hash": "h"}, ids, {**ids, "tokenizer_hash": "h", "token_ids": []}]
    exact, plain, bad = read_conversations([write(tmp_path, rows)])
    assert isinstance(exact, Conversation) and exact.exact == ExactTokens([1, 2], [3], "h")
    assert isinstance(plain, Conversation) and plain.exact is None
    assert isinstance(bad, BadRow) and bad.reason == "token_ids are not a list of token ids"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="give --data FILE"):
        list(read_conversations([]))
    path = write(tmp_path, [{"messages": [message("user"), message("assistant")]}])
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DataError, match=r"chats.jsonl:1 is not valid JSON"):
        list(read_conversations([path]))


@pytest.mark.parametrize(
    ("file", "rows"),
    [
        ("chat/oasst_en_paths.jsonl", 564),
        ("chat/taskmaster4.jsonl", 1500),
        ("chat/tau_airline60.jsonl", 60),
        ("chat/sharegpt_gpteacher1000.jsonl", 1000),
        ("odd/conversation.missingturns.json", 1),
    ],
)
def test_real_files_hold_no_bad_row(real_data: Path, file: str, rows: int) -> None:
    found = list(read_conversations([real_data / file]))
    assert len(found) == rows
    bad = [row for row in found if isinstance(row, BadRow)]
    assert not bad
