"""Conditional drop (arXiv 2504.18583): later draft steps of a parallel head train on nested, shrinking sets of rows.

A row of step d attends to the same row's earlier steps, so what is kept at one step was kept at all before it.
"""

import torch
from torch import Tensor

from ..kernels.noise import noise_keys, uniforms
from .alignment import document_line
from .batch import TrainBatch

DROP_STREAM = 102


def drop_rows(valid: Tensor, batch: TrainBatch, retention: float, min_retention: float) -> Tensor:
    """Which of the rows `valid` [steps, batch, seq] bool, nested themselves, are kept; the same shape.

    Of a document's n rows at step 0, step d keeps int(n * max(retention^d, min_retention)), of these the valid ones.
    The draw is a function of document, epoch and position, whatever the batch.
    """
    assert batch.document_seeds is not None, "what is drawn needs batch.document_seeds"
    first = valid[0].flatten()
    keys = noise_keys(batch.document_seeds, batch.positions, DROP_STREAM).flatten()
    draws = uniforms(keys, torch.zeros_like(keys), torch.float64)
    documents = torch.where(first, document_line(batch.document_ids), -1)
    order = draws.argsort()
    order = order[documents[order].argsort(stable=True)]
    grouped = documents[order]
    begins, ends = (torch.searchsorted(grouped, grouped, right=right) for right in (False, True))
    ranks, sizes = torch.empty_like(order), torch.empty_like(order)
    ranks[order] = torch.arange(len(order), device=keys.device) - begins
    sizes[order] = ends - begins
    shares = torch.tensor(
        [max(retention**d, min_retention) for d in range(len(valid))], dtype=torch.float64, device=keys.device
    )
    counts = (sizes.double() * shares[:, None]).long()
    return valid & (ranks < counts).view_as(valid)
