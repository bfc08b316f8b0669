"""EAGLE-3 drafting: the head's layers run on the target's rows as they come, then k - 1 times on their own output.

Row t pairs the state at t with the token at t + 1 and stands at position t, as in training. Draft rows write past the
observed rows into slots that the next observation overwrites, so a rejected draft leaves nothing behind.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ...heads.base import DraftRows
from ...heads.eagle3 import Eagle3Head
from ...heads.target_tensors import TargetTensors
from ...kernels.dispatch import sample
from ...kernels.records import Stream
from ..attention import PagedAttend
from ..batch import PackedBatch
from ..planes import Planes, PlaneSpec
from .base import Drafts, DraftStep, ObservedRows, Proposer, Requirements

DraftSampling = Literal["greedy", "probabilistic"]


class _Pending(NamedTuple):
    """What the next draft of a request starts from."""

    logits_state: Tensor  # [hidden]
    feedback: Tensor  # [hidden]


class Eagle3Proposer(Proposer):
    """Drafts chains with an EAGLE-3 head; greedy drafts are point masses, probabilistic ones carry their law."""

    def __init__(
        self, head: Eagle3Head, target: TargetTensors, num_draft_tokens: int, draft_sampling: DraftSampling = "greedy"
    ) -> None:
        config = head.config
        self.head, self.target = head.eval(), target
        self.num_draft_tokens = num_draft_tokens
        self.probabilistic = draft_sampling == "probabilistic"
        self.token_map = head.draft_to_target()
        self.plane_names = [f"draft.{i}" for i in range(config.num_layers)]
        dtype = head.fc.weight.dtype
        self.requirements = Requirements(
            layer_ids=config.layer_ids,
            planes=tuple(
                PlaneSpec(name, config.num_kv_heads, config.head_dim, config.head_dim, dtype)
                for name in self.plane_names
            ),
            next_token=True,
            lookahead=max(num_draft_tokens - 2, 0),
            draft_laws=self.probabilistic,
        )
        self._planes: Planes | None = None
        self._pending: dict[int, _Pending] = {}

    def bind(self, planes: Planes) -> None:
        self._planes = planes

    def observe(self, rows: ObservedRows) -> None:
        assert rows.states is not None
        embeds = self.head.embed(rows.next_token_ids, self.target)
        states = self.head.combine(rows.states.to(embeds.dtype))
        logits_states, feedback = self._forward(embeds, states, rows.batch)
        last = rows.batch.logits_rows
        for i, pair in enumerate(zip(logits_states[last], feedback[last], strict=True)):
            self._pending[rows.request_ids[i]] = _Pending(*pair)

    def propose(self, step: DraftStep) -> Drafts:
        # past the positions the head was made for it drafts nothing rather than something arbitrary
        reach = self.head.config.max_position_embeddings
        room = [min(n, self.num_draft_tokens) for n in step.max_drafts]
        room = [max(0, min(n, reach - length + 1)) for n, length in zip(room, step.seq_lens.tolist(), strict=True)]
        pending = [self._pending[request_id] for request_id in step.request_ids]
        logits_states = torch.stack([p.logits_state for p in pending])
        states = torch.stack([p.feedback for p in pending])
        tokens, laws = [], []
        for k in range(max(room)):
            if k:
                batch = self._draft_rows(step, tokens[-1], k, room)
                logits_states, states = self._forward(self.head.embed(tokens[-1], self.target), states, batch)
            token, law = self._draw(self.head.logits(logits_states, self.target), step, k)
            tokens.append(token)
            laws.append(law)
        if not tokens:
            return Drafts(step.last_token_ids[:, None][:, :0], room, None, self.token_map)
        return Drafts(
            torch.stack(tokens, dim=1), room, torch.stack(laws, dim=1) if self.probabilistic else None, self.token_map
        )

    def release(self, request_id: int, *, finished: bool) -> None:
        self._pending.pop(request_id, None)

    def _forward(self, embeds: Tensor, states: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        assert self._planes is not None
        attend = PagedAttend(self._planes, self.plane_names, batch)
        return self.head(DraftRows(embeds, states, batch.positions), attend)

    def _draft_rows(self, step: DraftStep, token_ids: Tensor, k: int, room: Sequence[int]) -> PackedBatch:
        """One row a request at the position of its k-th draft's state; rows without room go to the padding block."""
        assert self._planes is not None
        size, device = self._planes.block_size, token_ids.device
        live = torch.tensor([k < n for n in room], device=device)
        positions = torch.where(live, step.seq_lens - 2 + k, 0)
        block = step.block_tables.gather(1, (positions // size)[:, None])[:, 0].long()
        batch = len(room)
        return PackedBatch(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=torch.where(live, block * size + positions % size, 0),
            cu_seqlens=torch.arange(batch + 1, device=device, dtype=torch.int32),
            seq_lens=(positions + 1).to(torch.int32),
            block_tables=step.block_tables,
            logits_rows=torch.arange(batch, device=device),
            max_query_len=1,
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
