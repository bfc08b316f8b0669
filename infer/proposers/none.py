"""Plain decoding: the proposer that proposes nothing."""

import torch

from ..planes import Planes
from .base import DeviceProposer, Drafts, DraftStep, ObservedRows, Released, Requirements


class NoneProposer(DeviceProposer):
    """The baseline of every measurement."""

    requirements = Requirements(observes=False)

    def bind(self, planes: Planes, num_rows: int) -> None:
        pass

    def observe(self, rows: ObservedRows) -> None:
        pass

    def propose(self, step: DraftStep) -> Drafts:
        return Drafts(step.last_token_ids[:, None][:, :0], torch.zeros_like(step.seq_lens), None)

    def release(self, request: Released) -> None:
        pass
