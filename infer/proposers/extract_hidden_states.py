"""Extraction as a proposer: a weightless draft model with one cache-only attention layer.

Its "heads" are the captured layers and its "head size" is their width. It writes the states it is given into its own
slots of the paged cache and attends to nothing; when a request finishes, the slots are gathered by block table. So
scheduling, paging, chunked prefill and preemption serve extraction unchanged.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ...kernels.dispatch import store_kv
from ..planes import Plane, Planes, PlaneSpec
from ..target import Target
from .base import DeviceProposer, Drafts, DraftStep, ObservedRows, Released, Requirements

PLANE = "hidden_states"


class ExtractHiddenStatesProposer(DeviceProposer):
    """Hands `on_finish(request_id, states [num_tokens, num_layer_ids, hidden])` every finished request's states.

    A request's newest token is never an input of the target, so it has no row: with `max_tokens=1` the rows are the
    prompt's.
    """

    def __init__(self, target: Target, layer_ids: tuple[int, ...], on_finish: Callable[[int, Tensor], None]) -> None:
        spec = PlaneSpec(PLANE, len(layer_ids), target.hidden_size, 0, target.dtype)
        self.requirements = Requirements(layer_ids=layer_ids, planes=(spec,))
        self.on_finish = on_finish
        self._plane: Plane | None = None

    def bind(self, planes: Planes, num_rows: int) -> None:
        self._plane = planes[PLANE]

    def observe(self, rows: ObservedRows) -> None:
        assert self._plane is not None and rows.states is not None
        store_kv(rows.states, None, self._plane.k, None, rows.batch.slot_mapping)

    def propose(self, step: DraftStep) -> Drafts:
        """The token just sampled, as a placeholder: what is drafted here is never meant to be right."""
        return Drafts(step.last_token_ids[:, None], torch.ones_like(step.seq_lens), None)

    def release(self, request: Released) -> None:
        if not request.finished:
            return
        assert self._plane is not None
        num_blocks = -(-request.num_rows // self._plane.k.shape[1])
        table = torch.tensor(request.block_table[:num_blocks], dtype=torch.int64, device=self._plane.k.device)
        self.on_finish(request.request_id, self._plane.k[table].flatten(0, 1)[: request.num_rows])
