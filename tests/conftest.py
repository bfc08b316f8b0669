"""What several engine tests start from, and padding that must not matter."""

import pytest
import torch

from spectrain.kernels import reference


@pytest.fixture
def poisoned_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention leaves rows that belong to nobody as they were: here NaN, which they then carry into block 0."""
    attention = reference.paged_attention

    def poisoned(q, k_plane, v_plane, cu_seqlens, *arguments, **settings):
        out = attention(q, k_plane, v_plane, cu_seqlens, *arguments, **settings)
        out[int(cu_seqlens[-1]) :] = torch.nan
        return out

    monkeypatch.setattr(reference, "paged_attention", poisoned)
