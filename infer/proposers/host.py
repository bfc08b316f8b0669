"""What proposers on the host share: the running requests' tokens, copied from the device once, and the way back."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .base import Drafts, DraftStep


class HostStep(NamedTuple):
    """A draft step on the host, real requests only: [n] int64 each."""

    request_ids: list[int]
    rows: np.ndarray  # of the request table, and of `HostContexts.tokens`
    num_known: np.ndarray
    num_before: np.ndarray  # of them, those that an earlier step of the same request had; 0: it is new in its row
    prompt_lens: np.ndarray
    room: np.ndarray


class HostContexts:
    """The known tokens of running requests, one row of the request table each, kept up to date by `update`.

    A step costs one small copy, whatever the contexts hold; a request that is new costs one more for its text.
    """

    def __init__(self, num_rows: int, num_draft_tokens: int) -> None:
        self._window = num_draft_tokens + 1  # tokens a step adds at most
        self._owners = np.full(num_rows, -1, dtype=np.int64)
        self._num_known = np.zeros(num_rows, dtype=np.int64)
        self.tokens = np.zeros((num_rows, 0), dtype=np.int32)  # [num_rows, width]

    def update(self, step: DraftStep) -> HostStep:
        """Takes what became known since each request was last drafted for; waits for the device."""
        assert step.tokens is not None and step.prompt_lens is not None
        count = len(step.request_ids)
        if not self.tokens.size:
            # pages that no context reaches are never touched
            self.tokens = np.zeros(tuple(step.tokens.shape), dtype=np.int32)
        rows, known = step.slots[:count], step.seq_lens[:count]
        places = known[:, None] - self._window + torch.arange(self._window, device=known.device)
        newest = step.tokens[rows[:, None], places.clamp(min=0)].long()
        facts = torch.stack([rows, known, step.prompt_lens[:count], step.room[:count]], dim=1)
        told = torch.cat([facts, newest], dim=1).cpu().numpy()
        at, num_known, prompt_lens, room = np.ascontiguousarray(told[:, :4].T)
        ids = np.asarray(step.request_ids, dtype=np.int64)
        before = np.where(self._owners[at] == ids, self._num_known[at], 0)
        self._owners[at], self._num_known[at] = ids, num_known
        self._copy_older(step, at, before, num_known - self._window)
        columns = num_known[:, None] - self._window + np.arange(self._window)
        request, column = np.nonzero(columns >= before[:, None])
        self.tokens[at[request], columns[request, column]] = told[request, 4 + column]
        return HostStep(step.request_ids, at, num_known, before, prompt_lens, room)

    def release(self, request_id: int) -> None:
        """Makes a request that comes back new in its row."""
        self._owners[self._owners == request_id] = -1

    def _copy_older(self, step: DraftStep, rows: np.ndarray, begin: np.ndarray, end: np.ndarray) -> None:
        """Copies what lies before the newest tokens: the texts of new requests, and of steps that did not draft."""
        assert step.tokens is not None
        spans = [span for span in zip(rows.tolist(), begin.tolist(), end.tolist(), strict=True) if span[1] < span[2]]
        if not spans:
            return
        copied, done = torch.cat([step.tokens[row, first:last] for row, first, last in spans]).cpu().numpy(), 0
        for row, first, last in spans:
            self.tokens[row, first:last] = copied[done : done + last - first]
            done += last - first


def upload_ids(drafts: Sequence[Sequence[int]], step: DraftStep, num_draft_tokens: int) -> Drafts:
    """Ragged drafts of the first requests as point masses; requests behind them, padding, draft nothing."""
    return upload(*padded(drafts, num_draft_tokens), step)


def padded(drafts: Sequence[Sequence[int]], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids [n, width] int64 of ragged drafts, -1 beyond their lengths [n] int64."""
    ids = np.full((len(drafts), width), -1, dtype=np.int64)
    lengths = np.array([len(draft) for draft in drafts], dtype=np.int64)
    for i, draft in enumerate(drafts):
        ids[i, : len(draft)] = draft
    return ids, lengths


def upload(ids: np.ndarray, lengths: np.ndarray, step: DraftStep) -> Drafts:
    """The same for ids [n, k] int64, -1 beyond lengths [n] int64: one copy."""
    width = ids.shape[1]
    both = _with_padding(np.concatenate([ids, lengths[:, None]], axis=1), step)
    both[len(ids) :, :width] = -1
    on_device = torch.from_numpy(both).to(step.slots.device)
    return Drafts(on_device[:, :width], on_device[:, width], None, at_most=lengths.tolist())


def upload_rows(values: np.ndarray, step: DraftStep) -> Tensor:
    """A row [...] for each of the first requests on the device, zeros for those behind them, which are padding."""
    return torch.from_numpy(_with_padding(values, step)).to(step.slots.device)


def _with_padding(values: np.ndarray, step: DraftStep) -> np.ndarray:
    rows = np.zeros((step.slots.shape[0], *values.shape[1:]), dtype=values.dtype)
    rows[: len(values)] = values
    return rows
