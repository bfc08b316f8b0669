"""The online model of draft survival in Triton: one small launch to learn from a step, one to read from.

The rules are stated in the twins. A step has few drafts, so one program does it all; its time is that of one launch
where the twin takes some fifty. Legend: B requests, K drafts at most.
"""

# Triton gives launches and kernel bodies meanings that its own annotations do not express.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

import triton
import triton.language as tl
from torch import Tensor

from .records import SURVIVAL_PRIOR, SurvivalModel

_ROWS = 64
_BIAS_STRENGTH, _SLOPE_STRENGTH = (tl.constexpr(strength) for strength in SURVIVAL_PRIOR)


def learn_survival(
    model: SurvivalModel, log_odds: Tensor, num_verified: Tensor, num_emitted: Tensor, memory: float
) -> None:
    """See its twin; tensors on one GPU."""
    batch, k = log_odds.shape
    _learn_survival_kernel[(1,)](
        log_odds.contiguous(), num_verified, num_emitted, *model, batch, k, memory, triton.next_power_of_2(k), _ROWS
    )


def draft_survival(model: SurvivalModel, log_odds: Tensor, num_drafts: Tensor) -> Tensor:
    """See its twin; tensors on one GPU."""
    survival = log_odds.contiguous().new_empty(log_odds.shape)
    batch, k = log_odds.shape
    _draft_survival_kernel[(triton.cdiv(batch, _ROWS),)](
        log_odds.contiguous(), num_drafts, model.coefficients, survival, batch, k, _ROWS
    )
    return survival


@triton.jit
def _learn_survival_kernel(
    log_odds, num_verified, num_emitted, coefficients, information, evidence, B, K, memory,
    POSITIONS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    j = tl.arange(0, POSITIONS)
    real = j < K
    bias = tl.load(coefficients + 2 * j, mask=real, other=0.0)
    slope = tl.load(coefficients + 2 * j + 1, mask=real, other=0.0)
    before = real & (j > 0)
    centre_bias = tl.load(coefficients + 2 * j - 2, mask=before, other=0.0)
    centre_slope = tl.load(coefficients + 2 * j - 1, mask=before, other=1.0)
    count = tl.zeros([POSITIONS], tl.float32)
    info_bias, info_cross, info_slope, right_bias, right_slope = count, count, count, count, count
    for first in range(0, B, ROWS):
        row = first + tl.arange(0, ROWS)
        live = row < B
        z = tl.load(log_odds + row[:, None] * K + j[None, :], mask=live[:, None] & real[None, :], other=0.0)
        verified = tl.load(num_verified + row, mask=live, other=0).to(tl.int32)
        accepted = tl.load(num_emitted + row, mask=live, other=0).to(tl.int32) - 1
        reached = (j[None, :] < verified[:, None]) & (j[None, :] <= accepted[:, None])
        logit = bias[None, :] + slope[None, :] * z
        prob = 1 / (1 + tl.exp(-logit))
        weight = tl.where(reached, prob * (1 - prob), 0.0)
        took = tl.where(j[None, :] < accepted[:, None], 1.0, 0.0)
        response = tl.where(reached, took - prob, 0.0) + weight * logit
        count += tl.sum(tl.where(reached, 1.0, 0.0), axis=0)
        info_bias += tl.sum(weight, axis=0)
        info_cross += tl.sum(weight * z, axis=0)
        info_slope += tl.sum(weight * z * z, axis=0)
        right_bias += tl.sum(response, axis=0)
        right_slope += tl.sum(response * z, axis=0)
    keep = tl.exp(-count / memory)
    info_bias += keep * tl.load(information + 3 * j, mask=real, other=0.0)
    info_cross += keep * tl.load(information + 3 * j + 1, mask=real, other=0.0)
    info_slope += keep * tl.load(information + 3 * j + 2, mask=real, other=0.0)
    right_bias += keep * tl.load(evidence + 2 * j, mask=real, other=0.0)
    right_slope += keep * tl.load(evidence + 2 * j + 1, mask=real, other=0.0)
    tl.store(information + 3 * j, info_bias, mask=real)
    tl.store(information + 3 * j + 1, info_cross, mask=real)
    tl.store(information + 3 * j + 2, info_slope, mask=real)
    tl.store(evidence + 2 * j, right_bias, mask=real)
    tl.store(evidence + 2 * j + 1, right_slope, mask=real)
    a, d = info_bias + _BIAS_STRENGTH, info_slope + _SLOPE_STRENGTH
    right_bias += _BIAS_STRENGTH * centre_bias
    right_slope += _SLOPE_STRENGTH * centre_slope
    determinant = a * d - info_cross * info_cross
    bias = (d * right_bias - info_cross * right_slope) / determinant
    slope = (a * right_slope - info_cross * right_bias) / determinant
    # neighbours' coefficients were read above by other threads
    tl.debug_barrier()
    tl.store(coefficients + 2 * j, tl.minimum(tl.maximum(bias, -8.0), 8.0), mask=real)
    tl.store(coefficients + 2 * j + 1, tl.minimum(tl.maximum(slope, 0.0), 4.0), mask=real)


@triton.jit
def _draft_survival_kernel(log_odds, num_drafts, coefficients, survival, B, K, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < B
    drafted = tl.load(num_drafts + row, mask=live, other=0)
    product = tl.full([ROWS], 1.0, tl.float32)
    for j in range(0, K):
        z = tl.load(log_odds + row * K + j, mask=live, other=0.0)
        product *= 1 / (1 + tl.exp(-(tl.load(coefficients + 2 * j) + tl.load(coefficients + 2 * j + 1) * z)))
        tl.store(survival + row * K + j, tl.where(j < drafted, product, -1.0), mask=live)
