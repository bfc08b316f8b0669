"""Programmatic dependent launch: a kernel that starts while the one before it still runs, on GPUs that can (Hopper on).

A kernel launched with these options must call `gdc_wait` in every program before it reads or writes anything; it may
only ask the cache for lines earlier, which shows no one an old value. Then order is kept as if each kernel waited for
the one before. Right after it calls `gdc_launch_dependents`: the next kernel asks for its weights just when this one
leaves the memory idle.
"""

import functools
from typing import Any

import torch
from torch import Tensor


def options(tensor: Tensor) -> dict[str, Any]:
    """Launch options for kernels that take the constant OVERLAP, for the device of `tensor`."""
    if tensor.is_cuda and _can_overlap(tensor.device.index):
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}


@functools.cache
def _can_overlap(device: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
