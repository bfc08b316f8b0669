"""Plain decoding: the proposer that proposes nothing."""

import torch

from ..planes import Planes
from .base import Drafts, DraftStep, ObservedRows, Proposer, Requirements


class NoneProposer(Proposer):
    """The baseline of every measurement."""

    requirements = Requirements(observes=False)

    def bind(self, planes: Planes) -> None:
        pass

    def observe(self, rows: ObservedRows) -> None:
        pass

    def propose(self, step: DraftStep) -> Drafts:
        batch = len(step.request_ids)
        return Drafts(torch.empty(batch, 0, dtype=torch.int64), [0] * batch, None)

    def release(self, request_id: int, *, finished: bool) -> None:
        pass
