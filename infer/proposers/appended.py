"""Rows of a proposer's own behind those it observes, so that both take one forward.

A request's rejected rows go and `extra` rows follow its last final one: its newest token, which the target has not
computed yet, then placeholders. They lie in slots that the next observation overwrites.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..batch import PackedBatch
from .base import ObservedRows


class AppendedRows(NamedTuple):
    """A step's final rows and those appended: as many as were observed and `extra` a request, the last ones padding."""

    batch: PackedBatch
    first: Tensor  # [batch] int64; the row of each request's newest token
    source: Tensor  # [num_tokens] int64; the observed row that each is, or that it follows
    appended: Tensor  # [num_tokens] bool; whether it only follows


def append_rows(rows: ObservedRows, extra: int, block_size: int, placeholder: int) -> AppendedRows:
    """Each request's final rows, its newest token and `extra` - 1 placeholders, at positions that follow each other.

    Where a request's blocks end, rows fall into the block that belongs to nobody.
    """
    observed = rows.batch
    begins = observed.cu_seqlens[:-1].long()
    last = rows.last_rows - begins  # of the rows of each request
    device, num_requests = begins.device, len(begins)
    cu_seqlens = torch.nn.functional.pad((last + 1 + extra).cumsum(0), (1, 0))
    row = torch.arange(len(observed.token_ids) + extra * num_requests, device=device)
    owner = torch.searchsorted(cu_seqlens[1:], row, right=True)
    live = owner < num_requests
    owner = owner.clamp(max=num_requests - 1)
    offset = row - cu_seqlens[owner]
    source = begins[owner] + torch.minimum(offset, last[owner])
    token_ids = torch.where(offset <= last[owner], observed.token_ids[source], placeholder)
    newest = offset == last[owner] + 1
    token_ids = torch.where(newest, rows.next_token_ids[rows.last_rows][owner], token_ids)
    starts = observed.positions[begins]
    positions = torch.where(live, starts[owner] + offset, 0)
    column = positions // block_size
    width = observed.block_tables.shape[1]
    block = observed.block_tables[owner, column.clamp(max=width - 1)].long()
    slots = torch.where(live & (column < width), block * block_size + positions % block_size, 0)
    batch = PackedBatch(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slots,
        cu_seqlens=cu_seqlens.int(),
        # a request that ended takes one more step, in which its rows may pass the table's end
        seq_lens=(starts + last + 1 + extra).clamp(max=width * block_size).int(),
        block_tables=observed.block_tables,
        logits_rows=row,
        max_query_len=observed.max_query_len + extra,
        max_seq_len=min(observed.max_seq_len + extra, width * block_size),
    )
    return AppendedRows(batch, cu_seqlens[:-1] + last + 1, source, offset > last[owner])
