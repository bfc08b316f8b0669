"""The rejection pipeline in Triton: block stats, rejection, resample, insert, in line and without a host read.

The rule is stated in the twin, whose uniforms these kernels reproduce bit for bit. The logits are read once,
by block stats; what follows reads a handful of values, and one block of one row per request. Only drafts with a law
need more: resample reads one row of p and q per request, and block verification, before that, the rows it is in doubt
about. Every launch can be captured in a graph. Legend: B requests, V vocabulary, K drafts per request at most.
"""

# Triton gives launches and kernel bodies meanings that its own annotations do not express.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from .records import VOCAB_BLOCK, RejectionInputs, RejectionOutputs, Stream, VerifyMode
from .sampling import (
    DRAW_WARPS,
    STATS_WARPS,
    block_log_masses,
    block_stats,
    draw_block,
    draw_token,
    log_sum_exp,
    noise_key,
    uniform,
)

_ACCEPT = tl.constexpr(int(Stream.ACCEPT))
_RECOVER = tl.constexpr(int(Stream.RECOVER))


def verify(inputs: RejectionInputs, *, fp64_gumbel: bool = False) -> RejectionOutputs:
    """See its twin; tensors on one GPU."""
    inputs.check()
    logits, drafts = inputs.target_logits, inputs.draft_token_ids.contiguous()
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    vocab, (batch, k) = logits.shape[1], drafts.shape
    law = None if inputs.draft_log_probs is None or k == 0 else inputs.draft_log_probs.contiguous()

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=logits.device)

    token_ids = empty(batch, k + 1, dtype=torch.int64)
    num_emitted, failed = empty(batch, dtype=torch.int32), empty(batch, dtype=torch.bool)
    outputs = RejectionOutputs(token_ids, num_emitted, failed)
    if batch == 0:
        return outputs

    stats = block_stats(logits)
    num_blocks = stats.total.shape[1]
    columns = None if law is None or inputs.law_columns is None else inputs.law_columns.contiguous()
    keyed_by = (inputs.cu_rows.contiguous(), inputs.positions.contiguous(), inputs.seeds.contiguous())
    shared = (logits, drafts, law, columns, *keyed_by, inputs.temperature.contiguous(), *stats)
    sizes = (logits.stride(0), vocab, k, 0 if law is None else law.shape[-1], num_blocks)
    widths = {"NUM_BLOCKS": triton.next_power_of_2(num_blocks), "STEPS": triton.next_power_of_2(k + 1)}

    weight, left_over = None, None
    if inputs.mode is VerifyMode.BLOCK and law is not None:
        weight, shift, left_over = empty(batch, k), empty(batch, k), empty(batch, k, num_blocks)
        _weight_kernel[(batch,)](*shared, weight, shift, *sizes, **widths, num_warps=2)
        _left_over_kernel[(batch * k * num_blocks,)](
            *(logits, law, columns, keyed_by[0], shift, left_over), *sizes, BLOCK=VOCAB_BLOCK, num_warps=STATS_WARPS
        )
    rates = None if inputs.rates is None else inputs.rates.contiguous()
    last_shift = None if law is None else empty(batch)
    _rejection_kernel[(batch,)](
        *(*shared, rates, weight, left_over, *outputs, last_shift), *sizes, **widths, num_warps=2
    )
    mass = None
    if law is not None:
        mass = empty(batch, num_blocks)
        _resample_kernel[(batch * num_blocks,)](
            *(*shared[:5], shared[7], num_emitted, last_shift, mass),
            *sizes,
            BLOCK=VOCAB_BLOCK,
            num_warps=STATS_WARPS,
        )
    _insert_kernel[(batch,)](
        *(*shared, num_emitted, last_shift, mass, token_ids),
        *sizes,
        NUM_BLOCKS=widths["NUM_BLOCKS"],
        BLOCK=VOCAB_BLOCK,
        FP64=fp64_gumbel,
        num_warps=DRAW_WARPS,
    )
    return outputs


@triton.jit
def _drafts_of(cu_rows, request, K):
    """First logits row and number of drafts; -1 drafts where a request has no row at all."""
    start = tl.load(cu_rows + request).to(tl.int64)
    return start, tl.minimum(tl.load(cu_rows + request + 1).to(tl.int64) - start - 1, K)


@triton.jit
def _draft_at(drafts, request, step, num_drafts, V, K):
    """The draft ids at the given steps, -1 for placeholders and past the last one."""
    draft = tl.load(drafts + request * K + step, mask=step < num_drafts, other=-1)
    return tl.where(draft < V, tl.maximum(draft, -1), -1)


@triton.jit
def _row_stats(maximum, total, top, rows, owned, num_blocks, V, NUM_BLOCKS: tl.constexpr):
    """Of the rows [STEPS]: log of the sum of exp, the lowest id of the maximum, and whether the row is unusable."""
    blocks = tl.arange(0, NUM_BLOCKS)[None, :]
    where, mask = rows[:, None] * num_blocks + blocks, owned[:, None] & (blocks < num_blocks)
    maxima = tl.load(maximum + where, mask=mask, other=float("-inf"))
    totals = tl.load(total + where, mask=mask, other=0.0)
    tops = tl.load(top + where, mask=mask, other=V - 1)
    largest = tl.max(maxima, 1)
    bad = (largest == float("-inf")) | (largest == float("inf"))
    base = tl.where(bad, 0.0, largest)
    lse = base + tl.log(tl.sum(totals * tl.exp(maxima - base[:, None]), 1))
    best = tl.min(tl.where(maxima == largest[:, None], tops, V - 1), 1)
    return tl.where(bad, 0.0, lse), best, bad


@triton.jit
def _log_odds(
    logits, law, columns, request, rows, steps, draft, lse,
    row_stride, K, law_width,
):  # fmt: skip
    """log p and log q of the drafts; -inf for p of a placeholder and for q of a draft its law cannot draw."""
    real = draft >= 0
    log_p = tl.load(logits + rows * row_stride + draft, mask=real, other=float("-inf")).to(tl.float32) - lse
    log_q = lse * 0.0
    if law is not None:
        column = draft
        if columns is not None:
            column = tl.load(columns + draft, mask=real, other=-1).to(tl.int64)
        law_row = law + (request * K + steps) * law_width
        log_q = tl.load(law_row + column, mask=real & (column >= 0), other=float("-inf"))
    return log_p, log_q


@triton.jit
def _left_over(score, shift, law_row, columns, token, inside):
    """max(w p - q, 0) over the tokens of a block, where w p = exp(score - shift)."""
    column = token.to(tl.int64)
    if columns is not None:
        column = tl.load(columns + token, mask=inside, other=-1).to(tl.int64)
    log_q = tl.load(law_row + column, mask=inside & (column >= 0), other=float("-inf"))
    left = tl.exp(score - shift) - tl.exp(log_q)
    return tl.where(left > 0, left, 0.0)


@triton.jit
def _weight_kernel(
    logits, drafts, law, columns, cu_rows, positions, seeds, temperature, maximum, total, top,
    weight, shift,
    row_stride, V, K, law_width, num_blocks,
    NUM_BLOCKS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Block verification: log of P after each draft [B, K], and where the left-over mass behind it must be known.

    `shift` makes the next row's w p of it; +inf = not needed: chance h of keeping a prefix never exceeds P and is 1
    where P is, so most draws of u settle without it.
    """
    request = tl.program_id(0).to(tl.int64)
    start, num_drafts = _drafts_of(cu_rows, request, K)
    steps = tl.arange(0, STEPS).to(tl.int64)
    rows, owned = start + steps, steps <= num_drafts
    lse, _, bad = _row_stats(maximum, total, top, rows, owned, num_blocks, V, NUM_BLOCKS)
    draft = _draft_at(drafts, request, steps, num_drafts, V, K)
    log_p, log_q = _log_odds(logits, law, columns, request, rows, steps, draft, lse, row_stride, K, law_width)
    ratio = tl.where((log_q > float("-inf")) & (draft >= 0) & (bad == 0), log_p - log_q, float("-inf"))

    log_weight = ratio
    running = 0.0
    for step in range(0, K):
        running = tl.minimum(running + tl.sum(tl.where(steps == step, ratio, 0.0), 0), 0.0)
        log_weight = tl.where(steps == step, running, log_weight)
    tl.store(weight + request * K + steps, log_weight, mask=steps < K)

    length = tl.min(tl.where(draft < 0, steps, STEPS), 0)  # drafts before the first placeholder
    log_u = tl.log(uniform(noise_key(tl.load(seeds + request), tl.load(positions + request), _ACCEPT), steps, False))
    kept = (steps < length) & ((log_weight == 0.0) | ((steps == length - 1) & (log_u < log_weight)))
    num_open = tl.where(tl.load(temperature + request) == 0.0, 0, length - 1)
    doubtful = (steps < num_open) & (steps > tl.max(tl.where(kept, steps, -1), 0)) & (log_u < log_weight)
    # this step's weight goes with the next step's row
    next_lse, _, next_bad = _row_stats(
        maximum, total, top, rows + 1, steps + 1 <= num_drafts, num_blocks, V, NUM_BLOCKS
    )
    shifts = tl.where(doubtful & (next_bad == 0), next_lse - log_weight, float("inf"))
    tl.store(shift + request * K + steps, shifts, mask=steps < K)


@triton.jit
def _left_over_kernel(
    logits, law, columns, cu_rows, shift, left_over,
    row_stride, V, K, law_width, num_blocks,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Mass of max(P p - q, 0) per block of the row after each draft, where `shift` asks for it, else 0."""
    out = tl.program_id(0).to(tl.int64)
    draft, block = out // num_blocks, out % num_blocks
    scale = tl.load(shift + draft)
    if scale == float("inf"):
        tl.store(left_over + out, 0.0)
        return
    row = tl.load(cu_rows + draft // K).to(tl.int64) + draft % K + 1
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < V
    score = tl.load(logits + row * row_stride + token, mask=inside, other=float("-inf")).to(tl.float32)
    left = _left_over(score, scale, law + (draft + 1) * law_width, columns, token, inside)
    tl.store(left_over + out, tl.sum(left, 0))


@triton.jit
def _rejection_kernel(
    logits, drafts, law, columns, cu_rows, positions, seeds, temperature, maximum, total, top,
    rates, weight, left_over,
    token_ids, num_emitted, failed, last_shift,
    row_stride, V, K, law_width, num_blocks,
    NUM_BLOCKS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Finds how many drafts are kept, writes them, and the argmax behind them for a greedy request."""
    request = tl.program_id(0).to(tl.int64)
    start, num_drafts = _drafts_of(cu_rows, request, K)
    steps = tl.arange(0, STEPS).to(tl.int64)
    rows = start + steps
    lse, best, unusable = _row_stats(maximum, total, top, rows, steps <= num_drafts, num_blocks, V, NUM_BLOCKS)
    draft = _draft_at(drafts, request, steps, num_drafts, V, K)
    greedy = tl.load(temperature + request) == 0.0
    u = uniform(noise_key(tl.load(seeds + request), tl.load(positions + request), _ACCEPT), steps, False)

    log_weight = lse * 0.0
    if rates is not None:
        passed = u < tl.load(rates + steps, mask=steps < K, other=0.0)
    else:
        log_p, log_q = _log_odds(logits, law, columns, request, rows, steps, draft, lse, row_stride, K, law_width)
        passed = (log_q > float("-inf")) & (tl.log(u) + log_q < log_p)
        passed = tl.where(greedy, draft == best, passed)
    passed = passed & (draft >= 0) & (unusable == 0)
    last = tl.min(tl.where(passed, STEPS, steps), 0)
    needed = steps == last
    if weight is not None:
        log_weight = tl.load(weight + request * K + steps, mask=steps < K, other=0.0)
        blocks = tl.arange(0, NUM_BLOCKS)[None, :]
        parts = left_over + (request * K + steps[:, None]) * num_blocks + blocks
        left = tl.sum(tl.load(parts, mask=(steps[:, None] < K) & (blocks < num_blocks), other=0.0), 1)
        length = tl.min(tl.where(draft < 0, steps, STEPS), 0)
        kept = u * (left + 1.0 - tl.exp(log_weight)) < left
        kept = tl.where(steps == length - 1, tl.log(u) < log_weight, kept | (log_weight == 0.0))
        longest = tl.max(tl.where(kept & (steps < length), steps + 1, 0), 0)
        last = tl.where(greedy, last, longest)
        needed = (steps == last) | (steps < tl.where(greedy, 0, length))

    fails = tl.max((unusable & needed).to(tl.int32), 0) > 0
    num_kept = tl.where(fails, 0, last + 1)
    emitted = tl.where(steps == last, best, draft)
    emitted = tl.where(steps < num_kept, emitted, -1)
    tl.store(token_ids + request * (K + 1) + steps, emitted, mask=steps <= K)
    tl.store(num_emitted + request, num_kept.to(tl.int32))
    tl.store(failed + request, fails)
    if last_shift is not None:
        shift = tl.sum(tl.where(steps == last, lse, 0.0), 0)
        if weight is not None:
            shift -= tl.sum(tl.where(steps == last - 1, log_weight, 0.0), 0)
        tl.store(last_shift + request, shift)


@triton.jit
def _resample_kernel(
    logits, drafts, law, columns, cu_rows, temperature, num_emitted, last_shift, mass,
    row_stride, V, K, law_width, num_blocks,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Mass of the residual law per block of the row where a draft was rejected."""
    out = tl.program_id(0).to(tl.int64)
    request, block = out // num_blocks, out % num_blocks
    last = tl.load(num_emitted + request).to(tl.int64) - 1
    if (tl.load(temperature + request) == 0.0) | (last < 0):
        return
    start, num_drafts = _drafts_of(cu_rows, request, K)
    if _draft_at(drafts, request, last, num_drafts, V, K) < 0:
        return
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < V
    score = tl.load(logits + (start + last) * row_stride + token, mask=inside, other=float("-inf")).to(tl.float32)
    law_row = law + (request * K + last) * law_width
    left = _left_over(score, tl.load(last_shift + request), law_row, columns, token, inside)
    tl.store(mass + out, tl.sum(left, 0))


@triton.jit
def _insert_kernel(
    logits, drafts, law, columns, cu_rows, positions, seeds, temperature, maximum, total, top,
    num_emitted, last_shift, mass, token_ids,
    row_stride, V, K, law_width, num_blocks,
    NUM_BLOCKS: tl.constexpr, BLOCK: tl.constexpr, FP64: tl.constexpr,
):  # fmt: skip
    """Draws the token after the kept drafts: a block by its mass, then an id in it."""
    request = tl.program_id(0).to(tl.int64)
    last = tl.load(num_emitted + request).to(tl.int64) - 1
    if (tl.load(temperature + request) == 0.0) | (last < 0):
        return
    start, num_drafts = _drafts_of(cu_rows, request, K)
    rejected = _draft_at(drafts, request, last, num_drafts, V, K)
    row = logits + (start + last) * row_stride
    key = noise_key(tl.load(seeds + request), tl.load(positions + request) + last, _RECOVER)
    blocks = tl.arange(0, NUM_BLOCKS)
    plain = block_log_masses(maximum, total, start + last, blocks, num_blocks)
    if law is None:
        own = tl.where(rejected >= 0, rejected // BLOCK, num_blocks)
        token = own * BLOCK + tl.arange(0, BLOCK)
        others = tl.load(row + token, mask=(token < V) & (token != rejected), other=float("-inf")).to(tl.float32)
        left = tl.where(blocks == own, log_sum_exp(others), plain)
    else:
        parts = mass + request * num_blocks + blocks
        left = tl.log(tl.load(parts, mask=blocks < tl.where(rejected >= 0, num_blocks, 0), other=0.0))
    anything_left = (rejected >= 0) & (tl.max(left, 0) > float("-inf"))
    block = draw_block(tl.where(anything_left, left, plain), key, blocks, FP64)
    token = block * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(row + token, mask=token < V, other=float("-inf")).to(tl.float32)
    if law is None:
        score = tl.where(token == tl.where(anything_left, rejected, -1), float("-inf"), score)
    else:
        law_row = law + (request * K + last) * law_width
        residual = _left_over(
            score, tl.load(last_shift + request), law_row, columns, token, token < tl.where(rejected >= 0, V, 0)
        )
        score = tl.where(anything_left, tl.log(residual), score)
    tl.store(token_ids + request * (K + 1) + last, draw_token(score, key, block, token, V, BLOCK, FP64))
