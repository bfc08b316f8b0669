"""Extraction as a proposer: a weightless draft model with one cache-only attention layer.

Its "heads" are the captured layers and its "head size" is their width. It writes the states it is given into its own
slots of the paged cache and attends to nothing; when a request finishes, the slots are gathered by block table. So
scheduling, paging, chunked prefill and preemption serve extraction unchanged.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ...kernels.dispatch import store_kv
from ..planes import Plane, Planes, PlaneSpec
from ..target import Target
from .base import Drafts, DraftStep, ObservedRows, Proposer, Requirements

PLANE = "hidden_states"


class _Where(NamedTuple):
    block_table: Tensor  # [max_blocks] int32
    num_tokens: int


class ExtractHiddenStatesProposer(Proposer):
    """Hands `on_finish(request_id, states [num_tokens, num_layer_ids, hidden])` every finished request's states.

    A request's newest token is never an input of the target, so it has no row: with `max_tokens=1` the rows are the
    prompt's.
    """

    def __init__(self, target: Target, layer_ids: tuple[int, ...], on_finish: Callable[[int, Tensor], None]) -> None:
        spec = PlaneSpec(PLANE, len(layer_ids), target.hidden_size, 0, target.dtype)
        self.requirements = Requirements(layer_ids=layer_ids, planes=(spec,))
        self.on_finish = on_finish
        self._plane: Plane | None = None
        self._where: dict[int, _Where] = {}

    def bind(self, planes: Planes) -> None:
        self._plane = planes[PLANE]

    def observe(self, rows: ObservedRows) -> None:
        assert self._plane is not None and rows.states is not None
        store_kv(rows.states, None, self._plane.k, None, rows.batch.slot_mapping)
        lengths = rows.batch.seq_lens.tolist()
        for request_id, table, length in zip(rows.request_ids, rows.batch.block_tables, lengths, strict=True):
            self._where[request_id] = _Where(table, length)

    def propose(self, step: DraftStep) -> Drafts:
        """The token just sampled, as a placeholder: what is drafted here is never meant to be right."""
        return Drafts(step.last_token_ids[:, None], [1] * len(step.request_ids), None)

    def release(self, request_id: int, *, finished: bool) -> None:
        where = self._where.pop(request_id, None)
        if where is None or not finished:
            return
        assert self._plane is not None
        num_blocks = -(-where.num_tokens // self._plane.k.shape[1])
        blocks = self._plane.k[where.block_table[:num_blocks].long()]
        self.on_finish(request_id, blocks.flatten(0, 1)[: where.num_tokens])
