"""The counter-based noise: its published generator, its law, and the tail that decides races over many tokens."""

import math

import pytest
import torch

from spectrain.kernels.noise import gumbels, noise_keys, uniforms
from spectrain.kernels.records import Stream


def splitmix64(state: int) -> int:
    """The published generator in plain integers: finaliser of state + golden."""
    mask = (1 << 64) - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_noise_is_splitmix64() -> None:
    assert splitmix64(0) == 0xE220A8397B1DCDAF  # its first published output for seed 0
    for seed, position, stream in ((0, 0, Stream.DRAFT), (-5, 2**40, Stream.ACCEPT), (2**62, 7, Stream.RECOVER)):
        key = splitmix64(splitmix64(splitmix64(seed & (2**64 - 1)) ^ position) ^ stream)
        keys = noise_keys(torch.tensor([seed]), torch.tensor([position]), stream)
        assert int(keys[0]) & (2**64 - 1) == key
        word = splitmix64((key + 3 * 0x9E3779B97F4A7C15) & (2**64 - 1))
        found = uniforms(keys, torch.tensor([3]), torch.float64)
        assert float(found[0]) == pytest.approx(((word >> 11) + 0.5) * 2.0**-53, rel=1e-15)


def test_noise_is_uniform_and_streams_are_uncorrelated() -> None:
    n = 200_000
    columns = []
    for stream in Stream:
        u = uniforms(noise_keys(torch.arange(n), torch.full((n,), 3), stream), torch.tensor(9))
        assert float(u.min()) > 0 and float(u.max()) < 1
        distance = (u.sort().values - torch.arange(1, n + 1) / n).abs().max()
        assert float(distance) < 2.3 / math.sqrt(n)  # Kolmogorov-Smirnov at p of about 5e-5
        columns.append(u)
    others = (
        noise_keys(torch.arange(n), torch.full((n,), 4), Stream.DRAFT),
        noise_keys(torch.arange(n) + 1, torch.full((n,), 3), Stream.DRAFT),
    )
    columns += [uniforms(keys, torch.tensor(9)) for keys in others]
    off_diagonal = torch.corrcoef(torch.stack(columns)) - torch.eye(len(columns))
    assert float(off_diagonal.abs().max()) < 4.5 / math.sqrt(n)


def test_gumbel_tail_is_not_cut() -> None:
    """Rare tokens of a large vocabulary win by noise near 16.6, where uniforms of 24 bits would end and often tie."""
    noise = gumbels(
        noise_keys(torch.arange(200), torch.zeros(200, dtype=torch.int64), Stream.RECOVER)[:, None],
        torch.arange(100_000),
    )
    assert torch.isfinite(noise).all()
    assert float(noise.mean()) == pytest.approx(0.577216, abs=1e-3)
    largest = noise.max(dim=1).values - math.log(100_000)  # again standard Gumbel
    assert float(largest.mean()) == pytest.approx(0.577216, abs=4 * 1.2825 / math.sqrt(200))
    assert noise.flatten().topk(250).values.unique().numel() > 245
