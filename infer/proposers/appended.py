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

    Where a request's blocks end, so do its rows: drafts there have no room. The block that belongs to nobody may hold
    anything, NaN included, and must be read by no request.
    """
    observed = rows.batch
    begins = observed.cu_seqlens[:-1].long()
    last = rows.last_rows - begins  # of the rows of each request
    device, num_requests = begins.device, len(begins)
    starts, held = observed.positions[begins], (observed.block_tables > 0).sum(1) * block_size
    ends = torch.maximum(starts + last + 1, torch.minimum(starts + last + 1 + extra, held))
    cu_seqlens = torch.nn.functional.pad((ends - starts).cumsum(0), (1, 0))
    row = torch.arange(len(observed.token_ids) + extra * num_requests, device=device)
    owner = torch.searchsorted(cu_seqlens[1:], row, right=True)
    live = owner < num_requests
    owner = owner.clamp(max=num_requests - 1)
    offset = row - cu_seqlens[owner]
    source = begins[owner] + torch.minimum(offset, last[owner])
    token_ids = torch.where(offset <= last[owner], observed.token_ids[source], placeholder)
    newest = offset == last[owner] + 1
    token_ids = torch.where(newest, rows.next_token_ids[rows.last_rows][owner], token_ids)
    positions = torch.where(live, starts[owner] + offset, 0)
    block = observed.block_tables[owner, positions // block_size].long()
    slots = torch.where(live, block * block_size + positions % block_size, 0)
    batch = PackedBatch(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slots,
        cu_seqlens=cu_seqlens.int(),
        seq_lens=ends.int(),
        block_tables=observed.block_tables,
        logits_rows=row,
        max_query_len=observed.max_query_len + extra,
        max_seq_len=observed.max_seq_len + extra,
    )
    return AppendedRows(batch, cu_seqlens[:-1] + last + 1, source, offset > last[owner])
