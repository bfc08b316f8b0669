"""What an objective draws by row: a function of document, epoch and position alone, whatever shares the batch."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.noise import noise_keys
from .batch import TrainBatch


class DocumentRanks(NamedTuple):
    """A random order of some rows of each document; both [batch, seq] int64, meaningless at other rows."""

    ranks: Tensor  # from 0
    sizes: Tensor  # how many rows of the document take part


def rank_in_documents(eligible: Tensor, batch: TrainBatch, stream: int) -> DocumentRanks:
    """Orders the rows `eligible` [batch, seq] bool within each document; another stream is another order.

    Raises ValueError where the batch carries no document seeds.
    """
    if batch.document_seeds is None:
        raise ValueError("rows are drawn by the seed of their document, found a batch without document_seeds")
    rows, seq = batch.token_ids.shape
    lines = torch.arange(rows, device=eligible.device)[:, None] * (seq + 1)
    documents = torch.where(eligible, batch.document_ids.long() + lines, rows * (seq + 1)).flatten()
    order = noise_keys(batch.document_seeds, batch.positions, stream).flatten().argsort()
    order = order[documents[order].argsort(stable=True)]
    grouped = documents[order]
    begins, ends = (torch.searchsorted(grouped, grouped, right=right) for right in (False, True))
    ranks, sizes = torch.empty_like(order), torch.empty_like(order)
    ranks[order] = torch.arange(len(order), device=order.device) - begins
    sizes[order] = ends - begins
    return DocumentRanks(ranks.view_as(eligible), sizes.view_as(eligible))
