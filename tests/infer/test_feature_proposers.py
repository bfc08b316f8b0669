"""What drafts of chains are drawn from."""

import pytest
import torch

from spectrain.infer.proposers.base import DraftStep
from spectrain.infer.target import Target
from spectrain.tests.fresh import fresh_proposer
from spectrain.tests.models import rand_llama


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_probabilistic_drafts_are_drawn_at_the_requests_temperature(temperature: float):
    proposer = fresh_proposer("eagle3", Target.from_model(rand_llama()), 1, "probabilistic")
    logits = torch.randn(2, 97, generator=torch.Generator().manual_seed(0))
    ones, slots = torch.ones(2, dtype=torch.int64), torch.arange(2)
    sampling = (torch.full((2,), temperature), torch.tensor([0, 1]))
    step = DraftStep([0, 1], slots, torch.zeros(2, 1), torch.tensor([3, 4]), torch.zeros(2), ones, *sampling)
    _, law = proposer._draw(logits, step, 0)
    torch.testing.assert_close(law.exp(), (logits / temperature).softmax(-1))
