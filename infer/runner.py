"""One step on the device: packed rows -> target -> verification -> observation -> drafts.

The runner moves rows and tokens; it decides nothing about who runs (scheduler) or when a request ends (engine).
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..kernels.records import law_columns
from .batch import PackedBatch
from .planes import BlockPool
from .proposers.base import Drafts, DraftStep, ObservedRows, Proposer
from .request import DraftLaw, Request
from .sampling import SamplingParams, process_logits, row_settings
from .scheduler import ScheduledRequest
from .target import Target
from .verify import verify_drafts


class StepResult(NamedTuple):
    """What the target and the verifier said, on the host."""

    emitted: list[list[int]]  # per scheduled request; empty where it did not sample
    failed: list[bool]
    states: Tensor | None  # [num_tokens, num_layer_ids, hidden] of every row
    batch: PackedBatch


class Runner:
    """Builds packed batches and calls target, verifier and proposer."""

    def __init__(self, target: Target, proposer: Proposer, pool: BlockPool, num_draft_tokens: int) -> None:
        self.target, self.proposer, self.pool = target, proposer, pool
        self.num_draft_tokens = num_draft_tokens

    def run_target(self, scheduled: Sequence[ScheduledRequest]) -> StepResult:
        """Computes every scheduled row and verifies the drafts among them."""
        batch = self._pack(scheduled)
        output = self.target.forward(batch)
        samplers = [rows for rows in scheduled if rows.samples]
        emitted: list[list[int]] = [[] for _ in scheduled]
        failed = [False] * len(scheduled)
        if samplers:
            verified = iter(self._verify(samplers, output.logits))
            for i, rows in enumerate(scheduled):
                if rows.samples:
                    emitted[i], failed[i] = next(verified)
        return StepResult(emitted, failed, output.states, batch)

    def observe(self, scheduled: Sequence[ScheduledRequest], result: StepResult, kept: Sequence[int]) -> None:
        """Shows the proposer every final row; `kept[i]` tokens of request i reached its output."""
        if not self.proposer.requirements.observes:
            return
        rows, nexts, counts, seen = [], [], [], []
        offset = 0
        for item, num_kept, failed in zip(scheduled, kept, result.failed, strict=True):
            # a rejected draft's row is not final; neither is one behind a stop
            valid = item.num_tokens if not item.samples else item.num_tokens - item.num_drafts + num_kept - 1
            if not failed and valid > 0:
                known = item.request.token_ids
                rows.append(range(offset, offset + valid))
                nexts.extend(known[item.start + 1 : item.start + 1 + valid])
                counts.append(valid)
                seen.append(item)
            offset += item.num_tokens
        if not seen:
            return
        index = np.concatenate([np.asarray(r) for r in rows])
        keep = None if len(index) == offset else self._to_device(index)
        batch = result.batch
        packed = self._packed(
            [item.request for item in seen],
            counts,
            [item.start + n for item, n in zip(seen, counts, strict=True)],
            tuple(t if keep is None else t[keep] for t in (batch.token_ids, batch.positions, batch.slot_mapping)),
            np.cumsum(counts) - 1,
        )
        states = result.states if keep is None or result.states is None else result.states[keep]
        self.proposer.observe(
            ObservedRows([item.request.request_id for item in seen], packed, self._to_device(np.asarray(nexts)), states)
        )

    def propose(self, requests: Sequence[Request], max_length: int) -> None:
        """Fills `drafts` of the decoding requests that have room for at least one."""
        room = {}
        for request in requests:
            known = len(request.token_ids)
            limit = min(self.num_draft_tokens, request.params.max_tokens - request.num_output_tokens - 1)
            limit = min(limit, max_length - known - 1)
            # when blocks run short the request decodes without drafts rather than preempt a neighbour
            if limit > 0 and self.pool.grow(request.block_table, known + self.proposer.requirements.lookahead):
                room[request] = limit
        if not room:
            return
        drafting = list(room)
        drafts = self.proposer.propose(
            DraftStep(
                request_ids=[r.request_id for r in drafting],
                block_tables=self._block_tables(drafting),
                seq_lens=self._to_device(np.asarray([len(r.token_ids) for r in drafting])),
                last_token_ids=self._to_device(np.asarray([r.token_ids[-1] for r in drafting])),
                max_drafts=[room[r] for r in drafting],
                temperature=torch.tensor([r.params.temperature for r in drafting], device=self.target.device),
                seeds=self._to_device(np.asarray([r.seed for r in drafting])),
            )
        )
        self._store(drafting, drafts, [room[r] for r in drafting])

    def _store(self, drafting: Sequence[Request], drafts: Drafts, room: Sequence[int]) -> None:
        vocab = self.target.vocab_size
        for i, (request, tokens) in enumerate(zip(drafting, drafts.token_ids.tolist(), strict=True)):
            tokens = tokens[: min(drafts.lengths[i], room[i])]
            # a placeholder or an id the target does not know ends the draft: the target must never embed it
            stop = next((j for j, token in enumerate(tokens) if not 0 <= token < vocab), len(tokens))
            request.drafts = tokens[:stop]
            law = drafts.log_probs
            request.draft_law = None if law is None or not stop else DraftLaw(law, drafts.token_map, i)

    def _verify(self, samplers: Sequence[ScheduledRequest], logits: Tensor) -> list[tuple[list[int], bool]]:
        """Emitted tokens, and whether the target's logits were not finite, per sampling request."""
        requests = [rows.request for rows in samplers]
        params = [request.params for request in requests]
        num_drafts = [rows.num_drafts for rows in samplers]
        settings = row_settings(
            params,
            [n + 1 for n in num_drafts],
            [request.num_output_tokens for request in requests],
            [sorted(self.end_token_ids(p)) for p in params],
            logits.device,
        )
        draft_ids = np.full((len(samplers), max(num_drafts)), -1, dtype=np.int64)
        for i, rows in enumerate(samplers):
            draft_ids[i, : rows.num_drafts] = rows.request.drafts[: rows.num_drafts]
        law, token_map = self._gather_laws([r.draft_law for r in requests], draft_ids.shape[1])
        output = verify_drafts(
            process_logits(logits, settings),
            self._to_device(draft_ids),
            self._to_device(np.cumsum([0, *(n + 1 for n in num_drafts)]), torch.int32),
            draft_log_probs=law,
            law_columns=None if token_map is None else law_columns(token_map, logits.shape[1]),
            positions=self._to_device(np.asarray([len(r.token_ids) for r in requests])),
            temperature=torch.tensor([p.temperature for p in params], device=logits.device),
            seeds=self._to_device(np.asarray([r.seed for r in requests])),
        )
        tokens = zip(output.token_ids.tolist(), output.num_emitted.tolist(), strict=True)
        return [(row[:count], count == 0) for row, count in tokens]

    def end_token_ids(self, params: SamplingParams) -> frozenset[int]:
        """Tokens that end a request with these parameters."""
        own = frozenset() if params.ignore_eos else self.target.eos_token_ids
        return own | frozenset(params.stop_token_ids)

    def _gather_laws(self, laws: Sequence[DraftLaw | None], width: int) -> tuple[Tensor | None, Tensor | None]:
        present = [law for law in laws if law is not None]
        if not present:
            return None, None
        # a request without drafts has no law to look up: any row stands in; calls may differ in how far they drafted
        rows = [law.log_probs[law.row, :width] for law in ((law or present[0]) for law in laws)]
        padded = [torch.nn.functional.pad(row, (0, 0, 0, width - row.shape[0])) for row in rows]
        return torch.stack(padded), present[0].token_map

    def _pack(self, scheduled: Sequence[ScheduledRequest]) -> PackedBatch:
        token_ids, positions, slots, logits_rows = [], [], [], []
        offset, size = 0, self.pool.block_size
        for rows in scheduled:
            request, end = rows.request, rows.start + rows.num_tokens
            known = request.token_ids[rows.start : end]
            token_ids.extend(known + request.drafts[: rows.num_tokens - len(known)])
            positions.extend(range(rows.start, end))
            table = request.block_table
            slots.extend(table[where // size] * size + where % size for where in range(rows.start, end))
            offset += rows.num_tokens
            if rows.samples:
                logits_rows.extend(range(offset - rows.num_drafts - 1, offset))
        return self._packed(
            [rows.request for rows in scheduled],
            [rows.num_tokens for rows in scheduled],
            [rows.start + rows.num_tokens for rows in scheduled],
            tuple(self._to_device(np.asarray(column)) for column in (token_ids, positions, slots)),
            np.asarray(logits_rows, dtype=np.int64),
        )

    def _packed(
        self,
        requests: Sequence[Request],
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        rows: tuple[Tensor, ...],
        logits_rows: np.ndarray,
    ) -> PackedBatch:
        token_ids, positions, slot_mapping = rows
        return PackedBatch(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            cu_seqlens=self._to_device(np.concatenate([[0], np.cumsum(query_lens)]), torch.int32),
            seq_lens=self._to_device(np.asarray(seq_lens), torch.int32),
            block_tables=self._block_tables(requests),
            logits_rows=self._to_device(logits_rows),
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
        )

    def _block_tables(self, requests: Sequence[Request]) -> Tensor:
        tables = np.zeros((len(requests), max(len(r.block_table) for r in requests)), dtype=np.int32)
        for i, request in enumerate(requests):
            tables[i, : len(request.block_table)] = request.block_table
        return self._to_device(tables, torch.int32)

    def _to_device(self, array: np.ndarray, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.target.device, dtype, non_blocking=True)


class Stopwatch:
    """Seconds between marks, with the device's queue drained at each."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.last = self._now()

    def lap(self) -> float:
        now = self._now()
        elapsed, self.last = now - self.last, now
        return elapsed

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
