"""Which token, label and row every draft head speaks of: the project's only shift.

After the target consumed x_0..x_t and sampled the bonus token x_{t+1}, step k of row t embeds x_{t+1+k} and is trained
on the law of x_{t+2+k}, which the target gave after row t+1+k. Rows stay in place; values move left within a document.

So for heads conditioned on states: their newest token lies one ahead of its row (`ahead` = 1). Where tokens are all a
head sees, row t is the newest token itself (`ahead` = 0) and everything lies one nearer.
"""

import torch
from torch import Tensor

from .batch import TrainBatch


def shift_left(values: Tensor, by: int, document_ids: Tensor, fill: int = 0) -> Tensor:
    """values[t + by] at row t, `fill` where that row belongs to another document; values and ids [batch, seq]."""
    if by >= values.shape[1]:
        return torch.full_like(values, fill)
    pad = (0, by)
    moved = torch.nn.functional.pad(values[:, by:], pad, value=fill)
    same = torch.nn.functional.pad(document_ids[:, by:], pad, value=-1) == document_ids
    return moved.masked_fill(~same | (document_ids < 0), fill)


def document_line(document_ids: Tensor) -> Tensor:
    """Ids [batch * seq] int64 that tell documents of the whole batch apart; -1 in padding."""
    ids = document_ids.long()
    rows = torch.arange(len(ids), device=ids.device)[:, None] << 32
    return torch.where(ids < 0, -1, ids + rows).flatten()


def document_lengths(batch: TrainBatch) -> Tensor:
    """Tokens of each row's document [batch, seq] int64; in padding, of all of it."""
    _, index, counts = document_line(batch.document_ids).unique(return_inverse=True, return_counts=True)
    return counts[index].view_as(batch.positions)


def input_tokens(batch: TrainBatch, step: int) -> Tensor:
    """The tokens x_{t+1+step} [batch, seq] int64 embedded at this step; 0 beyond the document."""
    return shift_left(batch.token_ids, 1 + step, batch.document_ids)


def label_tokens(batch: TrainBatch, step: int, ahead: int = 1) -> Tensor:
    """The hard labels x_{t+ahead+1+step} [batch, seq] int64; -1 beyond the document."""
    return shift_left(batch.token_ids, ahead + 1 + step, batch.document_ids, fill=-1)


def label_tops(batch: TrainBatch, step: int, ahead: int = 1) -> Tensor:
    """The target's own top token [batch, seq] int64 at each soft label's row; -1 beyond the document."""
    return shift_left(batch.target_argmax, ahead + step, batch.document_ids, fill=-1)


def soft_label_rows(rows: Tensor, steps: Tensor, ahead: int = 1) -> Tensor:
    """The rows t+ahead+step whose final states give the soft labels of valid rows t; all [num_rows] in batch * seq."""
    return rows + ahead + steps


def valid_rows(batch: TrainBatch, num_steps: int, ahead: int = 1) -> Tensor:
    """Where a row counts, bool [num_steps, batch, seq].

    Row t counts at step k if every token from the newest x_{t+ahead} to the label x_{t+ahead+1+k} is supervised and in
    the row's own document.
    """
    mask, steps = batch.loss_mask, []
    valid = shift_left(mask, ahead, batch.document_ids)
    for step in range(num_steps):
        valid = valid & shift_left(mask, ahead + 1 + step, batch.document_ids)
        steps.append(valid)
    return torch.stack(steps)


def to_draft_ids(token_ids: Tensor, draft_to_target: Tensor | None, vocab_size: int) -> Tensor:
    """Draft ids of target ids [...] int64; -1 outside the draft vocabulary (None: the vocabularies are one)."""
    if draft_to_target is None:
        return token_ids
    inverse = torch.full((vocab_size,), -1, dtype=torch.int64, device=token_ids.device)
    inverse[draft_to_target] = torch.arange(len(draft_to_target), device=token_ids.device)
    return torch.where(token_ids >= 0, inverse[token_ids.clamp(min=0)], -1)
