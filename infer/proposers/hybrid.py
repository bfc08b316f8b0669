"""Suffix decoding and a draft head together: each request takes the draft that promises more accepted tokens.

Which one is taken may depend only on what is known before the head draws anything: a choice that looks at drawn tokens
keeps the ones it likes and bends the output's law. A greedy head draws nothing, so its whole chain is weighed; of a
head that samples, the first position's law alone.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..planes import Planes
from .base import DeviceProposer, Proposer, Released
from .host import HostDrafts, HostProposer, HostStep, InnerDrafts, ragged
from .suffix import SuffixDraft, SuffixProposer, confidence_of

MEMORY = 256  # drafts that a source's word is judged by
PRIOR = 4.0  # tokens that each source is taken to have promised and kept beforehand


class _Source(NamedTuple):
    """What one source drafts for the n requests of a step."""

    token_ids: np.ndarray  # [n, width] int64
    lengths: np.ndarray  # [n] int64
    confidence: np.ndarray  # [n, width]; of each token, given those before it
    promised: np.ndarray  # [n]; accepted tokens to expect


class _Word(NamedTuple):
    """What the last draft of each request promised, by row of the request table, and what promises were worth."""

    num_known: np.ndarray  # [num_rows] int64
    length: np.ndarray  # [num_rows] int64
    source: np.ndarray  # [num_rows] int64; 0 suffix trees, 1 head
    promised: np.ndarray  # [num_rows]
    totals: np.ndarray  # [2, 2]; a source's accepted and promised tokens, older ones faded

    @classmethod
    def of_nobody(cls, num_rows: int) -> "_Word":
        known, length, source = (np.zeros(num_rows, dtype=np.int64) for _ in range(3))
        return cls(known, length, source, np.zeros(num_rows), np.zeros((2, 2)))


class HybridProposer(HostProposer):
    """The suffix draft where its score exceeds the head's; else the head's draft.

    A score is the number of accepted tokens that a draft promises, times what its source's promises were worth so far.
    The head drafts on the device, or on the host as well; the choice is made on the host, where the trees are.
    """

    def __init__(self, suffix: SuffixProposer, head: Proposer) -> None:
        self.suffix, self.head = suffix, head
        self.inner = head if isinstance(head, DeviceProposer) else None
        self.requirements = dataclasses.replace(head.requirements, on_host=True)
        self._word = _Word.of_nobody(0)

    def bind(self, planes: Planes, num_rows: int) -> None:
        self.head.bind(planes, num_rows)
        self._word = _Word.of_nobody(num_rows)

    def propose(self, step: HostStep) -> HostDrafts:
        drafts = step.inner
        if isinstance(self.head, HostProposer):
            drafts = InnerDrafts.of_host(self.head.propose(step))
        assert drafts is not None
        found = self.suffix.speculate(step)
        width = max(self.suffix.num_draft_tokens, drafts.token_ids.shape[1])
        suffix, head = _of_suffix(found, drafts, width), _of_head(drafts, step.room, width)
        chosen = self._choose(step, [draft.is_new for draft in found], suffix, head)
        return HostDrafts(
            np.where(chosen[:, None], suffix.token_ids, head.token_ids),
            np.where(chosen, suffix.lengths, head.lengths),
            np.where(chosen[:, None], suffix.confidence, head.confidence).astype(np.float32),
            ~chosen,
        )

    def release(self, request: Released) -> None:
        self.suffix.release(request)
        self.head.release(request)

    def forget(self) -> None:
        self.suffix.forget()
        self.head.forget()
        self._word = _Word.of_nobody(len(self._word.promised))

    def _choose(self, step: HostStep, is_new: Sequence[bool], suffix: _Source, head: _Source) -> np.ndarray:
        """Whether each request takes the suffix draft, [n] bool."""
        word, rows, totals = self._word, step.rows, self._word.totals
        old = ~np.asarray(is_new, dtype=bool) & (word.promised[rows] > 0)
        kept = np.minimum(step.num_known - word.num_known[rows] - 1, word.length[rows]).clip(0)
        totals *= (1 - 1 / MEMORY) ** old.sum()
        np.add.at(totals, word.source[rows[old]], np.stack([kept, word.promised[rows]], axis=1)[old])
        worth = (totals[:, 0] + PRIOR) / (totals[:, 1] + PRIOR)
        chosen = suffix.promised * worth[0] > head.promised * worth[1]
        word.num_known[rows], word.source[rows] = step.num_known, ~chosen
        word.length[rows] = np.where(chosen, suffix.lengths, head.lengths)
        word.promised[rows] = np.where(chosen, suffix.promised, head.promised)
        return chosen


def _of_suffix(found: Sequence[SuffixDraft], inner: InnerDrafts, width: int) -> _Source:
    """The drafts up to their first token that the head's laws, if it has any, cannot name."""
    ids, lengths, *_ = ragged([draft.token_ids for draft in found], width)
    if inner.nameable is not None:
        named = (ids >= 0) & inner.nameable[ids.clip(0)]
        lengths = named.astype(np.int64).cumprod(axis=1).sum(axis=1)
    confidence = confidence_of(found, width)
    return _Source(ids, lengths, confidence, _promised(confidence, lengths))


def _of_head(inner: InnerDrafts, room: np.ndarray, width: int) -> _Source:
    """The head's drafts, as many as `room` [n] has."""
    lengths, confidence = np.minimum(inner.lengths, room), inner.confidence
    ids = _widened(inner.token_ids, width, -1)
    before = slice(1) if inner.drawn else slice(None)  # what was known before the first draw
    known = np.broadcast_to(confidence[:, before], confidence.shape)
    return _Source(ids, lengths, _widened(confidence, width, 0), _promised(known, lengths))


def _promised(confidence: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Accepted tokens [n] to expect of drafts whose tokens are this likely, each given those before it."""
    live = np.arange(confidence.shape[1]) < lengths[:, None]
    return np.where(live, confidence.cumprod(axis=1), 0.0).sum(axis=1)


def _widened(values: np.ndarray, width: int, value: int) -> np.ndarray:
    return np.pad(values, ((0, 0), (0, width - values.shape[1])), constant_values=value)
