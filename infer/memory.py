"""What an engine takes of a device's memory: blocks of the cache, and the states of recurrent layers beside them."""

from collections.abc import Sequence

import torch

from .planes import PlaneSpec
from .recurrent import StateSpec
from .request import EngineError


def count_blocks(
    specs: Sequence[PlaneSpec], block_size: int, free: int, *, wanted: int, given: int | None, share: float
) -> int:
    """`given` blocks, else those `wanted` or as many as `share` of the free bytes holds; EngineError beyond memory."""
    block_bytes = sum(spec.bytes_per_token for spec in specs) * block_size
    if given is None:
        return max(2, min(wanted, int(free * share) // block_bytes))
    if given * block_bytes > free:
        raise EngineError(
            f"a cache of {given} blocks takes {given * block_bytes / 2**30:.1f} GiB, free are "
            f"{free / 2**30:.1f}; lower --num-blocks to {free // block_bytes} or less"
        )
    return given


def state_bytes(specs: Sequence[StateSpec], num_requests: int, num_draft_tokens: int, free: int) -> int:
    """What recurrent layers keep of a full batch, and of nobody; EngineError beyond the free bytes."""
    each = sum(spec.bytes_per_request(num_draft_tokens) for spec in specs)
    taken = each * (num_requests + 1)
    if taken > free:
        raise EngineError(
            f"the recurrent states of {num_requests} requests, {num_draft_tokens + 1} of each, take "
            f"{taken / 2**30:.1f} GiB, free are {free / 2**30:.1f}; lower --batch-size to "
            f"{max(1, free // each - 1)} or less, or draft fewer tokens"
        )
    return taken


def free_memory(device: torch.device) -> int:
    """Bytes a new allocation can take, what torch has reserved and does not use included."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    import psutil

    return psutil.virtual_memory().available
