"""Drafting with a small language model: it reads the target's tokens as they come and goes on writing from the newest.

Row t is token t at position t, as in any language model. The newest token's row is computed beside the observed ones,
so k drafts take k forwards. What a rejected draft wrote is overwritten by the next observation.
"""

import torch
from torch import Tensor

from ...heads.draft_model import DraftModel, TokenRows
from ...heads.target_tensors import TargetTensors
from ..attention import PagedAttend
from ..batch import PackedBatch
from ..planes import Planes, PlaneSpec
from .appended import append_rows
from .base import Drafts, DraftStep, ObservedRows, Proposer, Released, Requirements
from .drafting import DraftSampling, chain, chain_rows, draw


class DraftModelProposer(Proposer):
    """Drafts chains; greedy drafts are point masses, probabilistic ones carry their law."""

    def __init__(
        self, head: DraftModel, target: TargetTensors, num_draft_tokens: int, draft_sampling: DraftSampling = "greedy"
    ) -> None:
        config = head.config
        self.head, self.target = head.eval(), target
        self.num_draft_tokens = num_draft_tokens
        self.probabilistic = draft_sampling == "probabilistic"
        self.plane_names = [f"draft.{i}" for i in range(config.num_layers)]
        self.dtype = head.model.norm.weight.dtype
        self.requirements = Requirements(
            planes=tuple(
                PlaneSpec(name, config.num_kv_heads, config.head_dim, config.head_dim, self.dtype)
                for name in self.plane_names
            ),
            lookahead=max(num_draft_tokens - 1, 0),
            draft_laws=self.probabilistic,
        )
        self._planes: Planes | None = None
        self._pending: Tensor | None = None  # [num_rows, num_appended, hidden]; states of the rows appended last

    @property
    def num_appended(self) -> int:
        """Rows computed behind a request's observed ones."""
        return 1

    @property
    def placeholder(self) -> int:
        """The token of every appended row but the first."""
        return 0

    def bind(self, planes: Planes, num_rows: int) -> None:
        config, device = self.head.config, self.head.model.norm.weight.device
        self._planes = planes
        self._pending = torch.zeros(num_rows, self.num_appended, config.hidden_size, dtype=self.dtype, device=device)

    def observe(self, rows: ObservedRows) -> None:
        assert self._planes is not None and self._pending is not None
        appended = append_rows(rows, self.num_appended, self._planes.block_size, self.placeholder)
        states = self._forward(appended.batch)
        offsets = torch.arange(self.num_appended, device=states.device)
        self._pending[rows.slots] = states[appended.first[:, None] + offsets]

    def propose(self, step: DraftStep) -> Drafts:
        assert self._planes is not None and self._pending is not None
        room = self.room(step)
        states = self._pending[step.slots, 0]
        tokens, laws = [], []
        # on a GPU the loop must not wait for the room; on a CPU drafts that nobody has room for cost time
        for k in range(self.num_draft_tokens if room.is_cuda else int(room.max())):
            if k:
                positions = step.seq_lens + k - 1
                states = self._forward(chain_rows(step, tokens[-1], positions, room > k, self._planes.block_size))
            token, law = self._draw(self.head.logits(states, self.target), step, k)
            tokens.append(token)
            laws.append(law)
        return chain(step, tokens, laws, room, None, self.probabilistic)

    def room(self, step: DraftStep) -> Tensor:
        """Drafts [batch] int64 that fit; past the positions the head was made for it drafts nothing."""
        reach = (self.head.config.max_position_embeddings - step.seq_lens + 1).clamp(min=0)
        return torch.minimum(step.room, reach).clamp(max=self.num_draft_tokens)

    def release(self, request: Released) -> None:
        """Nothing is kept by request: a table row is written again before it is read for another one."""

    def _forward(self, batch: PackedBatch) -> Tensor:
        assert self._planes is not None
        embeds = self.head.embed(batch.token_ids, self.target)
        return self.head(TokenRows(embeds, batch.positions), PagedAttend(self._planes, self.plane_names, batch))

    def _draw(self, logits: Tensor, step: DraftStep, k: int) -> tuple[Tensor, Tensor]:
        return draw(logits, step, k, self.num_draft_tokens, None, self.probabilistic)
