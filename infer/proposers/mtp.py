"""MTP drafting: the target's own draft layers run on its rows as they come, then on their own output.

Layer k of several reads, for row t, the token at t + 1 + k and what layer k - 1 made of row t, as it was trained. So at
any time it can be run on k rows less than the first layer: a step's rows go to layer k with their positions moved back
by k, and in drafting the last of them follow, one for each draft. What a layer made of a row is kept in a plane, like
its keys, so that chunks, preemptions and the prefix cache change nothing. After the last layer the first one goes on,
its rows standing behind those it has.
"""

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from ...heads.mtp import MtpHead
from ...heads.target_tensors import TargetTensors
from ...kernels.dispatch import store_kv
from ..batch import PackedBatch
from ..planes import PlaneSpec
from .base import DraftStep, ObservedRows
from .drafting import ChainRows, DraftSampling
from .feature import AutoregressiveProposer


class MtpProposer(AutoregressiveProposer):
    """A draft row is conditioned on the head's prediction of the state that the target has not computed yet."""

    head: MtpHead

    def __init__(
        self, head: MtpHead, target: TargetTensors, num_draft_tokens: int, draft_sampling: DraftSampling = "greedy"
    ) -> None:
        super().__init__(head, target, num_draft_tokens, draft_sampling)
        self.depth = min(head.config.num_layers, max(num_draft_tokens, 1))  # layers in use
        self.made = [
            PlaneSpec(f"draft.made.{k}", 1, head.config.hidden_size, 0, head.dtype) for k in range(self.depth - 1)
        ]
        self.requirements = dataclasses.replace(
            self.requirements, planes=(*self.requirements.planes, *self.made), next_token=self.depth
        )

    def observe(self, rows: ObservedRows) -> None:
        embeds, output = self._run(rows)
        self._keep(0, output.feedback, rows.batch.slot_mapping)
        for k in range(1, self.depth):
            back = moved_back(rows.batch, k, self.planes.block_size)
            slots = back.batch.slot_mapping
            output = self._forward(embeds[back.rows], self._made(k, slots), back.batch, back.positions, k)
            self._keep(k, output.feedback, slots)

    def _draft(self, step: DraftStep, room: Tensor, count: int) -> tuple[list[Tensor], list[Tensor]]:
        if self.depth == 1:
            return super()._draft(step, room, count)
        assert self._pending is not None
        logits_states, feedback = (pending[step.slots] for pending in self._pending)
        tokens: list[Tensor] = []
        laws: list[Tensor] = []
        for k in range(count):
            if k and k < self.depth:
                logits_states, feedback = self._deepen(step, tokens[-1], k, room > k)
            elif k:
                batch = self._row(step, tokens[-1], k // self.depth, room > k)
                embeds = self.head.embed(tokens[-1], self.target)
                logits_states, feedback = self._forward(embeds, feedback, batch, step.seq_lens - 2 + k, k)
            token, law = self._draw(self.head.logits(logits_states, self.target, k), step, k)
            tokens.append(token)
            laws.append(law)
        return tokens, laws

    def _deepen(self, step: DraftStep, token_ids: Tensor, k: int, live: Tensor) -> tuple[Tensor, Tensor]:
        """What layer k makes of the last row and draft k; the layers after it follow, each a row further back."""
        embeds, positions = self.head.embed(token_ids, self.target), step.seq_lens - 2 + k
        first: tuple[Tensor, Tensor] | None = None
        for layer in range(k, self.depth):
            batch = self._row(step, token_ids, k - layer, live)
            output = self._forward(embeds, self._made(layer, batch.slot_mapping), batch, positions, layer)
            self._keep(layer, output.feedback, batch.slot_mapping)
            first = first or (output.logits_states, output.feedback)
        assert first is not None
        return first

    def _row(self, step: DraftStep, token_ids: Tensor, ahead: int, live: Tensor) -> PackedBatch:
        """One row a request, `ahead` of the last one the target computed; padding where there is none."""
        positions = step.seq_lens - 2 + ahead
        room = (live & (positions >= 0)).long()
        return ChainRows(step, positions, room, 1, self.planes.block_size).at(0, token_ids)

    def _made(self, k: int, slots: Tensor) -> Tensor:
        """What layer k - 1 made of the rows in `slots` [num_tokens, hidden]."""
        return self.planes[self.made[k - 1].name].k.flatten(0, 2)[slots]

    def _keep(self, k: int, states: Tensor, slots: Tensor) -> None:
        if k < len(self.made):
            store_kv(states[:, None], None, self.planes[self.made[k].name].k, None, slots)


class MovedBack(NamedTuple):
    """A step's rows as a deeper layer takes them."""

    batch: PackedBatch  # the rows whose text now reaches far enough
    rows: Tensor  # [num_tokens] int64; the row of the step whose next token each of them reads
    positions: Tensor  # [num_tokens] int64; of those


def moved_back(batch: PackedBatch, by: int, block_size: int) -> MovedBack:
    """Each request's rows `by` positions further back; where that is before its text, rows are padding, at the end."""
    starts, ends = batch.cu_seqlens[:-1].long(), batch.cu_seqlens[1:].long()
    rows = torch.arange(len(batch.token_ids), device=ends.device)
    request = torch.searchsorted(ends, rows, right=True).clamp(max=len(ends) - 1)
    before = batch.seq_lens.long() - (ends - starts)  # rows computed in earlier steps
    missing = (by - before).clamp(min=0)  # rows that would stand before the text
    source = rows + missing[request]
    live = source < ends[request]
    source = source.clamp(max=len(rows) - 1)
    positions = torch.where(live, before[request] + source - starts[request] - by, 0)
    block = batch.block_tables[request].gather(1, (positions // block_size)[:, None])[:, 0].long()
    slots = torch.where(live, block * block_size + positions % block_size, 0)
    return MovedBack(
        batch._replace(
            positions=positions,
            slot_mapping=slots,
            seq_lens=batch.seq_lens - by + missing.to(batch.seq_lens.dtype),
        ),
        source,
        positions + by,
    )
