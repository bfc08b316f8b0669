"""Which rows are extracted and which shard each belongs to: settled before anything runs.

Shards are filled in input order, so what a shard holds depends on nothing but the data and `shard_tokens`.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..infer.prompts import tokenizer_hash
from ..infer.rows import RowError
from .conversations import BadRow, Conversation, RowCounts, read_conversations
from .masks import ChatMasker, MaskedTokens, exact_tokens


class ExtractionError(ValueError):
    """Extraction cannot start or go on; the message says what was expected, what was found and what to do."""


@dataclass(frozen=True)
class PlannedRow:
    """One row as it will be stored."""

    source_row: int
    source: str
    token_ids: np.ndarray  # [tokens] int32
    loss_mask: np.ndarray  # [tokens] bool


@dataclass(frozen=True)
class Plan:
    """Rows by shard, and the account of the input."""

    shards: tuple[tuple[PlannedRow, ...], ...]
    counts: RowCounts
    on_policy: bool  # whether every answer is kept as the ids the target itself wrote

    @property
    def rows(self) -> list[PlannedRow]:
        return [row for shard in self.shards for row in shard]

    @property
    def tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)

    @property
    def supervised_tokens(self) -> int:
        return sum(int(row.loss_mask.sum()) for row in self.rows)

    def content_hash(self) -> str:
        """SHA-256 over rows, ids, masks and their division into shards."""
        digest = hashlib.sha256()
        for shard in self.shards:
            digest.update(len(shard).to_bytes(8, "little"))
            for row in shard:
                digest.update(np.array([row.source_row, len(row.token_ids)], dtype=np.int64).tobytes())
                digest.update(row.token_ids.tobytes())
                digest.update(row.loss_mask.tobytes())
        return digest.hexdigest()

    def token_counts(self, vocab_size: int) -> np.ndarray:
        """How often each id occurs as a supervised token, [vocab_size] int64."""
        counts = np.zeros(vocab_size, dtype=np.int64)
        for shard in self.shards:
            counts += np.bincount(np.concatenate([row.token_ids[row.loss_mask] for row in shard]), minlength=vocab_size)
        return counts


def plan_extraction(
    paths: Iterable[Path | str],
    tokenizer: Any,
    *,
    shard_tokens: int,
    max_length: int,
    vocab_size: int,
    stop_ids: Iterable[int] = (),
    limit: int | None = None,
    max_tokens: int | None = None,
) -> Plan:
    """Reads, masks and divides the rows; raises ExtractionError where none is left.

    `limit` counts input rows, `max_tokens` stops reading before the row that would pass it.
    """
    reader = _RowReader(tokenizer, frozenset(stop_ids), max_length, vocab_size)
    rows: list[PlannedRow] = []
    total = 0
    for row in read_conversations(paths, limit):
        planned = reader.read(row)
        if planned is None:
            continue
        if max_tokens is not None and total + len(planned.token_ids) > max_tokens:
            reader.counts.kept -= 1
            break
        total += len(planned.token_ids)
        rows.append(planned)
    if not rows:
        account = "; ".join(line.strip() for line in reader.counts.lines())
        raise ExtractionError(
            f"expected at least one row with a supervised token, found none ({account}); correct --data"
        )
    return Plan(tuple(_divide(rows, shard_tokens)), reader.counts, reader.num_exact == len(rows))


class _RowReader:
    """Turns rows into ids and masks and keeps the account."""

    def __init__(self, tokenizer: Any, stop_ids: frozenset[int], max_length: int, vocab_size: int) -> None:
        self.tokenizer, self.stop_ids, self.max_length = tokenizer, stop_ids, max_length
        self.vocab_size = vocab_size
        self.counts = RowCounts()
        self.num_exact = 0
        self._masker: ChatMasker | None = None
        self._hash: str | None = None

    def read(self, row: Conversation | BadRow) -> PlannedRow | None:
        if isinstance(row, BadRow):
            self.counts.drop(row)
            return None
        try:
            tokens, exact = self._tokens(row)
        except RowError as error:
            self.counts.drop(BadRow(row.row, row.source, str(error)))
            return None
        self.counts.kept += 1
        self.counts.skipped_turns.update(tokens.skipped_turns)
        self.num_exact += exact
        return PlannedRow(row.row, row.source, tokens.token_ids, tokens.loss_mask)

    def _tokens(self, row: Conversation) -> tuple[MaskedTokens, bool]:
        exact = row.exact is not None and row.exact.tokenizer_hash == self._own_hash()
        if exact:
            tokens = exact_tokens(row, self.max_length)
        else:
            # made on first need: rows of exact ids want no chat template
            self._masker = self._masker or ChatMasker(self.tokenizer, self.stop_ids)
            tokens = self._masker(row, self.max_length)
        if int(tokens.token_ids.max()) >= self.vocab_size:
            raise RowError(f"a token id beyond the target's vocabulary of {self.vocab_size}")
        return tokens, exact

    def _own_hash(self) -> str:
        if self._hash is None:
            self._hash = tokenizer_hash(self.tokenizer)
        return self._hash


def _divide(rows: Sequence[PlannedRow], shard_tokens: int) -> list[tuple[PlannedRow, ...]]:
    shards: list[tuple[PlannedRow, ...]] = []
    current: list[PlannedRow] = []
    filled = 0
    for row in rows:
        if current and filled + len(row.token_ids) > shard_tokens:
            shards.append(tuple(current))
            current, filled = [], 0
        current.append(row)
        filled += len(row.token_ids)
    if current:
        shards.append(tuple(current))
    return shards
