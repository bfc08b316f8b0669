"""Which rows a step computes: as the host knows them, or padded in buffers that never move, so that it can replay."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .request import Request
from .scheduler import ScheduledRequest
from .table import RequestTable

BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of requests a CUDA graph is captured for; beyond the last one batches grow by its size."""

MIXED_SIZES = (64, 128, 256, 512, 1024, 2048)
"""Rows that a step with prompt rows is padded to where it is recorded, besides those of the largest."""

LARGEST_MIXED = 4096
"""Rows of the largest recorded step; longer ones keep a GPU busy without."""


class Slots(NamedTuple):
    """Who takes part in a step; on the device, [batch] int64 each."""

    rows: Tensor  # of the request table
    starts: Tensor  # first position computed
    counts: Tensor  # positions computed


class MixedPlan(NamedTuple):
    """A step with prompt rows; `sampling` [samplers] int64 are the table rows that decide a token."""

    slots: Slots
    asked: Tensor | None  # [samplers] int64; their places in `slots`; None: all of them, in order
    sampling: Tensor
    num_drafts: Tensor  # [samplers] int64; drafts verified
    width: int  # logits rows of each sampler
    longest: int | None  # rows of one request at most; None: all of the step's
    max_seq_len: int

    @property
    def cu_rows(self) -> Tensor:
        """[samplers + 1] int32; where the logits rows of each begin."""
        return self.width * torch.arange(len(self.sampling) + 1, dtype=torch.int32, device=self.sampling.device)


def bucket(batch: int) -> int:
    """The smallest bucket that holds `batch` requests."""
    return next((size for size in BUCKETS if size >= batch), -(-batch // BUCKETS[-1]) * BUCKETS[-1])


class Layout:
    """Lays out steps over the rows of a request table."""

    def __init__(self, table: RequestTable) -> None:
        self.table = table
        self._buffers: dict[int, Tensor] = {}  # of decoding steps, by padded batch
        self._rows: dict[int, list[int]] = {}  # what stands in them
        self._mixed_batch, self.mixed_sizes = 0, ()  # steps with prompt rows that are padded
        self._mixed_buffer = torch.empty(5, 0, dtype=torch.int64, device=table.device)

    def decode(
        self, requests: Sequence[Request], starts: list[int] | None, counts: list[int] | None, batch: int | None
    ) -> Slots:
        """Decoding requests, in buffers padded to `batch` of them if given.

        `starts` and `counts` None: the device knows them, and fills them in (`Stages.follow`).
        """
        padding = 0 if batch is None else batch - len(requests)
        rows = [_row_of(request) for request in requests] + [self.table.nobody] * padding
        if starts is not None and counts is not None:
            columns = [rows, starts + [0] * padding, counts + [1] * padding]
        elif batch is not None and self._rows.get(batch) == rows:
            return Slots(*self._buffer_of(batch))
        else:
            columns = [rows] * 3
        told = self.table.upload(columns)
        if batch is None:
            return Slots(*told)
        self._rows[batch] = rows
        return Slots(*self._buffer_of(batch).copy_(told))

    def nobody(self, batch: int, width: int) -> Slots:
        """`width` rows for each of `batch` requests that are none."""
        slots = Slots(*self._buffer_of(batch))
        self._rows[batch] = [self.table.nobody] * batch
        slots.rows.fill_(self.table.nobody)
        slots.starts.zero_()
        slots.counts.fill_(width)
        return slots

    def pad_mixed(self, batch: int, max_rows: int = 0) -> None:
        """Steps with prompt rows, `max_rows` at most, are padded to `batch` requests from now on; 0: not at all."""
        self._mixed_batch, self.mixed_sizes = batch, ()
        if batch:
            most = -(-(min(max_rows, LARGEST_MIXED) + batch) // MIXED_SIZES[0]) * MIXED_SIZES[0]
            self.mixed_sizes = (*(size for size in MIXED_SIZES if batch <= size <= most // 2), most)
        self._mixed_buffer = torch.zeros(5, batch, dtype=torch.int64, device=self.table.device)
        self._mixed_buffer[[0, 3]] = self.table.nobody
        self._mixed_buffer[2] = 1

    def padded_size(self, num_rows: int, batch: int) -> int | None:
        """Rows that a step with prompt rows is padded to; None where it is laid out exactly."""
        # padding takes a row a request
        return next((size for size in self.mixed_sizes if size >= num_rows + self._mixed_batch - batch), None)

    def exact(self, scheduled: Sequence[ScheduledRequest]) -> MixedPlan:
        """What the host knows of a step, and nothing beside it."""
        asked = [i for i, rows in enumerate(scheduled) if rows.samples]
        samplers = [scheduled[i] for i in asked]
        columns = (
            [_row_of(rows.request) for rows in scheduled],
            [rows.start for rows in scheduled],
            [rows.num_tokens for rows in scheduled],
        )
        return MixedPlan(
            slots=Slots(*self.table.upload(columns)),
            asked=self.table.upload(asked),
            sampling=self.table.upload([_row_of(rows.request) for rows in samplers]),
            num_drafts=self.table.upload([rows.num_drafts for rows in samplers]),
            width=1 + max((rows.num_drafts for rows in samplers), default=0),
            longest=max(rows.num_tokens for rows in scheduled),
            max_seq_len=max(rows.start + rows.num_tokens for rows in scheduled),
        )

    def padded(self, scheduled: Sequence[ScheduledRequest]) -> MixedPlan:
        """The same in buffers that never move: as many requests as can be, those that do not sample as nobody's."""
        nobody, padding = self.table.nobody, self._mixed_batch - len(scheduled)
        columns = (
            [_row_of(rows.request) for rows in scheduled] + [nobody] * padding,
            [rows.start for rows in scheduled] + [0] * padding,
            [rows.num_tokens for rows in scheduled] + [1] * padding,
            [_row_of(rows.request) if rows.samples else nobody for rows in scheduled] + [nobody] * padding,
            [rows.num_drafts if rows.samples else 0 for rows in scheduled] + [0] * padding,
        )
        self._mixed_buffer.copy_(self.table.upload(columns))
        return self.buffered()

    def buffered(self) -> MixedPlan:
        """The buffers of `padded`, whatever they hold."""
        rows, starts, counts, sampling, num_drafts = self._mixed_buffer
        return MixedPlan(
            slots=Slots(rows, starts, counts),
            asked=None,
            sampling=sampling,
            num_drafts=num_drafts,
            width=self.table.num_draft_tokens + 1,
            longest=None,
            max_seq_len=self.table.max_length,
        )

    def _buffer_of(self, batch: int) -> Tensor:
        """The columns of `Slots` [3, batch] int64."""
        if batch not in self._buffers:
            self._buffers[batch] = torch.zeros(3, batch, dtype=torch.int64, device=self.table.device)
        return self._buffers[batch]


def _row_of(request: Request) -> int:
    assert request.slot is not None
    return request.slot
