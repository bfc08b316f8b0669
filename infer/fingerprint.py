"""What identifies a target: its shape, and a hash over sampled values of its weights."""

import dataclasses
import hashlib
from typing import Any

import torch
from torch import nn

from ..heads.base import TargetFacts

SAMPLES = 8


def of_model(model: nn.Module, facts: TargetFacts) -> dict[str, Any]:
    """JSON-ready: `shape` (what must match), `weights` (hashes that differ for other weights) and `facts`.

    Values are sampled in bfloat16, so that the same checkpoint loaded in float32 and bfloat16 agrees.
    """
    names, values = hashlib.sha256(), hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        names.update(f"{name} {list(parameter.shape)}\n".encode())
        # float32 cannot count the elements of a large matrix
        index = torch.linspace(0, parameter.numel() - 1, min(SAMPLES, parameter.numel()), dtype=torch.float64).long()
        sample = parameter.detach().flatten()[index.to(parameter.device)]
        values.update(sample.to(torch.bfloat16).view(torch.int16).cpu().numpy().tobytes())
    return {
        "shape": {
            "model_type": facts.model_type,
            "hidden_size": facts.hidden_size,
            "num_layers": facts.num_layers,
            "vocab_size": facts.vocab_size,
        },
        "weights": {"tensors": names.hexdigest(), "values": values.hexdigest()},
        "facts": dataclasses.asdict(facts),
    }
