"""What several engine tests start from, and padding that must not matter."""

import pytest
import torch

from spectrain.infer.target import Target
from spectrain.kernels import reference
from spectrain.kernels.records import AttentionInputs
from spectrain.tests.models import rand_llama


@pytest.fixture(scope="module")
def target() -> Target:
    """A random target of 128 positions, unless a file has its own."""
    return Target.from_model(rand_llama(max_position_embeddings=128))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Of very different lengths."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 97, (n,), generator=generator).tolist() for n in (1, 3, 17, 26, 9)]


@pytest.fixture
def poisoned_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention leaves rows that belong to nobody as they were: here NaN, which they then carry into block 0."""
    attention = reference.attention.paged_attention

    def poisoned(inputs: AttentionInputs) -> torch.Tensor:
        out = attention(inputs)
        out[int(inputs.cu_seqlens[-1]) :] = torch.nan
        return out

    monkeypatch.setattr(reference.attention, "paged_attention", poisoned)
