"""Suffix decoding and a draft head together: each request takes the draft that promises more accepted tokens.

Which one is taken may depend only on what is known before the head draws anything: a choice that looks at drawn tokens
keeps the ones it likes and bends the output's law. A greedy head draws nothing, so its whole chain is weighed; of a
head that samples, the first position's law alone.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...kernels.records import law_columns
from ..planes import Planes
from ..survival import UNKNOWN_CONFIDENCE
from .base import Drafts, DraftStep, ObservedRows, Proposer, Released
from .host import HostStep, padded, upload, upload_rows
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


class HybridProposer(Proposer):
    """The suffix draft where its score exceeds the head's; else the head's draft.

    A score is the number of accepted tokens that a draft promises, times what its source's promises were worth so far.
    The head drafts on the device; the choice is made on the host, where the trees are.
    """

    inner: Proposer

    def __init__(self, suffix: SuffixProposer, head: Proposer, vocab_size: int) -> None:
        self.suffix, self.inner, self.vocab_size = suffix, head, vocab_size
        self.requirements = dataclasses.replace(head.requirements, on_host=True)
        self._columns: Tensor | None = None  # [vocab_size] of the head's laws, -1 for tokens they cannot name
        self._nameable: np.ndarray | None = None
        self._word = _Word.of_nobody(0)

    def bind(self, planes: Planes, num_rows: int) -> None:
        self.suffix.bind(planes, num_rows)
        self.inner.bind(planes, num_rows)
        self._word = _Word.of_nobody(num_rows)

    def observe(self, rows: ObservedRows) -> None:
        """The head does."""

    def propose(self, step: DraftStep) -> Drafts:
        drafts = step.inner
        assert drafts is not None
        packed = _packed(drafts)  # ahead of what the trees wait for, so that they wait for both
        host, found = self.suffix.speculate(step)
        width = max(self.suffix.num_draft_tokens, drafts.token_ids.shape[1])
        suffix, head = self._of_suffix(found, drafts, width), _of_head(drafts, packed, host.room, width)
        chosen = self._choose(host, [draft.is_new for draft in found], suffix, head)
        ids = np.where(chosen[:, None], suffix.token_ids, head.token_ids)
        made = upload(ids, np.where(chosen, suffix.lengths, head.lengths), step)
        if drafts.log_probs is not None:
            laws = self._laws(drafts.log_probs, made.token_ids, upload_rows(chosen, step))
            made = made._replace(log_probs=laws, token_map=drafts.token_map)
        if step.wants_confidence:
            confidence = np.where(chosen[:, None], suffix.confidence, head.confidence)
            made = made._replace(confidence=upload_rows(confidence.astype(np.float32), step))
        return made

    def release(self, request: Released) -> None:
        self.suffix.release(request)
        self.inner.release(request)

    def forget(self) -> None:
        self.suffix.forget()
        self.inner.forget()
        self._word = _Word.of_nobody(len(self._word.promised))

    def _of_suffix(self, found: Sequence[SuffixDraft], drafts: Drafts, width: int) -> _Source:
        """The drafts up to their first token that the head's laws, if it has any, cannot name."""
        ids, lengths = padded([draft.token_ids for draft in found], width)
        if drafts.log_probs is not None and drafts.token_map is not None:
            if self._nameable is None:
                self._columns = law_columns(drafts.token_map, self.vocab_size)
                self._nameable = self._columns.cpu().numpy() >= 0
            named = (ids >= 0) & self._nameable[ids.clip(0)]
            lengths = named.astype(np.int64).cumprod(axis=1).sum(axis=1)
        confidence = confidence_of(found, width)
        return _Source(ids, lengths, confidence, _promised(confidence, lengths))

    def _choose(self, host: HostStep, is_new: Sequence[bool], suffix: _Source, head: _Source) -> np.ndarray:
        """Whether each request takes the suffix draft, [n] bool."""
        word, rows, totals = self._word, host.rows, self._word.totals
        old = ~np.asarray(is_new, dtype=bool) & (word.promised[rows] > 0)
        kept = np.minimum(host.num_known - word.num_known[rows] - 1, word.length[rows]).clip(0)
        totals *= (1 - 1 / MEMORY) ** old.sum()
        np.add.at(totals, word.source[rows[old]], np.stack([kept, word.promised[rows]], axis=1)[old])
        worth = (totals[:, 0] + PRIOR) / (totals[:, 1] + PRIOR)
        chosen = suffix.promised * worth[0] > head.promised * worth[1]
        word.num_known[rows], word.source[rows] = host.num_known, ~chosen
        word.length[rows] = np.where(chosen, suffix.lengths, head.lengths)
        word.promised[rows] = np.where(chosen, suffix.promised, head.promised)
        return chosen

    def _laws(self, log_probs: Tensor, ids: Tensor, chosen: Tensor) -> Tensor:
        """The head's laws, and for requests of a suffix draft the law that puts everything on the token drafted."""
        batch, drawn, vocab = log_probs.shape
        laws = log_probs.new_full((batch, ids.shape[1], vocab), -torch.inf)
        laws[:, :drawn] = torch.where(chosen[:, None, None], -torch.inf, log_probs)
        columns = ids.clamp(min=0) if self._columns is None else self._columns[ids.clamp(min=0)].long().clamp(min=0)
        certain = torch.where(chosen[:, None], 0.0, laws.gather(2, columns[..., None])[..., 0])
        return laws.scatter(2, columns[..., None], certain[..., None])


def _packed(drafts: Drafts) -> Tensor:
    """Lengths, token ids and confidence of a head's drafts side by side [batch, 1 + 2k] float64."""
    confidence = drafts.confidence
    if confidence is None:
        confidence = torch.full(drafts.token_ids.shape, UNKNOWN_CONFIDENCE, device=drafts.token_ids.device)
    return torch.cat([column.double() for column in (drafts.lengths[:, None], drafts.token_ids, confidence)], dim=1)


def _of_head(drafts: Drafts, packed: Tensor, room: np.ndarray, width: int) -> _Source:
    """The head's drafts on the host, for the first requests, as many as `room` [n] has."""
    told, count = packed[: len(room)].cpu().numpy(), drafts.token_ids.shape[1]
    lengths = np.minimum(told[:, 0].astype(np.int64), room)
    ids = _widened(told[:, 1 : 1 + count].astype(np.int64), width, -1)
    of_each = told[:, 1 + count :]
    return _Source(ids, lengths, _widened(of_each, width, 0), _head_promises(drafts, of_each, lengths))


def _head_promises(drafts: Drafts, confidence: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Accepted tokens [n] that the head's drafts promise."""
    if drafts.log_probs is not None and confidence.shape[1]:
        confidence = np.broadcast_to(confidence[:, :1], confidence.shape)
    return _promised(confidence, lengths)


def _promised(confidence: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Accepted tokens [n] to expect of drafts whose tokens are this likely, each given those before it."""
    live = np.arange(confidence.shape[1]) < lengths[:, None]
    return np.where(live, confidence.cumprod(axis=1), 0.0).sum(axis=1)


def _widened(values: np.ndarray, width: int, value: int) -> np.ndarray:
    return np.pad(values, ((0, 0), (0, width - values.shape[1])), constant_values=value)
