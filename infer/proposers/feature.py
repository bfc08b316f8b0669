"""Drafting from the target's states: what heads share that run decoder layers over the target's rows as they come.

Row t pairs the state at t with the token at t + 1 and stands at position t, as in training. Draft rows write past the
observed rows into slots that the next observation overwrites, so a rejected draft leaves nothing behind.
"""

from abc import abstractmethod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ...heads.base import DraftOutput, DraftRows
from ...heads.decoder import DecoderHead
from ...heads.target_tensors import TargetTensors
from ...kernels.dispatch import sample
from ...kernels.records import Stream
from ..attention import PagedAttend
from ..batch import PackedBatch
from ..planes import Planes, PlaneSpec
from .base import Drafts, DraftStep, ObservedRows, Proposer, Released, Requirements

DraftSampling = Literal["greedy", "probabilistic"]


class _Pending(NamedTuple):
    """What the next draft of each request starts from, by row of the request table."""

    logits_states: Tensor  # [num_rows, hidden]
    feedback: Tensor  # [num_rows, hidden]


class FeatureProposer(Proposer):
    """Observes rows with the head's layers; subclasses draft from the last one.

    Greedy drafts are point masses, probabilistic ones carry their law.
    """

    def __init__(
        self, head: DecoderHead, target: TargetTensors, num_draft_tokens: int, draft_sampling: DraftSampling = "greedy"
    ) -> None:
        config = head.config
        self.head, self.target = head.eval(), target
        self.num_draft_tokens = num_draft_tokens
        self.probabilistic = draft_sampling == "probabilistic"
        self.token_map = head.draft_to_target()
        self.plane_names = [f"draft.{i}" for i in range(config.num_layers)]
        self.requirements = Requirements(
            layer_ids=config.layer_ids,
            planes=tuple(
                PlaneSpec(name, config.num_kv_heads, config.head_dim, config.head_dim, head.dtype)
                for name in self.plane_names
            ),
            next_token=True,
            lookahead=max(num_draft_tokens - 2, 0),
            draft_laws=self.probabilistic,
        )
        self._planes: Planes | None = None
        self._pending: _Pending | None = None

    def bind(self, planes: Planes, num_rows: int) -> None:
        shape, device = (num_rows, self.head.config.hidden_size), next(self.head.parameters()).device
        self._planes = planes
        self._pending = _Pending(*(torch.zeros(shape, dtype=self.head.dtype, device=device) for _ in range(2)))

    def observe(self, rows: ObservedRows) -> None:
        assert rows.states is not None and self._pending is not None
        embeds = self.head.embed(rows.next_token_ids, self.target)
        states = self.head.combine(rows.states.to(embeds.dtype), self.target)
        output = self._forward(embeds, states, rows.batch)
        self._pending.logits_states[rows.slots] = output.logits_states[rows.last_rows]
        self._pending.feedback[rows.slots] = output.feedback[rows.last_rows]

    def propose(self, step: DraftStep) -> Drafts:
        # past the positions the head was made for it drafts nothing rather than something arbitrary
        reach = (self.head.config.max_position_embeddings - step.seq_lens + 1).clamp(min=0)
        room = torch.minimum(step.room, reach).clamp(max=self.num_draft_tokens)
        # on a GPU drafting must not wait for the room; on a CPU drafts that nobody has room for cost time
        count = self.num_draft_tokens if room.is_cuda else int(room.max())
        if not count:
            return Drafts(step.last_token_ids[:, None][:, :0], room, None, self.token_map)
        tokens, laws = self._draft(step, room, count)
        return Drafts(
            torch.stack(tokens, dim=1), room, torch.stack(laws, dim=1) if self.probabilistic else None, self.token_map
        )

    @abstractmethod
    def _draft(self, step: DraftStep, room: Tensor, count: int) -> tuple[list[Tensor], list[Tensor]]:
        """`count` draft tokens [batch] and the laws [batch, draft_vocab] they were drawn from."""

    def release(self, request: Released) -> None:
        """Nothing is kept by request: a table row is written again before it is read for another one."""

    def _forward(self, embeds: Tensor, states: Tensor, batch: PackedBatch) -> DraftOutput:
        assert self._planes is not None
        attend = PagedAttend(self._planes, self.plane_names, batch)
        return self.head(DraftRows(embeds, states, batch.positions), attend)

    def _draft_rows(self, step: DraftStep, token_ids: Tensor, first: int, room: Tensor) -> PackedBatch:
        """The rows of draft steps `first` and on, token_ids [batch, steps]; those without room write to padding."""
        assert self._planes is not None
        size, device = self._planes.block_size, token_ids.device
        batch, count = token_ids.shape
        steps = torch.arange(first, first + count, device=device)
        live = room[:, None] > steps
        positions = torch.where(live, step.seq_lens[:, None] - 2 + steps, 0)
        blocks = step.block_tables.gather(1, positions // size).long()
        return PackedBatch(
            token_ids=token_ids.flatten(),
            positions=positions.flatten(),
            slot_mapping=torch.where(live, blocks * size + positions % size, 0).flatten(),
            cu_seqlens=torch.arange(0, batch * count + 1, count, device=device, dtype=torch.int32),
            # where the first row has no room nobody reads what comes out; later ones may point past the blocks held
            seq_lens=torch.where(live[:, 0], step.seq_lens - 2 + first + count, count).to(torch.int32),
            block_tables=step.block_tables,
            logits_rows=torch.arange(batch * count, device=device),
            max_query_len=count,
            max_seq_len=int(step.block_tables.shape[1]) * size,
        )

    def _draw(self, logits: Tensor, step: DraftStep, k: int) -> tuple[Tensor, Tensor]:
        """Target ids [batch] and the law [batch, draft_vocab] they were drawn from."""
        if not self.probabilistic:
            drafts, law = logits.argmax(-1), logits
        else:
            tempered = logits / torch.where(step.temperature > 0, step.temperature, 1.0)[:, None]
            law = tempered.log_softmax(-1)
            drafts = sample(law, step.temperature, step.seeds, step.seq_lens + k, Stream.DRAFT)
        return (drafts if self.token_map is None else self.token_map[drafts]), law


class AutoregressiveProposer(FeatureProposer):
    """Drafts one token after the other, each row conditioned on what the head returned for the one before it."""

    def _draft(self, step: DraftStep, room: Tensor, count: int) -> tuple[list[Tensor], list[Tensor]]:
        assert self._pending is not None
        output = DraftOutput(*(pending[step.slots] for pending in self._pending))
        tokens, laws = [], []
        for k in range(count):
            if k:
                batch = self._draft_rows(step, tokens[-1][:, None], k, room)
                output = self._forward(self.head.embed(tokens[-1], self.target), output.feedback, batch)
            token, law = self._draw(self.head.logits(output.logits_states, self.target), step, k)
            tokens.append(token)
            laws.append(law)
        return tokens, laws
