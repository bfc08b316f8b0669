"""Drafting on the host: what such a proposer is told, and what it says."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..planes import Planes
from ..survival import UNKNOWN_CONFIDENCE
from .base import DeviceProposer, ObservedRows, Proposer, Requirements


class HostDrafts(NamedTuple):
    """Draft tokens of n requests, the first `lengths[i]` of each row."""

    token_ids: np.ndarray  # [n, k] int64 target ids
    lengths: np.ndarray  # [n] int64
    confidence: np.ndarray | None = None  # [n, k] float32, as in `Drafts`; None = not told
    of_inner: np.ndarray | None = None  # [n] bool; drafts that are `inner`'s, under its laws. None: none are


class InnerDrafts(NamedTuple):
    """What another proposer drafted for the n requests of a step, to choose from."""

    token_ids: np.ndarray  # [n, k] int64 target ids
    lengths: np.ndarray  # [n] int64
    confidence: np.ndarray  # [n, k] float64; as in `Drafts`
    drawn: bool  # from laws; otherwise each token is a point mass
    nameable: np.ndarray | None  # [vocab] bool; tokens that its laws can name. None: all

    @classmethod
    def of_host(cls, drafts: HostDrafts) -> "InnerDrafts":
        """The same of one that drafts on the host, whose drafts are point masses."""
        sure = drafts.confidence
        if sure is None:
            sure = np.full(drafts.token_ids.shape, UNKNOWN_CONFIDENCE)
        return cls(drafts.token_ids, drafts.lengths, sure, False, None)


class HostStep(NamedTuple):
    """The n requests to draft for, [n] int64 each, and the texts of all that run."""

    request_ids: list[int]
    rows: np.ndarray  # of the request table, and of `tokens`
    tokens: np.ndarray  # [num_rows, width] int32; a row begins with known tokens, what stands behind them means nothing
    num_known: np.ndarray
    num_before: np.ndarray  # of them, those that an earlier step told; 0: the request is new in its row
    prompt_lens: np.ndarray
    room: np.ndarray  # drafts that still fit the context, the output limit and the blocks
    wants_confidence: bool = False  # whether `HostDrafts.confidence` is of use
    inner: InnerDrafts | None = None


class HostProposer(Proposer):
    """One that drafts on the host, from texts, while the device waits."""

    requirements = Requirements(observes=False, on_host=True)
    inner: DeviceProposer | None = None
    """One that observes in its place and drafts before it, with its confidence told."""

    def bind(self, planes: Planes, num_rows: int) -> None:
        """Nothing is kept on the device."""

    def observe(self, rows: ObservedRows) -> None:
        """Tokens come with the step that drafts."""

    @abstractmethod
    def propose(self, step: HostStep) -> HostDrafts:
        """Drafts at most num_draft_tokens tokens for each request; the engine cuts what there is no room for."""


def ragged(drafts: Sequence[Sequence[int]], width: int) -> HostDrafts:
    """Drafts of different lengths, `width` at most, as point masses; -1 behind them."""
    ids = np.full((len(drafts), width), -1, dtype=np.int64)
    lengths = np.array([len(draft) for draft in drafts], dtype=np.int64)
    for i, draft in enumerate(drafts):
        ids[i, : len(draft)] = draft
    return HostDrafts(ids, lengths)
