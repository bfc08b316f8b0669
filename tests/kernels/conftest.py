"""What the kernel tests share."""

import math

import pytest
import torch
from torch import Tensor


@pytest.fixture
def poison_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a kernel forgets to write must show: NaN for floats, -7 for integers, True for flags."""
    empty = torch.empty

    def poisoned(*shape: int, **options: torch.dtype) -> Tensor:
        tensor = empty(*shape, **options)
        if tensor.dtype == torch.bool:
            return tensor.fill_(True)
        return tensor.fill_(math.nan if tensor.is_floating_point() else -7)

    monkeypatch.setattr(torch, "empty", poisoned)
