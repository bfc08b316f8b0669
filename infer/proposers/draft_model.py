"""Drafting with a small language model: it reads the target's tokens as they come and goes on writing from the newest.

Row t is token t at position t, as in any language model. The newest token's row is computed beside the observed ones,
so k drafts take k forwards. What a rejected draft wrote is overwritten by the next observation.
"""

import dataclasses

import torch
from torch import Tensor

from ...heads.draft_model import DraftModel, TokenRows
from ...heads.target_tensors import TargetTensors
from ..batch import PackedBatch
from ..planes import Planes
from .appended import append_rows
from .base import DraftStep, ObservedRows
from .drafting import ChainRows, DraftSampling
from .feature import FeatureProposer


class DraftModelProposer(FeatureProposer):
    """Drafts chains; it needs nothing of the target but its tokens."""

    head: DraftModel

    def __init__(
        self, head: DraftModel, target: TargetTensors, num_draft_tokens: int, draft_sampling: DraftSampling = "greedy"
    ) -> None:
        super().__init__(head, target, num_draft_tokens, draft_sampling)
        self.requirements = dataclasses.replace(self.requirements, next_token=0, lookahead=max(num_draft_tokens - 1, 0))
        self._pending: Tensor | None = None  # [num_rows, num_appended, hidden]; states of the rows appended last

    @property
    def num_appended(self) -> int:
        """Rows computed behind a request's observed ones: the newest token's, and placeholders'."""
        return 1

    @property
    def placeholder(self) -> int:
        """The token of every appended row but the first."""
        return 0

    def bind(self, planes: Planes, num_rows: int) -> None:
        super().bind(planes, num_rows)
        self._pending = self._empty_state(num_rows, self.num_appended)

    def observe(self, rows: ObservedRows) -> None:
        assert self._pending is not None
        both = append_rows(rows, self.num_appended, self.planes.block_size, self.placeholder)
        states = self._read(both.batch)
        self._pending[rows.slots] = states[both.first[:, None] + torch.arange(self.num_appended, device=states.device)]

    def _draft(self, step: DraftStep, room: Tensor, count: int) -> tuple[list[Tensor], list[Tensor]]:
        assert self._pending is not None
        states = self._pending[step.slots, 0]
        rows = ChainRows(step, step.seq_lens - 1, room, count, self.planes.block_size)
        tokens, laws = [], []
        for k in range(count):
            if k:
                states = self._read(rows.at(k, tokens[-1]))
            token, law = self._draw(self.head.logits(states, self.target), step, k)
            tokens.append(token)
            laws.append(law)
        return tokens, laws

    def _read(self, batch: PackedBatch) -> Tensor:
        """The states [num_tokens, hidden] after each token of a batch, whose rows are kept for those that follow."""
        embeds = self.head.embed(batch.token_ids, self.target)
        return self.head(TokenRows(embeds, batch.positions), self._attend(batch))
