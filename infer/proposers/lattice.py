"""A block's candidates as a lattice: each slot's own scores, a score between neighbours, and a walk from left to right.

How pairs are scored is the caller's: a bias of low rank here, whatever else relates two neighbouring candidates there.
The walk keeps the law that each token was drawn from, given those before it, which is what verification needs.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .base import DraftStep
from .drafting import draw


class Lattice(NamedTuple):
    """The candidates of each slot."""

    token_ids: Tensor | None  # [batch, slots, candidates] int64; None: the whole vocabulary, in order
    scores: Tensor  # [batch, slots, candidates] float32; of each candidate by itself


class Previous(NamedTuple):
    """What was drawn in the slot before; the newest known token before the first."""

    token_ids: Tensor  # [batch] int64
    candidate: Tensor  # [batch] int64 index among that slot's candidates; 0 before the first


class Path(NamedTuple):
    """One token a slot, and the law each was drawn from given those before it."""

    token_ids: Tensor  # [batch, slots] int64
    previous: Tensor  # [batch, slots] int64; the token before each
    laws: Tensor  # [batch, slots, candidates]; means nothing where drafts are not probabilistic


PairScore = Callable[[int, Previous], Tensor]
"""`score(slot, previous) -> [batch, candidates]`: added to the slot's own scores behind `previous`."""


def top_candidates(logits: Tensor, num_candidates: int | None) -> Lattice:
    """The best candidates of each slot by logits [batch, slots, vocab]; None keeps all."""
    if num_candidates is None or num_candidates >= logits.shape[-1]:
        return Lattice(None, logits)
    best = logits.topk(num_candidates, dim=-1)
    return Lattice(best.indices, best.values)


def walk(lattice: Lattice, score: PairScore, step: DraftStep, num_draft_tokens: int, probabilistic: bool) -> Path:
    """Draws every slot in turn: the best candidate, or one of the law at the request's temperature."""
    previous = Previous(step.last_token_ids, torch.zeros_like(step.last_token_ids))
    tokens, before, laws = [], [], []
    for slot in range(lattice.scores.shape[1]):
        scores = lattice.scores[:, slot] + score(slot, previous)
        index, law = draw(scores, step, slot, num_draft_tokens, None, probabilistic)
        before.append(previous.token_ids)
        ids = index if lattice.token_ids is None else lattice.token_ids[:, slot].gather(1, index[:, None])[:, 0]
        previous = Previous(ids, index)
        tokens.append(ids)
        laws.append(law)
    return Path(torch.stack(tokens, dim=1), torch.stack(before, dim=1), torch.stack(laws, dim=1))


def law_over_vocabulary(lattice: Lattice, laws: Tensor, vocab_size: int) -> Tensor:
    """Log-probabilities [batch, slots, vocab] of laws over candidates; minus infinity where there is no candidate."""
    if lattice.token_ids is None:
        return laws
    return laws.new_full((*laws.shape[:2], vocab_size), -torch.inf).scatter_(2, lattice.token_ids, laws)
