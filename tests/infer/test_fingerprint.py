"""What identifies a target survives large matrices."""

import torch
from torch import nn

from spectrain.heads.base import TargetFacts
from spectrain.infer.fingerprint import of_model
from spectrain.tests.models import rand_llama


def test_matrix_beyond_what_float32_counts_is_sampled_inside_its_bounds() -> None:
    """49152 x 576 elements: rounding their last index to float32 lands one past the end."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(49152 * 576, dtype=torch.bfloat16), requires_grad=False)
    facts = TargetFacts.from_config(rand_llama(2).config)
    first = of_model(model, facts)
    model.weight[-1] = 1.0
    assert of_model(model, facts)["weights"]["values"] != first["weights"]["values"]
