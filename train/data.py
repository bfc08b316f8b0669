"""Shards to micro-batches: the split, the packing, and an order that is a function of (seed, epoch).

A position is the number of batches consumed. Which rows it stands for depends on the recipe's seed and batch size, not
on the number of processes, so a run resumes anywhere on any number of them.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..extract.shards import ShardSet
from ..kernels.noise import noise_keys
from .batch import TrainBatch
from .settings import DataSettings

_OPEN_ROWS = 32
_WIDTH_STEP = 64


class DataError(ValueError):
    """Shards that cannot be trained on as asked."""


class Split(NamedTuple):
    """Document indices of the two parts: exact complements, both ascending."""

    train: Tensor  # [train documents] int64
    validation: Tensor  # [validation documents] int64


class StepPlan(NamedTuple):
    """The micro-batches of one process for one optimizer step, states not read yet."""

    position: int
    documents: tuple[int, ...]  # of all processes, in order
    micro_batches: tuple[TrainBatch, ...]


def split_documents(num_documents: int, settings: DataSettings) -> Split:
    """A seeded split by document; a set too small for two parts trains on everything. Raises DataError when empty."""
    if num_documents < 1:
        raise DataError("expected at least one document to train on, found none; run `spectrain extract` on more data")
    wanted = min(round(settings.validation_share * num_documents), settings.max_validation_documents)
    if settings.validation_share > 0 and settings.max_validation_documents > 0:
        wanted = max(1, wanted)
    wanted = min(wanted, num_documents - 1)
    order = torch.randperm(num_documents, generator=torch.Generator().manual_seed(settings.seed))
    return Split(order[wanted:].sort().values, order[:wanted].sort().values)


def pack_rows(documents: Tensor, lengths: Tensor, sequence_length: int, seed: int) -> list[list[int]]:
    """Rows of document indices whose lengths fit `sequence_length`; longer documents count as cut to it.

    Documents come in seeded order and go to the fullest of a few open rows that still has room.
    """
    order = documents[torch.randperm(len(documents), generator=torch.Generator().manual_seed(seed))]
    rows: list[list[int]] = []
    opened: list[tuple[int, list[int]]] = []  # (room, documents)
    for document, length in zip(order.tolist(), lengths[order].clamp(max=sequence_length).tolist(), strict=True):
        fitting = [index for index, (room, _) in enumerate(opened) if room >= length]
        if fitting:
            room, row = opened.pop(min(fitting, key=lambda index: opened[index][0]))
        else:
            if len(opened) == _OPEN_ROWS:
                rows.append(opened.pop(min(range(_OPEN_ROWS), key=lambda index: opened[index][0]))[1])
            room, row = sequence_length, []
        row.append(document)
        opened.append((room - length, row))
    return rows + [row for _, row in opened]


class RowReader:
    """Packs documents of a shard set into batches for one head."""

    def __init__(
        self, shards: ShardSet, layer_ids: Sequence[int], with_final_state: bool, sequence_length: int
    ) -> None:
        self.shards, self.sequence_length = shards, sequence_length
        # pinned memory lets the copy to the device run beside the computation
        self.pinned = torch.cuda.is_available()
        self.columns = shards.layer_columns(layer_ids)
        final = [shards.manifest.num_layers] if with_final_state else []
        self.final_column = shards.layer_columns(final)[0] if final else None
        self.lengths = shards.document_lengths()

    def ids(self, rows: Sequence[Sequence[int]], seed: int = 0, epoch: int = 0) -> TrainBatch:
        """Everything of a batch but states and denominators; an empty list of rows gives one row of padding.

        What an objective draws for a document depends on `seed`, `epoch` and the document, not on its neighbours.
        """
        rows = rows or [[]]
        used = [sum(self._length(document) for document in row) for row in rows]
        width = min(math.ceil(max(1, *used) / _WIDTH_STEP) * _WIDTH_STEP, self.sequence_length)
        shape = len(rows), width
        batch = TrainBatch(
            token_ids=torch.zeros(shape, dtype=torch.int64),
            positions=torch.zeros(shape, dtype=torch.int64),
            document_ids=torch.full(shape, -1, dtype=torch.int32),
            loss_mask=torch.zeros(shape, dtype=torch.bool),
            target_argmax=torch.full(shape, -1, dtype=torch.int64),
            aux_states=torch.empty(0),
            final_states=None,
            denominators=torch.empty(0),
            document_seeds=torch.zeros(shape, dtype=torch.int64),
        )
        assert batch.document_seeds is not None
        for row, documents in enumerate(rows):
            start = 0
            for number, index in enumerate(documents):
                length = self._length(index)
                document, here = self.shards.document_ids(index, length), (row, slice(start, start + length))
                batch.token_ids[here] = document.token_ids.long()
                batch.positions[here] = torch.arange(length)
                batch.document_ids[here] = number
                batch.document_seeds[here] = noise_keys(torch.tensor(seed), torch.tensor(index), epoch)
                batch.loss_mask[here] = document.loss_mask
                batch.target_argmax[here] = document.target_argmax.long()
                start += length
        return batch

    def fill(self, batch: TrainBatch, rows: Sequence[Sequence[int]]) -> TrainBatch:
        """The same batch with its states read from the shards; padding is zero.

        A last state that is an aux state too is read once.
        """
        shards, (batch_size, width) = self.shards, batch.token_ids.shape
        dtype, hidden = shards.states_dtype, shards.manifest.hidden_size
        kind: dict[str, Any] = {"dtype": dtype, "pin_memory": self.pinned}
        aux = torch.zeros(batch_size, width, len(self.columns), hidden, **kind)
        if self.final_column in self.columns:
            final = aux[:, :, self.columns.index(self.final_column)]
        else:
            final = None if self.final_column is None else torch.zeros(batch_size, width, hidden, **kind)
        for row, documents in enumerate(rows):
            start = 0
            for index in documents:
                length = self._length(index)
                states = shards.hidden_states(index, length)
                aux[row, start : start + length] = states[:, self.columns]
                if final is not None:
                    final[row, start : start + length] = states[:, self.final_column]
                start += length
        return batch._replace(aux_states=aux, final_states=final)

    def _length(self, document: int) -> int:
        return min(int(self.lengths[document]), self.sequence_length)


class TrainingRows:
    """The rows of one process at every position of a run."""

    def __init__(self, reader: RowReader, documents: Tensor, settings: DataSettings, rank: int, world: int) -> None:
        self.reader, self.settings, self.rank, self.world = reader, settings, rank, world
        self.rows = pack_rows(documents, reader.lengths, settings.sequence_length, settings.seed)
        self.steps_per_epoch = math.ceil(len(self.rows) / settings.batch_size)

    def rows_at(self, position: int) -> list[list[int]]:
        """Rows of all processes at a position, in order."""
        epoch, batch = divmod(position, self.steps_per_epoch)
        generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + epoch + 1)
        order = torch.randperm(len(self.rows), generator=generator)
        start = batch * self.settings.batch_size
        return [self.rows[i] for i in order[start : start + self.settings.batch_size].tolist()]

    def plan_at(self, position: int) -> StepPlan:
        """What the step at a position trains on; no states are read."""
        plan = next(self.stream(position, position + 1))
        assert isinstance(plan, StepPlan)
        return plan

    def stream(self, position: int, end: int) -> Iterator[StepPlan | TrainBatch]:
        """From `position` on: a plan, then its micro-batches with states, and so on up to `end`.

        Every process yields the same number of micro-batches; one that has fewer rows gets rows of padding.
        """
        for at in range(position, end):
            rows = self.rows_at(at)
            size = self.settings.micro_batch_size
            count = math.ceil(math.ceil(len(rows) / self.world) / size)
            mine = rows[self.rank :: self.world]
            groups = [mine[i * size : (i + 1) * size] for i in range(count)]
            epoch = at // self.steps_per_epoch
            batches = [self.reader.ids(group, self.settings.seed, epoch) for group in groups]
            yield StepPlan(at, tuple(document for row in rows for document in row), tuple(batches))
            for batch, group in zip(batches, groups, strict=True):
                yield self.reader.fill(batch, group)
