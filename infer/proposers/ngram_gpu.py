"""N-gram drafts on the device: every place of the text is compared at once, nothing is read on the host.

The request table, to which each step appends what it emitted, is the text that is searched: no copy is kept. All shapes
are fixed, so a step can be recorded. Only known tokens are ever compared or drafted.
"""

import torch
from torch import Tensor

from ..planes import Planes
from .base import DeviceProposer, Drafts, DraftStep, ObservedRows, Released, Requirements
from .ngram_rule import NgramRule


class NgramGpuProposer(DeviceProposer):
    """Drafts by `NgramRule`, in a time that grows with the context's bound and not with what it holds."""

    requirements = Requirements(observes=False)

    def __init__(self, num_draft_tokens: int, rule: NgramRule) -> None:
        self.num_draft_tokens, self.rule = num_draft_tokens, rule

    def bind(self, planes: Planes, num_rows: int) -> None:
        """Nothing is kept."""

    def observe(self, rows: ObservedRows) -> None:
        """Nothing is kept."""

    def propose(self, step: DraftStep) -> Drafts:
        assert step.tokens is not None
        tokens = step.tokens[step.slots]  # [batch, width]
        ends = find_ends(tokens, step.seq_lens, self.rule)
        lengths = torch.where(ends > 0, step.seq_lens - ends, 0)
        lengths = torch.minimum(lengths, step.room.clamp(0, self.num_draft_tokens))
        offsets = torch.arange(self.num_draft_tokens, device=tokens.device)
        places = (ends[:, None] + offsets).clamp(max=tokens.shape[1] - 1)
        ids = torch.where(offsets < lengths[:, None], tokens.gather(1, places).long(), -1)
        return Drafts(ids, lengths, None)

    def release(self, request: Released) -> None:
        """Nothing is kept."""


def find_ends(tokens: Tensor, num_known: Tensor, rule: NgramRule) -> Tensor:
    """Where [batch] int64 the occurrence that is continued ends, so where the draft begins; 0: there is none.

    tokens [batch, width] int32, non-negative where known; num_known [batch] int64.
    """
    width = tokens.shape[1]
    step = torch.arange(rule.max_n, device=tokens.device)
    places = num_known[:, None] - 1 - step
    last = torch.where(places >= 0, tokens.gather(1, places.clamp(min=0)), -2)  # [batch, max_n], the newest first
    padded = torch.nn.functional.pad(tokens, (rule.max_n - 1, 0), value=-1)  # before the text nothing matches
    small = (rule.max_n + 1) * width < 2**31
    place = torch.arange(width, device=tokens.device, dtype=torch.int32 if small else torch.int64)
    alive = (tokens == last[:, :1]) & (place < num_known[:, None] - 1)  # a token must follow
    matched = alive.to(place.dtype)  # [batch, width]; how many tokens up to here are the text's last ones
    for n in range(1, rule.max_n):
        begin = rule.max_n - 1 - n
        alive &= padded[:, begin : begin + width] == last[:, n : n + 1]
        matched += alive
    # the longest first, then by place: one number ranks both
    ranked = matched * width + (place if rule.occurrence == "latest" else width - 1 - place)
    best = torch.where(matched >= rule.min_n, ranked, -1).amax(1).long()
    rest = best % width
    found = rest if rule.occurrence == "latest" else width - 1 - rest
    return torch.where(best >= 0, found + 1, 0)
