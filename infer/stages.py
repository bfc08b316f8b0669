"""The stages of a step on the device, in order: pack and forward, verify, observe, draft.

Each is a function of buffers that never move, reads nothing on the host and decides nothing there, so that it can be
recorded as a CUDA graph. `runner.py` says which run, and on what.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.records import law_columns
from .layout import MixedPlan, Slots
from .proposers.base import DeviceProposer, Drafts, DraftStep, ObservedRows, Proposer, ProposerError
from .proposers.host import HostProposer
from .sampling import Features, LogitsRows, SamplingTable, process_logits, top_logprobs
from .survival import UNKNOWN_CONFIDENCE, SurvivalEstimator, expected_accepted, log_odds_of, select
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
        self.target, self.table, self.settings = target, table, settings
        self.observer = proposer
        if isinstance(proposer, HostProposer) and proposer.inner is not None:
            self.observer = proposer.inner
        self.drafter = self.observer if isinstance(self.observer, DeviceProposer) else None
        if not isinstance(proposer, DeviceProposer | HostProposer):
            raise ProposerError(
                f"a method is a DeviceProposer or a HostProposer, found {type(proposer).__name__}, which is neither; "
                f"derive it from one"
            )
        self.verification, self.estimator = verification, estimator
        self.num_draft_tokens = table.num_draft_tokens
        self.spare_slots = proposer.requirements.spare_slots(table.num_draft_tokens)
        self._widths = torch.tensor(widths, device=table.device)
        self.law_columns: Tensor | None = None  # [vocab_size] of the proposer's laws, once there was one

    def select(self, slots: Slots, num_drafts: int) -> None:
        """Leaves `num_drafts` of the drafts counted, those that are likeliest to survive."""
        assert self.estimator is not None
        survival = self.estimator.survival(self.table.draft_log_odds[slots.rows], slots.counts - 1)
        slots.counts.copy_(1 + select(survival, num_drafts))

    def follow(self, slots: Slots) -> None:
        """Has each request compute its newest token and the drafts that the table has for it."""
        slots.starts.copy_(self.table.num_known[slots.rows] - 1)
        slots.counts.copy_(self.table.num_drafts[slots.rows] + 1)

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

    def verify(self, slots: Slots, packed: Packed, output: TargetOutput, wanted: Features) -> Tensor:
        """Verifies the drafts of a step of decoding requests, and says what came of it, as `_verify` does."""
        return self._verify(
            slots.rows, slots.counts - 1, packed.batch.cu_seqlens, packed.slots, packed.batch.positions, output, wanted
        )

    def verify_mixed(self, plan: MixedPlan, packed: Packed, output: TargetOutput, wanted: Features) -> Tensor:
        """The same of a step with prompt rows."""
        asked = packed.batch.logits_rows
        where = packed.slots[asked], packed.batch.positions[asked]
        return self._verify(plan.sampling, plan.num_drafts, plan.cu_rows, *where, output, wanted, plan.width - 1)

    def logprobs(self, told: Tensor, cu_rows: Tensor, output: TargetOutput, wanted: Features) -> Sequence[Tensor]:
        """Ids and log-probabilities [batch, k + 1, n + 1] of the emitted tokens, nothing where nobody asked."""
        if wanted.logprobs is None:
            return ()
        emitted = told[:, :-3]
        batch, width = emitted.shape
        rows = cu_rows[:-1, None] + torch.arange(width, device=cu_rows.device)
        rows = rows.clamp(max=output.logits.shape[0] - 1).flatten()
        found = top_logprobs(output.logits, rows, emitted.flatten(), wanted.logprobs)
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

    def brief(self, drafting: Tensor, request_ids: list[int]) -> tuple[Drafts | None, Tensor]:
        """What a proposer on the host goes by for table rows `drafting` [batch]: drafts of the one within it, if any.

        The host reads [batch, 1 or 2 + 2k] int64: room for drafts; inner drafts' lengths, tokens, and how sure they
        are, the bits of a float64 each.
        """
        if self.drafter is None:
            return None, self.table.room(drafting, self.spare_slots)[:, None]
        step = self._draft_step(drafting, request_ids)._replace(wants_confidence=True)
        drafts = self.drafter.propose(step)
        confidence = drafts.confidence
        if confidence is None:
            confidence = torch.full(drafts.token_ids.shape, UNKNOWN_CONFIDENCE, device=drafts.token_ids.device)
        columns = (step.room[:, None], drafts.lengths[:, None], drafts.token_ids)
        return drafts, torch.cat([*columns, confidence.double().view(torch.int64)], dim=1)

    def propose(self, drafting: Tensor, request_ids: list[int]) -> Tensor | None:
        """Lets a proposer on the device draft for table rows `drafting` [batch], and takes its drafts.

        Where drafting is adaptive, says what they promise: `survival.expected_accepted`.
        """
        assert self.drafter is not None
        step = self._draft_step(drafting, request_ids)
        return self._take(drafting, self.drafter.propose(step), step.room)

    def take(self, drafting: Tensor, chosen: Tensor, confidence: Tensor | None, inner: Drafts | None) -> Tensor | None:
        """Takes what a proposer on the host drafts for table rows `drafting` [batch], and says what `propose` says.

        chosen [batch, k + 2] int64: tokens, how many of them, and whether they are those of `inner`, under its laws;
        confidence [batch, k] float32.
        """
        k = self.num_draft_tokens
        ids, laws, token_map = chosen[:, :k], None, None
        if inner is not None and inner.log_probs is not None:
            laws, token_map = self._laws_with(inner, ids, chosen[:, k + 1].bool()), inner.token_map
        drafts = Drafts(ids, chosen[:, k], laws, token_map, confidence)
        return self._take(drafting, drafts, self.table.room(drafting, self.spare_slots))

    def _laws_with(self, inner: Drafts, ids: Tensor, of_inner: Tensor) -> Tensor:
        """The laws of inner drafts, and for the other requests those that put everything on the tokens `ids`."""
        assert inner.log_probs is not None
        batch, drawn, vocab = inner.log_probs.shape
        laws = inner.log_probs.new_full((batch, ids.shape[1], vocab), -torch.inf)
        laws[:, :drawn] = torch.where(of_inner[:, None, None], inner.log_probs, -torch.inf)
        named = self.columns_of(inner.token_map)
        columns = ids.clamp(min=0) if named is None else named[ids.clamp(min=0)].long().clamp(min=0)
        certain = torch.where(of_inner[:, None], laws.gather(2, columns[..., None])[..., 0], 0.0)
        return laws.scatter(2, columns[..., None], certain[..., None])

    def columns_of(self, token_map: Tensor | None) -> Tensor | None:
        """Of laws over this vocabulary; made once, from the first."""
        if self.law_columns is None and token_map is not None:
            self.law_columns = law_columns(token_map, self.target.vocab_size)
        return self.law_columns

    def _take(self, drafting: Tensor, drafts: Drafts, room: Tensor) -> Tensor | None:
        table, ids = self.table, drafts.token_ids
        # a placeholder or an id the target does not know ends the draft: the target must never embed it
        valid = ((ids >= 0) & (ids < self.target.vocab_size)).long().cumprod(dim=1)
        table.set_drafts(drafting, ids * valid, torch.minimum(torch.minimum(drafts.lengths, room), valid.sum(dim=1)))
        if drafts.log_probs is not None:
            table.set_laws(drafting, drafts.log_probs)
            self.columns_of(drafts.token_map)
        if self.estimator is None:
            return None
        table.set_log_odds(drafting, None if drafts.confidence is None else log_odds_of(drafts.confidence))
        survival = self.estimator.survival(table.draft_log_odds[drafting], table.num_drafts[drafting])
        # requests about to end draft less for no fault of the drafts; nobody has no room either
        return expected_accepted(survival, room >= self.num_draft_tokens, self._widths)

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
    ) -> Tensor:
        """Verifies at most `width` drafts of table `rows` [batch] and appends what was emitted.

        The host reads [batch, width + 4] int64: tokens, -1 behind them, how many, whether it failed, drafts verified.
        """
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
            law_columns=None if law is None else self.law_columns,
            mode=self.verification.mode,
            rates=self.verification.rates,
            fp64_gumbel=self.verification.fp64_gumbel,
        )
        if self.estimator is not None:
            self.estimator.observe(table.draft_log_odds[rows], num_drafts, verified.num_emitted)
        table.append(rows, verified.token_ids, verified.num_emitted)
        columns = (verified.num_emitted, verified.failed, num_drafts)
        return torch.cat([verified.token_ids, torch.stack([column.long() for column in columns], dim=1)], dim=1)
