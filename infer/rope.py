"""Rotary frequencies that depend on the longest position of a batch, fixed for one longest position.

With several requests in a batch such a target would give each request frequencies that depend on its neighbours.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

ORIGINAL_TYPE = "spectrain_rope_type"


def pin_rope(model: nn.Module, max_length: int) -> list[str]:
    """Fixes long and dynamic rotary frequencies in place as for a request of `max_length` tokens.

    Returns the paths of the modules that were changed. May be called again with another length.
    """
    pinned = []
    for path, module in model.named_modules():
        rotary: Any = module
        rope_type = getattr(module, ORIGINAL_TYPE, getattr(module, "rope_type", None))
        if isinstance(rope_type, str) and _depends_on_length(rope_type):
            _pin(rotary, rope_type, None, max_length)
            rotary.rope_type = "default"
        elif isinstance(rope_type, Mapping) and any(map(_depends_on_length, rope_type.values())):
            for layer_type, kind in rope_type.items():
                if _depends_on_length(kind):
                    _pin(rotary, kind, layer_type, max_length)
            rotary.rope_type = {k: "default" if _depends_on_length(v) else v for k, v in rope_type.items()}
        else:
            continue
        setattr(module, ORIGINAL_TYPE, rope_type)
        pinned.append(path)
    return pinned


def _depends_on_length(rope_type: str) -> bool:
    return rope_type == "longrope" or "dynamic" in rope_type


def _pin(module: Any, rope_type: str, layer_type: str | None, max_length: int) -> None:
    prefix = "" if layer_type is None else f"{layer_type}_"
    extra = {} if layer_type is None else {"layer_type": layer_type}
    old: torch.Tensor = getattr(module, f"{prefix}inv_freq")
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](module.config, old.device, seq_len=max_length, **extra)
    module.register_buffer(f"{prefix}inv_freq", inv_freq.to(old.dtype), persistent=False)
    setattr(module, f"{prefix}attention_scaling", scaling)
