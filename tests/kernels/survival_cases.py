"""The survival kernels against their twins; compiled on a GPU, else interpreted by `test_triton.py`."""

import pytest
import torch

from spectrain.kernels import reference, survival
from spectrain.kernels.records import SurvivalModel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def model_of(k: int) -> SurvivalModel:
    coefficients = torch.tensor([[0.0, 1.0]], device=DEVICE).repeat(k, 1)
    return SurvivalModel(coefficients, torch.zeros(k, 3, device=DEVICE), torch.zeros(k, 2, device=DEVICE))


@pytest.mark.parametrize(("batch", "k"), [(1, 1), (1, 7), (3, 5), (64, 7), (65, 3), (200, 8), (7, 16)])
def test_learning_and_reading_equal_the_twins(batch: int, k: int):
    generator = torch.Generator().manual_seed(batch + k)
    ours, twin = model_of(k), model_of(k)
    for _ in range(6):
        odds = (2 * torch.randn(batch, k, generator=generator)).to(DEVICE)
        verified = torch.randint(0, k + 1, (batch,), generator=generator)
        accepted = torch.minimum(torch.randint(0, k + 1, (batch,), generator=generator), verified)
        emitted = (accepted + 1).int()
        emitted[-1] = 0  # a request that failed
        verified, emitted = verified.to(DEVICE), emitted.to(DEVICE)
        survival.learn_survival(ours, odds, verified, emitted, 50.0)
        reference.survival.learn_survival(twin, odds, verified, emitted, 50.0)
        for one, other in zip(ours, twin, strict=True):
            torch.testing.assert_close(one, other, atol=2e-4, rtol=2e-4)
        found = survival.draft_survival(ours, odds, verified)
        torch.testing.assert_close(found, reference.survival.draft_survival(twin, odds, verified), atol=2e-4, rtol=2e-4)
        taken = torch.arange(k, device=DEVICE) < verified[:, None]
        assert ((found == -1) == ~taken).all()
    assert batch == 1 or (ours.coefficients[0] - model_of(k).coefficients[0]).abs().max() > 0.05


def test_survival_never_rises_with_the_position():
    odds = torch.full((130, 16), 20.0, device=DEVICE)
    found = survival.draft_survival(model_of(16), odds, torch.full((130,), 16, device=DEVICE))
    assert (found.diff(dim=1) <= 0).all()
