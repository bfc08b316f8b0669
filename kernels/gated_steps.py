"""A gated scan row by row in Triton: a program holds its part of one head's state from the first row to the last.

Its work depends on its own request only, so that results do not change with the requests beside it.
"""

# Triton gives launches and kernel bodies meanings that its own annotations do not express.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_VALUES = 32


def gated_steps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    memory: Tensor,
    state_rows: Tensor,
    starts: Tensor,
    counts: Tensor,
    first: Tensor,
    *,
    most: int,
) -> Tensor:
    """See its twin; tensors on one GPU, memory contiguous."""
    _, kept, heads, key, value = memory.shape
    if not memory.is_contiguous() or any(x is not None and x.dtype != memory.dtype for x in (q, k, v, log_decay, beta)):
        raise ValueError(f"states must be contiguous and inputs of their {memory.dtype}")
    out = torch.empty(len(q), heads, value, dtype=memory.dtype, device=memory.device)
    block = min(BLOCK_VALUES, triton.next_power_of_2(value))
    _gated_steps_kernel[len(counts), heads, triton.cdiv(value, block)](
        *(q.contiguous(), k.contiguous(), v.contiguous(), log_decay.contiguous()),
        *(None if beta is None else beta.contiguous(), memory, out, state_rows, starts, counts, first, heads, most),
        BY_KEY=log_decay.dim() == 3,
        GROUP=heads // q.shape[1],
        KEPT=kept,
        KEY=key,
        VALUE=value,
        BLOCK_KEY=triton.next_power_of_2(key),
        BLOCK_VALUE=block,
    )
    return out


@triton.jit
def _gated_steps_kernel(
    q, k, v, log_decay, beta, memory, out, state_rows, starts, counts, first, heads, most,
    BY_KEY: tl.constexpr, GROUP: tl.constexpr, KEPT: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr,
):  # fmt: skip
    request, head = tl.program_id(0), tl.program_id(1)
    count = tl.load(counts + request)
    if count <= most:
        start, row = tl.load(starts + request), tl.load(first + request)
        keys, values = tl.arange(0, BLOCK_KEY), tl.program_id(2) * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
        in_key, in_value = keys < KEY, values < VALUE
        inside = in_key[:, None] & in_value[None, :]
        # the state after position 0; a later one lies `heads` states behind the one before it
        states = memory + (tl.load(state_rows + request) * KEPT * heads + head) * KEY * VALUE
        states += keys[:, None] * VALUE + values[None, :]
        stride = heads * KEY * VALUE
        before = (start + KEPT - 1) % KEPT
        state = tl.where(start > 0, tl.load(states + before * stride, mask=inside, other=0.0), 0.0)
        for step in range(count):
            at = (row + step) * heads + head
            shared = ((row + step) * (heads // GROUP) + head // GROUP) * KEY + keys
            q_row = tl.load(q + shared, mask=in_key, other=0.0)
            k_row = tl.load(k + shared, mask=in_key, other=0.0)
            update = tl.load(v + at * VALUE + values, mask=in_value, other=0.0)
            if BY_KEY:
                state *= tl.exp(tl.load(log_decay + at * KEY + keys, mask=in_key, other=0.0))[:, None]
            else:
                state *= tl.exp(tl.load(log_decay + at))
            if beta is not None:
                update = (update - tl.sum(state * k_row[:, None], 0)) * tl.load(beta + at)
            state += k_row[:, None] * update[None, :]
            tl.store(out + at * VALUE + values, tl.sum(state * q_row[:, None], 0), mask=in_value)
            tl.store(states + (start + step) % KEPT * stride, state, mask=inside)
