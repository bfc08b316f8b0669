"""Counter-based noise: every number is a pure function of (seed, position, stream, token id), whatever the batch.

SplitMix64 (Steele, Lea, Flood 2014): the key of a (seed, position, stream) is a chain of its finaliser, and the number
of counter c is the finaliser of key + (c + 1) * golden. Token v counts as c = v, block b of the vocabulary as
BLOCK_COUNTERS + b. The Triton side, `sampling.py`, holds the same arithmetic.
"""

import torch
from torch import Tensor

from .records import Stream

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
BLOCK_COUNTERS = 1 << 32
LARGEST_UNIFORM = 1 - 2.0**-24
"""A float32 uniform stops short of 1, so that neither log nor log1p of its complement is infinite."""


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _mix_(z: Tensor) -> Tensor:
    shifted = torch.empty_like(z)
    for shift, factor in ((30, MIX_1), (27, MIX_2), (31, 1)):
        torch.bitwise_right_shift(z, shift, out=shifted)
        z ^= shifted.bitwise_and_((1 << (64 - shift)) - 1)  # the shift above copies the sign
        z *= _signed(factor)
    return z


def noise_keys(seeds: Tensor, positions: Tensor, stream: Stream | int) -> Tensor:
    """The key [...] int64 of each (seed, position) pair [...] int64 within a stream."""
    key = _mix_(seeds + _signed(GOLDEN))
    key = _mix_((key ^ positions) + _signed(GOLDEN))
    return _mix_((key ^ int(stream)) + _signed(GOLDEN))


def uniforms(keys: Tensor, counters: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Uniforms in (0, 1) of keys and counters int64, broadcast together; small ones keep their relative precision."""
    bits = _mix_(keys + (counters + 1) * _signed(GOLDEN))
    bits >>= 11
    bits &= (1 << 53) - 1
    value = bits.to(dtype).add_(0.5).mul_(2.0**-53)
    return value.clamp_(max=LARGEST_UNIFORM if dtype == torch.float32 else 1 - 2.0**-53)


def gumbels(keys: Tensor, counters: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard Gumbel noise of keys and counters int64, broadcast; the long upper tail comes from small uniforms."""
    return uniforms(keys, counters, dtype).neg_().log1p_().neg_().log_().neg_()
