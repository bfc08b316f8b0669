"""N-gram drafts on the host, through an index that grows with the text: a step costs as much as the tokens it adds.

For each n the index maps an n-gram to where it ended first (or last). It is a hash table that holds positions only: two
n-grams are compared by the tokens themselves. One thread: a step of 64 requests takes some 0.1 ms, which a second
thread makes longer.
"""

import numpy as np
from numba import njit

from ..planes import Planes
from .base import Released
from .host import HostDrafts, HostProposer, HostStep
from .ngram_rule import NgramRule

_MULTIPLIER = 0x5851F42D4C957F2D
_SMALLEST = 64  # places of a new request's table


class NgramProposer(HostProposer):
    """Drafts by `NgramRule`."""

    def __init__(self, num_draft_tokens: int, rule: NgramRule) -> None:
        self.num_draft_tokens, self.rule = num_draft_tokens, rule
        self._index: NgramIndex | None = None

    def bind(self, planes: Planes, num_rows: int) -> None:
        self._index = None
        none = np.zeros(0, dtype=np.int64)
        NgramIndex(1, 1, self.rule).draft(np.zeros((1, 1), dtype=np.int32), none, none, none, none, 1)  # compiles

    def propose(self, step: HostStep) -> HostDrafts:
        if self._index is None:
            self._index = NgramIndex(step.tokens.shape[0], step.tokens.shape[1], self.rule)
        return HostDrafts(
            *self._index.draft(
                step.tokens, step.rows, step.num_known, step.num_before, step.room, self.num_draft_tokens
            )
        )

    def release(self, request: Released) -> None:
        """A row's index is begun anew for the next request in it."""


class NgramIndex:
    """For each row of a token table, where every n-gram of its text ended first, or last."""

    def __init__(self, num_rows: int, width: int, rule: NgramRule) -> None:
        self.rule = rule
        places = max(_SMALLEST, 1 << (2 * width - 1).bit_length())
        # an entry is the row's epoch and a position; of a row, memory is touched as far as its text needs
        self._entries = np.zeros((num_rows, rule.max_n - rule.min_n + 1, places), dtype=np.int64)
        self._epochs = np.zeros(num_rows, dtype=np.int64)
        self._sizes = np.full(num_rows, _SMALLEST, dtype=np.int64)  # places in use, a power of two
        self._indexed = np.zeros(num_rows, dtype=np.int64)  # n-grams that end here or earlier are in

    def draft(
        self,
        tokens: np.ndarray,
        rows: np.ndarray,
        num_known: np.ndarray,
        num_before: np.ndarray,
        room: np.ndarray,
        num_draft_tokens: int,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draft ids [n, num_draft_tokens] int64, -1 beyond their lengths [n] int64, for the texts in `rows` [n].

        tokens [num_rows, width] int32; a row with num_before[i] 0 holds a new text.
        """
        new = rows[num_before == 0]
        self._epochs[new] += 1
        self._sizes[new] = _SMALLEST
        self._indexed[new] = 0
        ids = np.full((len(rows), num_draft_tokens), -1, dtype=np.int64)
        lengths = np.zeros(len(rows), dtype=np.int64)
        state = (self._entries, self._epochs, self._sizes, self._indexed)
        rule = self.rule
        latest = rule.occurrence == "latest"
        _draft(tokens, rows, num_known, room, state, rule.min_n, rule.max_n, latest, ids, lengths)
        return ids, lengths


@njit
def _hashes(text, end, longest, out):
    """Fills out[n] with the hash of the n tokens before `end`."""
    value = 0
    for n in range(1, longest + 1):
        value = (value + text[end - n] + 1) * _MULTIPLIER
        out[n] = value ^ (value >> 29)


@njit
def _find(text, entries, epoch, hashed, mask, n, end):
    """The place of the n-gram that ends at `end`, or the free one where it would stand."""
    place = hashed & mask
    while entries[place] >> 32 == epoch:
        other = entries[place] & 0xFFFFFFFF
        same = True
        for j in range(1, n + 1):
            if text[other - j] != text[end - j]:
                same = False
                break
        if same:
            break
        place = (place + 1) & mask
    return place


@njit
def _draft(tokens, rows, num_known, room, state, min_n, max_n, latest, ids, lengths):
    entries, epochs, sizes, indexed = state
    hashes = np.zeros(max_n + 1, dtype=np.int64)
    for i in range(len(rows)):
        row, known = rows[i], num_known[i]
        text = tokens[row]
        if 2 * known > sizes[row]:
            while 4 * known > sizes[row] and sizes[row] < entries.shape[2]:
                sizes[row] *= 2
            epochs[row] += 1  # whatever stands there is void
            indexed[row] = 0
        epoch, mask = epochs[row], sizes[row] - 1
        # the n-gram that ends the text is what is looked for: it goes in when a token follows it
        for end in range(max(indexed[row] + 1, min_n), known):
            longest = min(max_n, end)
            _hashes(text, end, longest, hashes)
            for n in range(min_n, longest + 1):
                table = entries[row, n - min_n]
                place = _find(text, table, epoch, hashes[n], mask, n, end)
                if latest or table[place] >> 32 != epoch:
                    table[place] = epoch << 32 | end
        indexed[row] = max(indexed[row], known - 1)
        longest = min(max_n, known - 1)
        _hashes(text, known, longest, hashes)
        for n in range(longest, min_n - 1, -1):
            table = entries[row, n - min_n]
            found = table[_find(text, table, epoch, hashes[n], mask, n, known)]
            if found >> 32 == epoch:
                end = found & 0xFFFFFFFF
                lengths[i] = max(0, min(room[i], ids.shape[1], known - end))
                for j in range(lengths[i]):
                    ids[i, j] = text[end + j]
                break
