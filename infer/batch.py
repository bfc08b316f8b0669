"""The packed batch: rows of many requests in one line, and where each row's keys and values live."""

from typing import NamedTuple

import torch
from torch import Tensor


class PackedBatch(NamedTuple):
    """One step's rows. Request b owns rows cu_seqlens[b]:cu_seqlens[b+1], the last ones of its seq_lens[b] tokens."""

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    slot_mapping: Tensor  # [num_tokens] int64; block * block_size + offset
    cu_seqlens: Tensor  # [batch + 1] int32
    seq_lens: Tensor  # [batch] int32; tokens in the cache once this step's rows are written
    block_tables: Tensor  # [batch, max_blocks] int32; unused entries 0
    logits_rows: Tensor  # [num_logits] int64; the rows whose logits are asked for
    max_query_len: int
    max_seq_len: int
    state_rows: Tensor | None = (
        None  # [batch] int64; whose recurrent state each request continues, where layers have one
    )


class RequestRows(NamedTuple):
    """The same rows by request and by offset; rows behind the last request belong to nobody."""

    state_rows: Tensor  # [batch] int64
    starts: Tensor  # [batch] int64; first position computed
    counts: Tensor  # [batch] int64; positions computed
    first: Tensor  # [batch] int64; the first packed row
    owner: Tensor  # [num_tokens] int64; the request of a packed row
    offset: Tensor  # [num_tokens] int64; how far behind its request's first row
    live: Tensor  # [num_tokens] bool
    longest: int  # no request has more rows


def request_rows(batch: PackedBatch) -> RequestRows:
    """The layout of a batch that says whose states its requests continue."""
    assert batch.state_rows is not None, "a target with recurrent layers must be told whose states it continues"
    ends = batch.cu_seqlens[1:].long()
    first, counts = batch.cu_seqlens[:-1].long(), batch.cu_seqlens.long().diff()
    row = torch.arange(len(batch.token_ids), device=ends.device)
    owner = torch.searchsorted(ends, row, right=True)
    live = owner < len(ends)
    owner = owner.clamp(max=len(ends) - 1)
    starts = batch.seq_lens.long() - counts
    return RequestRows(batch.state_rows, starts, counts, first, owner, row - first[owner], live, batch.max_query_len)
