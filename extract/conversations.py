"""Reads conversations, OpenAI `messages` or ShareGPT `conversations`, and keeps account of the rows it cannot use.

Does not render or tokenise.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..infer.rows import DataError, Message, RowError, messages_of, read_rows

NAMED_ROWS = 5


@dataclass(frozen=True)
class Conversation:
    """One usable row. `exact` holds ids the target itself wrote, valid for the tokenizer whose hash stands beside."""

    row: int  # index over all input rows, bad ones included
    source: str  # "file:line"
    messages: list[Message]
    tools: list[Any] | None
    exact: "ExactTokens | None" = None


@dataclass(frozen=True)
class ExactTokens:
    """Prompt and answer as ids, from a row that says which tokenizer they belong to."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    tokenizer_hash: str


@dataclass(frozen=True)
class BadRow:
    """A row left out, by reason."""

    row: int
    source: str
    reason: str


@dataclass
class RowCounts:
    """Every input row is either kept or counted under one reason: kept + dropped == rows."""

    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    sources: dict[str, list[str]] = field(default_factory=dict)
    skipped_turns: Counter[str] = field(default_factory=Counter)

    @property
    def rows(self) -> int:
        return self.kept + self.dropped.total()

    def drop(self, bad: BadRow) -> None:
        """Counts a row and remembers the first few of each reason by name."""
        self.dropped[bad.reason] += 1
        named = self.sources.setdefault(bad.reason, [])
        if len(named) < NAMED_ROWS:
            named.append(bad.source)

    def lines(self) -> list[str]:
        """The account, one line a reason, for the terminal."""
        lines = [f"{self.rows} rows: {self.kept} kept, {self.dropped.total()} left out"]
        for reason, count in self.dropped.most_common():
            more = " ..." if count > NAMED_ROWS else ""
            lines.append(f"  {count} left out: {reason} ({', '.join(self.sources[reason])}{more})")
        lines += [f"  {count} assistant turns not supervised: {why}" for why, count in self.skipped_turns.most_common()]
        return lines


def read_conversations(paths: Iterable[Path | str], limit: int | None = None) -> Iterator[Conversation | BadRow]:
    """Yields every row of the files in order, at most `limit`; raises DataError for a file that cannot be read."""
    row = 0
    given = list(paths)
    if not given:
        raise DataError("expected at least one file of conversations, found none; give --data FILE")
    for path in given:
        for source, value in read_rows(Path(path)):
            if limit is not None and row >= limit:
                return
            try:
                yield _conversation(row, source, value)
            except RowError as error:
                yield BadRow(row, source, str(error))
            row += 1


def _conversation(row: int, source: str, value: Any) -> Conversation:
    if not isinstance(value, Mapping):
        raise RowError("the row is not an object")
    messages = messages_of(value)
    if messages is None:
        raise RowError("neither messages nor conversations")
    if not any(message["role"] == "assistant" for message in messages):
        raise RowError("no assistant message")
    tools = value.get("tools") or None
    if tools is not None and not isinstance(tools, list):
        raise RowError("tools are not a list")
    return Conversation(row, source, messages, tools, _exact(value))


def _exact(value: Mapping[str, Any]) -> ExactTokens | None:
    owner = value.get("tokenizer_hash")
    if not isinstance(owner, str):
        return None
    return ExactTokens(_ids(value, "prompt_token_ids"), _ids(value, "token_ids"), owner)


def _ids(value: Mapping[str, Any], key: str) -> list[int]:
    ids = value.get(key)
    if not (isinstance(ids, list) and ids and all(type(i) is int and i >= 0 for i in ids)):
        raise RowError(f"{key} are not a list of token ids")
    return ids
