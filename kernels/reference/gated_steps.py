"""A gated scan: the twin of `gated_steps.py`."""

import torch
from torch import Tensor


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
    """A gated scan of the rows of each request, one by one, which leaves the states after the last in `memory`.

    With S [key, value] by head, row by row: S *= exp(log_decay); u = beta * (v - S^T k), or v where `beta` is None;
    S += k u^T; the output is S^T q. Packed inputs in memory's dtype: q and k [num_tokens, key heads, key], each for as
    many consecutive heads; v [num_tokens, heads, value]; log_decay [num_tokens, heads], or by key [..., key]; beta
    [num_tokens, heads]. memory [num_rows, kept, heads, key, value], in which the state after position p stands at p
    modulo `kept`, by request at state_rows [batch]; the last row is nobody's. Request b has the counts[b] packed rows
    from first[b] on, at positions from starts[b] on; before position 0 its state is zero. Requests with more than
    `most` rows are left alone.

    Returns outputs [num_tokens, heads, value], which mean nothing for the rows of no request or of one left alone.
    """
    kept, nobody = memory.shape[1], len(memory) - 1
    state = memory[state_rows, (starts - 1) % kept]
    state = torch.where((starts > 0).view(-1, 1, 1, 1), state, 0)
    out = v.new_zeros(len(v) + 1, *v.shape[1:])
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], dim=1) for x in (q, k))
    decay = log_decay.exp()[..., None] if log_decay.dim() == 3 else log_decay.exp()[..., None, None]
    for step in range(most):
        live = (step < counts) & (counts <= most)
        at = torch.where(live, first + step, len(v))
        rows = at.clamp(max=len(v) - 1)
        after = state * decay[rows]
        update = v[rows]
        if beta is not None:
            update = (update - (after * k[rows, :, :, None]).sum(-2)) * beta[rows, :, None]
        after = after + k[rows, :, :, None] * update[..., None, :]
        state = torch.where(live.view(-1, 1, 1, 1), after, state)
        out[at] = (state * q[rows, :, :, None]).sum(-2)
        memory[torch.where(live, state_rows, nobody), (starts + step) % kept] = state
    return out[:-1]
