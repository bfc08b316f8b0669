"""The rejection pipeline in Triton: four kernels in line (block stats, rejection, resample, insert), and sampling.

The rule is stated in `reference.verify`, whose uniforms these kernels reproduce bit for bit. Nothing here waits for the
GPU. Legend: B requests, N logits rows, V vocabulary, K drafts per request at most.
"""

# Triton gives launches and kernel bodies meanings that its own annotations do not express.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from .noise import GOLDEN, LARGEST_UNIFORM, MIX_1, MIX_2
from .records import RejectionInputs, RejectionOutputs, Stream

STATS_BLOCK = 8192
RESAMPLE_BLOCK = 1024

_GOLDEN = tl.constexpr(GOLDEN)
_MIX_1 = tl.constexpr(MIX_1)
_MIX_2 = tl.constexpr(MIX_2)
_ULP = tl.constexpr(2.0**-53)
_LARGEST = tl.constexpr(LARGEST_UNIFORM)
_ACCEPT = tl.constexpr(int(Stream.ACCEPT))
_RECOVER = tl.constexpr(int(Stream.RECOVER))


def verify(inputs: RejectionInputs, *, fp64_gumbel: bool = False) -> RejectionOutputs:
    """See `reference.verify`; tensors on one GPU."""
    inputs.check_shapes()
    logits, drafts = _rows(inputs.target_logits), inputs.draft_token_ids.contiguous()
    (num_rows, vocab), (batch, k) = logits.shape, drafts.shape
    cu_rows, temperature = inputs.cu_rows.contiguous(), inputs.temperature.contiguous()
    positions, seeds = inputs.positions.contiguous(), inputs.seeds.contiguous()
    law = None if inputs.draft_log_probs is None else inputs.draft_log_probs.contiguous()
    columns = _columns_of(inputs.token_map, vocab)
    law_width = 0 if law is None else law.shape[-1]

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    token_ids = empty(batch, k + 1, dtype=torch.int64)
    num_emitted, failed = empty(batch, dtype=torch.int32), empty(batch, dtype=torch.bool)
    if batch == 0:
        return RejectionOutputs(token_ids, num_emitted, failed)

    num_blocks = triton.cdiv(vocab, STATS_BLOCK)
    block_max, block_sum = (empty(num_rows, num_blocks, dtype=torch.float32) for _ in range(2))
    block_argmax = empty(num_rows, num_blocks, dtype=torch.int64)
    _block_stats_kernel[(num_rows, num_blocks)](
        logits, block_max, block_sum, block_argmax, logits.stride(0), vocab, num_blocks, BLOCK=STATS_BLOCK, num_warps=8
    )
    accepted, lse = empty(batch, dtype=torch.int32), empty(batch, dtype=torch.float32)
    rejected_id = empty(batch, dtype=torch.int64)
    shared = (logits, drafts, law, columns, cu_rows, positions, temperature, seeds)
    _rejection_kernel[(batch,)](
        *shared,
        *(block_max, block_sum, block_argmax),
        *(token_ids, num_emitted, failed, accepted, lse, rejected_id),
        *(logits.stride(0), vocab, k, law_width, num_blocks),
        NUM_BLOCKS=triton.next_power_of_2(num_blocks),
        STEPS=triton.next_power_of_2(k + 1),
        num_warps=1,
    )
    num_blocks = triton.cdiv(vocab, RESAMPLE_BLOCK)
    noise_dtype = torch.float64 if fp64_gumbel else torch.float32
    best, best_plain = (empty(batch, num_blocks, dtype=noise_dtype) for _ in range(2))
    best_id, best_plain_id = (empty(batch, num_blocks, dtype=torch.int64) for _ in range(2))
    _resample_kernel[(batch, num_blocks)](
        *shared,
        *(failed, accepted, lse, rejected_id),
        *(best, best_id, best_plain, best_plain_id),
        *(logits.stride(0), vocab, k, law_width, num_blocks),
        FP64=fp64_gumbel,
        BLOCK=RESAMPLE_BLOCK,
    )
    _insert_kernel[(batch,)](
        *(temperature, failed, accepted, rejected_id, best, best_id, best_plain, best_plain_id, token_ids),
        *(k, num_blocks),
        NUM_BLOCKS=triton.next_power_of_2(num_blocks),
    )
    return RejectionOutputs(token_ids, num_emitted, failed)


def sample(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    stream: Stream,
    *,
    fp64_gumbel: bool = False,
) -> Tensor:
    """See `reference.sample`; tensors on one GPU."""
    logits = _rows(logits)
    batch, vocab = logits.shape
    num_blocks = triton.cdiv(vocab, RESAMPLE_BLOCK)
    noise_dtype = torch.float64 if fp64_gumbel else torch.float32
    best = torch.empty(batch, num_blocks, dtype=noise_dtype, device=logits.device)
    best_id = torch.empty(batch, num_blocks, dtype=torch.int64, device=logits.device)
    if batch:
        _sample_kernel[(batch, num_blocks)](
            *(logits, temperature.contiguous(), seeds.contiguous(), positions.contiguous(), best, best_id),
            *(logits.stride(0), vocab, num_blocks),
            STREAM=int(stream),
            FP64=fp64_gumbel,
            BLOCK=RESAMPLE_BLOCK,
        )
    return best_id.gather(1, best.argmax(dim=1, keepdim=True))[:, 0].clamp_(max=vocab - 1)


def _rows(logits: Tensor) -> Tensor:
    logits = logits.float()
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _columns_of(token_map: Tensor | None, vocab: int) -> Tensor | None:
    """The law's column of each target id [vocab] int32, -1 where it has none."""
    if token_map is None:
        return None
    columns = torch.full((vocab,), -1, dtype=torch.int32, device=token_map.device)
    columns[token_map] = torch.arange(token_map.shape[0], dtype=torch.int32, device=token_map.device)
    return columns


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return z ^ (z >> 31)


@triton.jit
def _noise_key(seed, position, STREAM: tl.constexpr):
    key = _mix(seed.to(tl.uint64) + _GOLDEN)
    key = _mix((key ^ position.to(tl.uint64)) + _GOLDEN)
    return _mix((key ^ STREAM) + _GOLDEN)


@triton.jit
def _uniform(key, token, FP64: tl.constexpr):
    bits = (_mix(key + (token.to(tl.uint64) + 1) * _GOLDEN) >> 11).to(tl.int64)
    if FP64:
        return (bits.to(tl.float64) + 0.5) * _ULP
    else:
        return tl.minimum((bits.to(tl.float32) + 0.5) * _ULP, _LARGEST)


@triton.jit
def _exponential(u, FP64: tl.constexpr):
    """-log(1 - u); small u by series in float32, because they win the race and 1 - u would round them off."""
    if FP64:
        return -tl.log(1.0 - u)
    else:
        series = u * (1.0 + u * (0.5 + u * (0.33333333 + u * (0.25 + u * 0.2))))
        return tl.where(u < 0.0625, series, -tl.log(1.0 - u))


@triton.jit
def _race(score, noise, offset, inside):
    """Best of score + noise in a block, and its token id."""
    total = tl.where(inside, score.to(noise.dtype) + noise, float("-inf"))
    return tl.max(total, 0), offset + tl.argmax(total, 0)


@triton.jit
def _block_stats_kernel(logits, block_max, block_sum, block_argmax, row_stride, V, num_blocks, BLOCK: tl.constexpr):
    """Max, argmax and sum of exp(l - max) of each block of each row; a NaN makes the max +inf: a bad row."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row * row_stride + token, mask=token < V, other=float("-inf"))
    has_nan = tl.sum((values != values).to(tl.int32), 0) > 0
    largest = tl.max(values, 0)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    out = row * num_blocks + block
    tl.store(block_max + out, tl.where(has_nan, float("inf"), largest))
    tl.store(block_sum + out, tl.sum(tl.exp(values - base), 0))
    tl.store(block_argmax + out, (block * BLOCK + tl.argmax(values, 0)).to(tl.int64))


@triton.jit
def _rejection_kernel(
    logits, drafts, law, columns, cu_rows, positions, temperature, seeds,
    block_max, block_sum, block_argmax,
    token_ids, num_emitted, failed, accepted, lse_out, rejected_id,
    row_stride, V, K, law_width, num_blocks,
    NUM_BLOCKS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Walks one request's drafts until one is rejected, and notes where the next token must be drawn."""
    request = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_rows + request).to(tl.int64)
    num_drafts = tl.load(cu_rows + request + 1).to(tl.int64) - start - 1
    greedy = tl.load(temperature + request) == 0.0
    seed, position = tl.load(seeds + request), tl.load(positions + request)
    blocks = tl.arange(0, NUM_BLOCKS)

    step = start * 0
    last = start * 0  # accepted drafts
    top, rejected = start * 0, start * 0 - 1
    lse = 0.0
    bad = False
    walking = True
    while walking:
        row = start + step
        maxima = tl.load(block_max + row * num_blocks + blocks, mask=blocks < num_blocks, other=float("-inf"))
        sums = tl.load(block_sum + row * num_blocks + blocks, mask=blocks < num_blocks, other=0.0)
        largest = tl.max(maxima, 0)
        bad = (largest == float("-inf")) | (largest == float("inf"))
        lse = largest + tl.log(tl.sum(sums * tl.exp(maxima - largest), 0))
        top = tl.load(block_argmax + row * num_blocks + tl.argmax(maxima, 0))

        draft = tl.load(drafts + request * K + step, mask=step < num_drafts, other=-1)
        real = (draft >= 0) & (draft < V)
        log_p = tl.load(logits + row * row_stride + draft, mask=real, other=float("-inf")) - lse
        log_u = tl.log(_uniform(_noise_key(seed, position + step, _ACCEPT), step * 0, False))
        passed = log_u < log_p
        if law is not None:
            column = draft
            if columns is not None:
                column = tl.load(columns + draft, mask=real, other=-1).to(tl.int64)
            law_row = law + (request * K + step) * law_width
            log_q = tl.load(law_row + column, mask=real & (column >= 0), other=float("-inf"))
            passed = (log_q > float("-inf")) & (log_u + log_q < log_p)
        passed = real & (bad == 0) & ((greedy & (draft == top)) | ((greedy == 0) & passed))
        last = step
        rejected = tl.where(real, draft, -1)
        step += 1
        walking = passed

    steps = tl.arange(0, STEPS)
    kept = tl.load(drafts + request * K + steps, mask=steps < last, other=-1)
    emitted = tl.where(steps == last, top, kept)
    num_kept = tl.where(bad, 0, last + 1)
    emitted = tl.where(steps < num_kept, emitted, -1)
    tl.store(token_ids + request * (K + 1) + steps, emitted, mask=steps <= K)
    tl.store(num_emitted + request, num_kept.to(tl.int32))
    tl.store(failed + request, bad)
    tl.store(accepted + request, last.to(tl.int32))
    tl.store(lse_out + request, lse)
    tl.store(rejected_id + request, rejected)


@triton.jit
def _resample_kernel(
    logits, drafts, law, columns, cu_rows, positions, temperature, seeds,
    failed, accepted, lse, rejected_id,
    best, best_id, best_plain, best_plain_id,
    row_stride, V, K, law_width, num_blocks,
    FP64: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gumbel race over one block of the residual, and over the target's own law should nothing be left of it."""
    request, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if (tl.load(temperature + request) == 0.0) | tl.load(failed + request):
        return
    step = tl.load(accepted + request).to(tl.int64)
    row = tl.load(cu_rows + request).to(tl.int64) + step
    rejected = tl.load(rejected_id + request)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < V
    score = tl.load(logits + row * row_stride + token, mask=inside, other=float("-inf"))
    key = _noise_key(tl.load(seeds + request), tl.load(positions + request) + step, _RECOVER)
    noise = -tl.log(_exponential(_uniform(key, token, FP64), FP64))

    out = request * num_blocks + block
    value, index = _race(score, noise, block * BLOCK, inside)
    tl.store(best_plain + out, value)
    tl.store(best_plain_id + out, index.to(tl.int64))
    if law is not None:
        column = token.to(tl.int64)
        if columns is not None:
            column = tl.load(columns + token, mask=inside, other=-1).to(tl.int64)
        column = tl.where(rejected >= 0, column, -1)
        law_row = law + (request * K + step) * law_width
        log_q = tl.load(law_row + column, mask=inside & (column >= 0), other=float("-inf"))
        left = tl.exp(score - tl.load(lse + request)) - tl.exp(log_q)
        score = tl.where(left > 0, tl.log(tl.where(left > 0, left, 1.0)), float("-inf"))
    else:
        score = tl.where(token == rejected, float("-inf"), score)
    value, index = _race(score, noise, block * BLOCK, inside)
    tl.store(best + out, value)
    tl.store(best_id + out, index.to(tl.int64))


@triton.jit
def _insert_kernel(
    temperature, failed, accepted, rejected_id, best, best_id, best_plain, best_plain_id, token_ids,
    K, num_blocks,
    NUM_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Writes the drawn token after the accepted drafts."""
    request = tl.program_id(0).to(tl.int64)
    if (tl.load(temperature + request) == 0.0) | tl.load(failed + request):
        return
    blocks = tl.arange(0, NUM_BLOCKS)
    row = request * num_blocks
    residual = tl.load(best + row + blocks, mask=blocks < num_blocks, other=float("-inf"))
    plain = tl.load(best_plain + row + blocks, mask=blocks < num_blocks, other=float("-inf"))
    token = tl.load(best_plain_id + row + tl.argmax(plain, 0))
    if (tl.load(rejected_id + request) >= 0) & (tl.max(residual, 0) > float("-inf")):
        token = tl.load(best_id + row + tl.argmax(residual, 0))
    tl.store(token_ids + request * (K + 1) + tl.load(accepted + request), token)


@triton.jit
def _sample_kernel(
    logits, temperature, seeds, positions, best, best_id,
    row_stride, V, num_blocks,
    STREAM: tl.constexpr, FP64: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gumbel race (temperature 0: plain argmax) over one block of one row."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(logits + row * row_stride + token, mask=token < V, other=float("-inf"))
    key = _noise_key(tl.load(seeds + row), tl.load(positions + row), STREAM)
    noise = -tl.log(_exponential(_uniform(key, token, FP64), FP64))
    noise = tl.where(tl.load(temperature + row) == 0.0, 0.0, noise)
    value, index = _race(score, noise, block * BLOCK, token < V)
    tl.store(best + row * num_blocks + block, value)
    tl.store(best_id + row * num_blocks + block, index.to(tl.int64))
