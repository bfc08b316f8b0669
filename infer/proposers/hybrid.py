"""Suffix decoding and a draft head together: each request takes the draft that promises more accepted tokens.

Which one is taken may depend only on what is known before the head draws anything: a choice that looks at drawn tokens
keeps the ones it likes and bends the output's law. A greedy head draws nothing, so its whole chain is weighed; of a
head that samples, the first position's law alone.
"""

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.records import law_columns
from ..planes import Planes
from ..survival import UNKNOWN_CONFIDENCE
from .base import Drafts, DraftStep, ObservedRows, Proposer, Released
from .host import upload_ids
from .suffix import SuffixProposer, confidence_of

MEMORY = 256  # drafts that a source's word is judged by
PRIOR = 4.0  # tokens that each source is taken to have promised and kept beforehand


class _Word(NamedTuple):
    """What the last draft of each request promised, by row of the request table, and what promises were worth."""

    num_known: Tensor  # [num_rows] int64
    length: Tensor  # [num_rows] int64
    source: Tensor  # [num_rows] int64; 0 suffix trees, 1 head
    promised: Tensor  # [num_rows] float32
    totals: Tensor  # [2, 2] float32; a source's accepted and promised tokens, older ones faded


class HybridProposer(Proposer):
    """The suffix draft where its score exceeds the head's; else the head's draft.

    A score is the number of accepted tokens that a draft promises, times what its source's promises were worth so far.
    """

    def __init__(self, suffix: SuffixProposer, head: Proposer, vocab_size: int) -> None:
        self.suffix, self.head, self.vocab_size = suffix, head, vocab_size
        self.requirements = dataclasses.replace(head.requirements, on_host=True)
        self._columns: Tensor | None = None
        self._word: _Word | None = None
        self._num_rows = 0

    def bind(self, planes: Planes, num_rows: int) -> None:
        self.suffix.bind(planes, num_rows)
        self.head.bind(planes, num_rows)
        self._num_rows = num_rows

    def observe(self, rows: ObservedRows) -> None:
        if self.head.requirements.observes:
            self.head.observe(rows)

    def propose(self, step: DraftStep) -> Drafts:
        found = self.suffix.speculate(step)
        drafts = self.head.propose(step._replace(wants_confidence=True))
        width = max(self.suffix.num_draft_tokens, drafts.token_ids.shape[1])
        suffix = upload_ids([draft.token_ids for draft in found], step, width)
        given, own = confidence_of(found, step, width), _confidence(drafts)
        if drafts.log_probs is not None and drafts.token_map is not None:
            suffix = self._within(suffix, drafts.token_map)
        promised = torch.stack([_promised(given, suffix.lengths), _head_promises(drafts, own)])
        lengths = torch.stack([suffix.lengths, torch.minimum(drafts.lengths, step.room)])
        chosen = self._choose(step, [draft.is_new for draft in found], promised, lengths)
        ids = torch.where(chosen[:, None], suffix.token_ids, _padded(drafts.token_ids, width, -1))
        return Drafts(
            ids,
            torch.where(chosen, *lengths),
            None if drafts.log_probs is None else self._laws(drafts.log_probs, ids, chosen),
            drafts.token_map,
            torch.where(chosen[:, None], given, _padded(own, width, 0)) if step.wants_confidence else None,
        )

    def release(self, request: Released) -> None:
        self.suffix.release(request)
        self.head.release(request)

    def forget(self) -> None:
        self.suffix.forget()
        self.head.forget()
        self._word = None

    def _choose(self, step: DraftStep, is_new: list[bool], promised: Tensor, lengths: Tensor) -> Tensor:
        """Whether each request takes the suffix draft, [batch] bool; promised and lengths are [2, batch]."""
        if self._word is None:
            none = torch.zeros(self._num_rows, dtype=torch.int64, device=promised.device)
            empty = promised.new_zeros(self._num_rows)
            self._word = _Word(none, none.clone(), none.clone(), empty, promised.new_zeros(2, 2))
        word, rows, totals = self._word, step.slots, self._word.totals
        old = torch.tensor([not new for new in is_new] + [False] * (len(rows) - len(is_new)), device=rows.device)
        old &= word.promised[rows] > 0
        kept = torch.minimum(step.seq_lens - word.num_known[rows] - 1, word.length[rows]).clamp(min=0)
        outcomes = torch.stack([kept.float(), word.promised[rows]], dim=1) * old[:, None]
        totals.mul_((1 - 1 / MEMORY) ** old.sum()).index_add_(0, word.source[rows], outcomes)
        worth = (totals[:, 0] + PRIOR) / (totals[:, 1] + PRIOR)
        scores = promised * worth[:, None]
        chosen = scores[0] > scores[1]
        word.num_known[rows], word.source[rows] = step.seq_lens, (~chosen).long()
        word.length[rows], word.promised[rows] = torch.where(chosen, *lengths), torch.where(chosen, *promised)
        return chosen

    def _within(self, drafts: Drafts, token_map: Tensor) -> Drafts:
        """The drafts up to their first token that a law over the head's vocabulary cannot name."""
        if self._columns is None:
            self._columns = law_columns(token_map, self.vocab_size)
        ids = drafts.token_ids
        named = (ids >= 0) & (self._columns[ids.clamp(min=0)] >= 0)
        return drafts._replace(lengths=named.long().cumprod(dim=1).sum(dim=1))

    def _laws(self, log_probs: Tensor, ids: Tensor, chosen: Tensor) -> Tensor:
        """The head's laws, and for requests of a suffix draft the law that puts everything on the token drafted."""
        batch, drawn, vocab = log_probs.shape
        laws = log_probs.new_full((batch, ids.shape[1], vocab), -torch.inf)
        laws[:, :drawn] = torch.where(chosen[:, None, None], -torch.inf, log_probs)
        columns = ids.clamp(min=0) if self._columns is None else self._columns[ids.clamp(min=0)].long().clamp(min=0)
        certain = torch.where(chosen[:, None], 0.0, laws.gather(2, columns[..., None])[..., 0])
        return laws.scatter(2, columns[..., None], certain[..., None])


def _confidence(drafts: Drafts) -> Tensor:
    """Of each of the head's tokens, [batch, k] float32."""
    if drafts.confidence is not None:
        return drafts.confidence.float()
    return torch.full(drafts.token_ids.shape, UNKNOWN_CONFIDENCE, device=drafts.token_ids.device)


def _head_promises(drafts: Drafts, confidence: Tensor) -> Tensor:
    """Accepted tokens [batch] float32 that the head's draft promises."""
    if drafts.log_probs is not None and confidence.shape[1]:
        confidence = confidence[:, :1].expand_as(confidence)
    return _promised(confidence, drafts.lengths)


def _padded(values: Tensor, width: int, value: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, width - values.shape[1]), value=value)


def _promised(confidence: Tensor, lengths: Tensor) -> Tensor:
    """Accepted tokens [batch] float32 to expect of drafts whose tokens are this likely, each given those before it."""
    live = torch.arange(confidence.shape[1], device=confidence.device) < lengths[:, None]
    return torch.where(live, confidence.cumprod(dim=1), 0.0).sum(dim=1)
