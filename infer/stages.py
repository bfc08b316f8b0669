"""The stages of a step on the device, in order: pack and forward, verify, observe, draft.

Each is a function of buffers that never move, reads nothing on the host and decides nothing there, so that it can be
recorded as a CUDA graph. `runner.py` says which run, and on what.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.records import RejectionOutputs, law_columns
from .layout import MixedPlan, Slots
from .proposers.base import Drafts, DraftStep, ObservedRows, Proposer
from .sampling import Features, LogitsRows, SamplingTable, process_logits, top_logprobs
from .survival import SurvivalEstimator, expected_accepted, log_odds_of, select
from .table import Packed, RequestTable
from .target import Target, TargetOutput
from .verify import Verification, verify_drafts


class Stages:
    """What target, verifier and proposer do with the rows of the request table."""

    def __init__(
        self,
        target: Target,
        proposer: Proposer,
        table: RequestTable,
        settings: SamplingTable,
        verification: Verification,
        estimator: SurvivalEstimator | None,
        widths: Sequence[int],
    ) -> None:
        """`estimator` learns which drafts survive, and `widths` are the rows a request may be given, where adaptive."""
        self.target, self.proposer, self.table, self.settings = target, proposer, table, settings
        self.observer = proposer.inner or proposer
        self.verification, self.estimator = verification, estimator
        self.num_draft_tokens = table.num_draft_tokens
        self.spare_slots = proposer.requirements.spare_slots(table.num_draft_tokens)
        self._widths = torch.tensor(widths, device=table.device)
        self._law_columns: Tensor | None = None  # of the proposer's laws; made once, from the first

    def select(self, slots: Slots, num_drafts: int) -> None:
        """Leaves `num_drafts` of the drafts counted, those that are likeliest to survive."""
        assert self.estimator is not None
        survival = self.estimator.survival(self.table.draft_log_odds[slots.rows], slots.counts - 1)
        slots.counts.copy_(1 + select(survival, num_drafts))

    def forward(self, slots: Slots, num_rows: int) -> tuple[Packed, TargetOutput]:
        """The newest tokens and drafts of decoding requests in `num_rows` rows, and what the target says."""
        longest = 1 if num_rows == slots.rows.shape[0] else self.num_draft_tokens + 1
        packed = self.table.pack(*slots, num_rows, max_query_len=longest, max_seq_len=self.table.max_length)
        return packed, self.target.forward(packed.batch)

    def forward_mixed(self, plan: MixedPlan, num_rows: int) -> tuple[Packed, TargetOutput]:
        """A step with prompt rows; logits are computed where requests sample."""
        packed = self.table.pack(
            *plan.slots, num_rows, max_query_len=plan.longest or num_rows, max_seq_len=plan.max_seq_len
        )
        ends = packed.batch.cu_seqlens[1:, None].long()
        if plan.asked is not None:
            ends = ends[plan.asked]
        # a request with fewer drafts than columns repeats its last row behind them, where no draft is
        columns = torch.arange(plan.width, device=ends.device)
        asked_rows = torch.minimum(ends - 1 - plan.num_drafts[:, None] + columns, ends - 1).flatten()
        packed = packed._replace(batch=packed.batch._replace(logits_rows=asked_rows))
        return packed, self.target.forward(packed.batch)

    def verify(self, slots: Slots, packed: Packed, output: TargetOutput, wanted: Features) -> RejectionOutputs:
        """Verifies the drafts of a step of decoding requests."""
        return self._verify(
            slots.rows, slots.counts - 1, packed.batch.cu_seqlens, packed.slots, packed.batch.positions, output, wanted
        )

    def verify_mixed(self, plan: MixedPlan, packed: Packed, output: TargetOutput, wanted: Features) -> RejectionOutputs:
        """Verifies the drafts of a step with prompt rows."""
        asked = packed.batch.logits_rows
        where = packed.slots[asked], packed.batch.positions[asked]
        return self._verify(plan.sampling, plan.num_drafts, plan.cu_rows, *where, output, wanted, plan.width - 1)

    def logprobs(
        self, verified: RejectionOutputs, cu_rows: Tensor, output: TargetOutput, wanted: Features
    ) -> Sequence[Tensor]:
        """Ids and log-probabilities [batch, k + 1, n + 1] of the emitted tokens, nothing where nobody asked."""
        if wanted.logprobs is None:
            return ()
        batch, width = verified.token_ids.shape
        rows = cu_rows[:-1, None] + torch.arange(width, device=cu_rows.device)
        rows = rows.clamp(max=output.logits.shape[0] - 1).flatten()
        found = top_logprobs(output.logits, rows, verified.token_ids.flatten(), wanted.logprobs)
        return [tensor.view(batch, width, -1) for tensor in found]

    def observe(self, slots: Slots, packed: Packed, states: Tensor | None, request_ids: list[int]) -> None:
        """Shows the observer every row of a step that was verified."""
        table, batch = self.table, packed.batch
        last = (table.num_known[slots.rows] - 2 - slots.starts).clamp(min=0)
        self.observer.observe(
            ObservedRows(
                request_ids=request_ids,
                slots=slots.rows,
                batch=batch,
                next_token_ids=table.tokens[packed.slots, batch.positions + 1].long(),
                last_rows=batch.cu_seqlens[:-1].long() + torch.minimum(last, slots.counts - 1),
                states=states,
            )
        )

    def inner_drafts(self, drafting: Tensor, request_ids: list[int]) -> Drafts:
        """What the proposer within another drafts for table rows `drafting` [batch]."""
        step = self._draft_step(drafting, request_ids)._replace(wants_confidence=True)
        return self.observer.propose(step)

    def host_drafts(self, drafting: Tensor, request_ids: list[int], inner: Drafts | None) -> Drafts:
        """What a proposer on the host drafts for table rows `drafting` [batch]."""
        return self.proposer.propose(self._draft_step(drafting, request_ids)._replace(inner=inner))

    def propose(self, drafting: Tensor, request_ids: list[int]) -> Tensor | None:
        """Lets a proposer on the device draft for table rows `drafting` [batch], and takes its drafts."""
        step = self._draft_step(drafting, request_ids)
        return self._take(drafting, self.proposer.propose(step), step.room)

    def take(self, drafting: Tensor, drafts: Drafts) -> Tensor | None:
        """Takes drafts for table rows `drafting` [batch]; `Proposed.promised`."""
        return self._take(drafting, drafts, self.table.room(drafting, self.spare_slots))

    def _take(self, drafting: Tensor, drafts: Drafts, room: Tensor) -> Tensor | None:
        table, ids = self.table, drafts.token_ids
        # a placeholder or an id the target does not know ends the draft: the target must never embed it
        valid = ((ids >= 0) & (ids < self.target.vocab_size)).long().cumprod(dim=1)
        table.set_drafts(drafting, ids * valid, torch.minimum(torch.minimum(drafts.lengths, room), valid.sum(dim=1)))
        if drafts.log_probs is not None:
            table.set_laws(drafting, drafts.log_probs)
            if self._law_columns is None and drafts.token_map is not None:
                self._law_columns = law_columns(drafts.token_map, self.target.vocab_size)
        if self.estimator is None:
            return None
        table.set_log_odds(drafting, None if drafts.confidence is None else log_odds_of(drafts.confidence))
        survival = self.estimator.survival(table.draft_log_odds[drafting], table.num_drafts[drafting])
        # requests about to end draft less for no fault of the drafts; nobody has no room either
        return expected_accepted(survival, room >= self.num_draft_tokens, self._widths)

    def results(self, verified: RejectionOutputs, rows: Tensor, num_drafted: Tensor) -> Tensor:
        """What the host reads [batch, k + 5] int64: tokens, how many, failed, drafts verified, drafts waiting."""
        columns = (verified.num_emitted, verified.failed, num_drafted, self.table.num_drafts[rows])
        return torch.cat([verified.token_ids, torch.stack([column.long() for column in columns], dim=1)], dim=1)

    def _draft_step(self, drafting: Tensor, request_ids: list[int]) -> DraftStep:
        table, known = self.table, self.table.num_known[drafting]
        return DraftStep(
            request_ids=request_ids,
            slots=drafting,
            block_tables=table.block_tables[drafting],
            seq_lens=known,
            last_token_ids=table.tokens[drafting, known - 1].long(),
            room=table.room(drafting, self.spare_slots),
            temperature=self.settings.temperature[drafting],
            seeds=table.seeds[drafting],
            wants_confidence=self.estimator is not None,
            tokens=table.tokens,
            prompt_lens=table.prompt_lens[drafting],
        )

    def _verify(
        self,
        rows: Tensor,
        num_drafts: Tensor,
        cu_rows: Tensor,
        logits_slots: Tensor,
        positions: Tensor,
        output: TargetOutput,
        wanted: Features,
        width: int | None = None,
    ) -> RejectionOutputs:
        """Verifies at most `width` drafts of table `rows` [batch] and appends what was emitted."""
        table = self.table
        where = LogitsRows(logits_slots, positions)
        logits = process_logits(output.logits, where, self.settings, table.tokens, table.prompt_lens, wanted)
        law = table.draft_laws
        verified = verify_drafts(
            logits,
            table.drafts_of(rows, num_drafts)[:, :width],
            cu_rows,
            positions=table.num_known[rows],
            temperature=self.settings.temperature[rows],
            seeds=table.seeds[rows],
            draft_log_probs=None if law is None else law[rows, :width],
            law_columns=None if law is None else self._law_columns,
            mode=self.verification.mode,
            rates=self.verification.rates,
            fp64_gumbel=self.verification.fp64_gumbel,
        )
        if self.estimator is not None:
            self.estimator.observe(table.draft_log_odds[rows], num_drafts, verified.num_emitted)
        table.append(rows, verified.token_ids, verified.num_emitted)
        return verified
