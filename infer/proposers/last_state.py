"""Drafting from nothing but the target's last state and the newest token: one pass of rows a draft, nothing written.

The drafts of a request start from the normed state of its last final row and the token sampled there.
"""

from abc import abstractmethod

import torch
from torch import Tensor

from ...heads.base import DraftHead
from ...heads.target_tensors import TargetTensors
from ..planes import Planes
from .base import Drafts, DraftStep, ObservedRows, Requirements
from .drafting import DraftSampling
from .head import HeadProposer


class LastStateProposer(HeadProposer):
    """Drafts chains of tokens that each depend on the one before."""

    def __init__(
        self, head: DraftHead, target: TargetTensors, num_draft_tokens: int, draft_sampling: DraftSampling = "greedy"
    ) -> None:
        super().__init__(head, target, num_draft_tokens, draft_sampling)
        self.requirements = Requirements(layer_ids=(head.config.target.num_layers,), draft_laws=self.probabilistic)
        self._states: Tensor | None = None  # [num_rows, hidden]; the normed last state, by row of the request table

    def bind(self, planes: Planes, num_rows: int) -> None:
        weight = self.head.output_weight(self.target)
        hidden = self.head.config.target.hidden_size
        self._states = torch.zeros(num_rows, hidden, dtype=weight.dtype, device=weight.device)

    def observe(self, rows: ObservedRows) -> None:
        assert rows.states is not None and self._states is not None
        last = rows.states[rows.last_rows, 0].to(self._states.dtype)
        self._states[rows.slots] = self.target.norm(last)

    def propose(self, step: DraftStep) -> Drafts:
        assert self._states is not None
        room = self._room(step)
        states, newest = self._states[step.slots], step.last_token_ids
        tokens, laws = [], []
        # on a GPU the loop must not wait for the room; on a CPU drafts that nobody has room for cost time
        for k in range(self.num_draft_tokens if room.is_cuda else int(room.max())):
            logits, states = self._advance(step, states, newest, k)
            newest, law = self._draw(logits, step, k)
            tokens.append(newest)
            laws.append(law)
        return self._chain(step, tokens, laws, room)

    def _room(self, step: DraftStep) -> Tensor:
        """Drafts [batch] int64 that each request is given."""
        return step.room.clamp(max=self.num_draft_tokens)

    @abstractmethod
    def _advance(self, step: DraftStep, states: Tensor, newest: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Logits [batch, draft_vocab] of draft k and the states [batch, hidden] that draft k + 1 starts from.

        `newest` [batch] int64 is the token before draft k; nothing is written for requests without room for it.
        """
