"""The request table: what the device must know of each running request, one row a request.

A step reads everything it needs from here, so that neither packing nor verification nor drafting waits for the host.
The last row belongs to nobody: padding points at it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from .batch import PackedBatch
from .request import Request
from .survival import UNKNOWN_LOG_ODDS


class Packed(NamedTuple):
    """A packed batch, and the table row each of its rows belongs to."""

    batch: PackedBatch
    slots: Tensor  # [num_tokens] int64


class RequestTable:
    """Device state of up to `max_requests` requests; the host writes a row when a request is admitted."""

    def __init__(
        self,
        max_requests: int,
        max_length: int,
        num_draft_tokens: int,
        block_size: int,
        device: torch.device,
        spare_slots: int = 0,
    ) -> None:
        """`spare_slots` is what the proposer writes to behind the longest context (`Requirements.spare_slots`)."""
        rows = max_requests + 1
        self.nobody, self.device, self.block_size, self.max_length = max_requests, device, block_size, max_length
        self.num_draft_tokens = num_draft_tokens
        # a finished request takes one more step before the host notices, hence the room behind the context
        self.tokens = torch.zeros(rows, max_length + num_draft_tokens + 2, dtype=torch.int32, device=device)
        most_slots = max(self.tokens.shape[1], max_length + spare_slots)
        self.block_tables = torch.zeros(rows, -(-most_slots // block_size), dtype=torch.int32, device=device)
        self.num_known, self.num_drafts, self.prompt_lens, self.limits, self.capacities, self.seeds = (
            torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(6)
        )
        self.num_known[self.nobody] = 1
        self.draft_laws: Tensor | None = None  # [rows, num_draft_tokens, draft_vocab] float32, from the first law on
        # [rows, num_draft_tokens] float32: what was known of each draft before it was drawn (`survival.py`)
        self.draft_log_odds = torch.zeros(rows, num_draft_tokens, device=device)
        self._free = list(range(max_requests - 1, -1, -1))
        self._blocks_written: dict[int, int] = {}  # row -> entries of its block table that are on the device

    def admit(self, request: Request, limit: int) -> None:
        """Gives a request a row; `limit` is the number of known tokens at which it ends."""
        row = request.slot = self._free.pop()
        self._blocks_written[row] = 0
        known = len(request.token_ids)
        self.tokens[row, :known] = self.upload(request.token_ids, np.int32)
        self.block_tables[row].zero_()
        for column, value in (
            (self.num_known, known),
            (self.num_drafts, 0),
            (self.prompt_lens, len(request.prompt_token_ids)),
            (self.limits, limit),
            (self.capacities, 0),
            (self.seeds, request.seed),
        ):
            column[row].fill_(value)

    def release(self, request: Request) -> None:
        """Takes the row back; a step in flight may still write to it."""
        if request.slot is not None:
            self._free.append(request.slot)
            request.slot = None

    def write_blocks(self, requests: Sequence[Request]) -> None:
        """Brings the block tables of these requests up to date."""
        changes: list[tuple[int, int, int]] = []
        rows: list[int] = []
        for request in requests:
            row, table = request.slot, request.block_table
            assert row is not None
            written = self._blocks_written[row]
            if len(table) > written:
                changes.extend((row, column, table[column]) for column in range(written, len(table)))
                rows.append(row)
                self._blocks_written[row] = len(table)
        if not changes:
            return
        entries = self.upload(changes)
        self.block_tables[entries[:, 0], entries[:, 1]] = entries[:, 2].int()
        held = self.upload([(row, self._blocks_written[row] * self.block_size) for row in rows])
        self.capacities[held[:, 0]] = held[:, 1]

    def pack(
        self, slots: Tensor, starts: Tensor, counts: Tensor, num_rows: int, *, max_query_len: int, max_seq_len: int
    ) -> Packed:
        """Rows starts[b]..starts[b]+counts[b] of the requests in `slots` [batch] int64, read on the device.

        `num_rows` is at least the sum of counts; rows beyond it are padding. Every row's logits are asked for.
        """
        cu_seqlens = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        row = torch.arange(num_rows, device=self.device)
        owner = torch.searchsorted(cu_seqlens[1:], row, right=True)
        live = owner < slots.shape[0]
        owner = owner.clamp(max=slots.shape[0] - 1)
        slot = torch.where(live, slots[owner], self.nobody)
        positions = torch.where(live, starts[owner] + row - cu_seqlens[owner], 0)
        block = self.block_tables[slot, positions // self.block_size].long()
        batch = PackedBatch(
            token_ids=self.tokens[slot, positions].long(),
            positions=positions,
            slot_mapping=block * self.block_size + positions % self.block_size,
            cu_seqlens=cu_seqlens.int(),
            seq_lens=(starts + counts).int(),
            block_tables=self.block_tables[slots],
            logits_rows=row,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            state_rows=slots,
        )
        return Packed(batch, slot)

    def drafts_of(self, slots: Tensor, num_drafts: Tensor) -> Tensor:
        """The drafts [batch, num_draft_tokens] int64 that wait behind the known tokens; -1 beyond `num_drafts`."""
        step = torch.arange(self.num_draft_tokens, device=self.device)
        ids = self.tokens[slots[:, None], self.num_known[slots, None] + step].long()
        return torch.where(step < num_drafts[:, None], ids, -1)

    def append(self, slots: Tensor, token_ids: Tensor, counts: Tensor) -> None:
        """Appends the first counts[b] of token_ids [batch, n] to the known tokens; earlier drafts are gone."""
        counts = torch.where(slots == self.nobody, 0, counts.long())
        known = self.num_known[slots]
        self._write(slots, known, token_ids, counts)
        self.num_known[slots] = known + counts
        self.num_drafts.index_fill_(0, slots, 0)

    def set_drafts(self, slots: Tensor, token_ids: Tensor, counts: Tensor) -> None:
        """Puts drafts token_ids [batch, n] behind the known tokens."""
        counts = torch.where(slots == self.nobody, 0, counts)
        self._write(slots, self.num_known[slots], token_ids, counts)
        self.num_drafts[slots] = counts

    def room(self, slots: Tensor, spare: int) -> Tensor:
        """Drafts [batch] int64 that still fit the request's limit and its blocks, `spare` slots of them left free."""
        known = self.num_known[slots]
        room = torch.minimum(self.limits[slots] - known - 1, self.capacities[slots] - known - spare)
        return room.clamp(0, self.num_draft_tokens)

    def set_laws(self, slots: Tensor, log_probs: Tensor) -> None:
        """Keeps the laws [batch, k, draft_vocab] of drafts until they are verified."""
        if self.draft_laws is None:
            shape = (self.tokens.shape[0], self.num_draft_tokens, log_probs.shape[-1])
            self.draft_laws = torch.zeros(shape, dtype=torch.float32, device=self.device)
        self.draft_laws[slots, : log_probs.shape[1]] = log_probs

    def set_log_odds(self, slots: Tensor, log_odds: Tensor | None) -> None:
        """Keeps the log-odds [batch, n] of drafts until they are verified; None where they are not known."""
        if log_odds is None:
            self.draft_log_odds.index_fill_(0, slots, UNKNOWN_LOG_ODDS)
        else:
            self.draft_log_odds[slots, : log_odds.shape[1]] = log_odds

    def _write(self, slots: Tensor, first: Tensor, token_ids: Tensor, counts: Tensor) -> None:
        step = torch.arange(token_ids.shape[1], device=self.device)
        columns = first[:, None] + step
        old = self.tokens[slots[:, None], columns]
        self.tokens[slots[:, None], columns] = torch.where(step < counts[:, None], token_ids.int(), old)

    def upload(self, values: Sequence[object] | np.ndarray, dtype: DTypeLike = np.int64) -> Tensor:
        """Numbers of the host on the device, which is not waited for."""
        return torch.from_numpy(np.asarray(values, dtype=dtype)).to(self.device, non_blocking=True)
