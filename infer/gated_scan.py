"""The arithmetic of recurrent layers on packed rows: a short causal convolution, and a gated scan of outer products.

Gated delta nets (Yang et al., 2024) and Mamba-2 (Dao and Gu, 2024) are one recurrence over a state S [key, value]:

    S_t = a_t S_{t-1} + k_t u_t^T,   o_t = S_t^T q_t,   u_t = b_t (v_t - a_t S_{t-1}^T k_t)   or, without b,   u_t = v_t

Few rows of a request are computed one by one, in an order of operations that no neighbour changes, and leave the state
after each of them; longer pieces of a prompt in chunks, of which only the last state is kept.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels import dispatch
from .batch import RequestRows

CHUNK = 64


class ScanInputs(NamedTuple):
    """What each row brings; `beta` is None where nothing is taken back from the state before it is written to."""

    q: Tensor  # [..., key heads, key]; each for as many consecutive heads
    k: Tensor  # [..., key heads, key]
    v: Tensor  # [..., heads, value]
    log_decay: Tensor  # [..., heads], or [..., heads, key]; log a, at most 0
    beta: Tensor | None  # [..., heads]

    def take(self, at: Tensor, live: Tensor) -> "ScanInputs":
        """Rows `at` of packed inputs; where not `live` rows that leave the state as it is."""
        at = at.clamp(max=len(self.q) - 1)

        def pick(x: Tensor) -> Tensor:
            return torch.where(live.view(*live.shape, *[1] * (x.dim() - 1)), x[at], 0)

        beta = None if self.beta is None else pick(self.beta)
        return ScanInputs(pick(self.q), pick(self.k), pick(self.v), pick(self.log_decay), beta)


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, memory: Tensor, rows: RequestRows) -> Tensor:
    """Depthwise convolution of each row with the rows before it, of this step or kept from earlier ones.

    x [num_tokens, channels]; weight [channels, kernel]; memory [num_rows, num_inputs, channels], which then keeps the
    newest rows of each request. Returns the shape and dtype of x.
    """
    taps, size = weight.shape[1], memory.shape[1]
    wide = torch.promote_types(x.dtype, torch.float32)
    position = rows.starts[:, None] + torch.arange(1 - taps, 0, device=x.device)
    tails = torch.where((position >= 0)[..., None], memory[rows.state_rows[:, None], position % size], 0)
    line = torch.cat([tails.flatten(0, 1), x])  # every request's tail, then this step's rows
    here = torch.arange(len(x), device=x.device) + len(line) - len(x)
    tail_end = (rows.owner + 1) * (taps - 1)
    out = x.new_zeros(x.shape, dtype=wide)
    for back in range(taps - 1, -1, -1):
        at = torch.where(rows.offset >= back, here - back, tail_end + rows.offset - back)
        out = out + line[at].to(wide) * weight[:, taps - 1 - back].to(wide)
    if bias is not None:
        out = out + bias.to(wide)
    keep = rows.live & (rows.offset >= rows.counts[rows.owner] - size)
    position = rows.starts[rows.owner] + rows.offset
    memory[torch.where(keep, rows.state_rows[rows.owner], len(memory) - 1), position % size] = x
    return out.to(x.dtype)


def gated_scan(x: ScanInputs, memory: Tensor, rows: RequestRows) -> Tensor:
    """Outputs [num_tokens, heads, value] of packed inputs, from the states kept before each request's first row.

    memory [num_rows, kept, heads, key, value] then holds the state after every row of requests of up to `kept` rows,
    and after the last row of longer ones. All in one dtype. Where the decay differs by key, long pieces too go row by
    row.
    """
    kept = memory.shape[1]
    stepwise = rows.counts <= kept
    before = None
    most = rows.longest if x.log_decay.dim() == 3 else min(rows.longest, kept)
    if rows.longest > most:
        before = memory[rows.state_rows, (rows.starts - 1) % kept]
        before = torch.where((rows.starts > 0).view(-1, 1, 1, 1), before, 0)
    where = rows.state_rows, rows.starts, rows.counts, rows.first
    out = dispatch.gated_steps(*x, memory, *where, most=most)
    if before is None:
        return out
    chunked, after = _chunked(x, before, rows._replace(counts=torch.where(stepwise, 0, rows.counts)))
    nobody = len(memory) - 1
    memory[torch.where(stepwise, nobody, rows.state_rows), (rows.starts + rows.counts - 1) % kept] = after
    return torch.where(stepwise[rows.owner].view(-1, 1, 1), out, chunked)


def _chunked(x: ScanInputs, state: Tensor, rows: RequestRows) -> tuple[Tensor, Tensor]:
    """The same in chunks: within one by triangular products, from one to the next by its state.

    Returns outputs of the packed rows, which mean nothing for requests without counts, and the last states.
    """
    size, batch = min(CHUNK, rows.longest), len(rows.counts)
    num_chunks = -(-rows.counts // size)
    ends = num_chunks.cumsum(0)
    begins = ends - num_chunks
    most = len(x.q) // size + batch
    chunk = torch.arange(most, device=ends.device)
    owner = torch.searchsorted(ends, chunk, right=True).clamp(max=batch - 1)
    offset = ((chunk - begins[owner]) * size)[:, None] + torch.arange(size, device=ends.device)
    parts = _within_chunks(x.take(rows.first[owner, None] + offset, offset < rows.counts[owner, None]))
    outputs = torch.zeros(most + 1, *parts.values.shape[1:], dtype=x.v.dtype, device=x.v.device)
    order = num_chunks.argsort(descending=True)
    state = state[order]
    for i in range(-(-rows.longest // size)):
        # all rows together are too few for more requests to come this far
        going = order[: len(x.q) // (i * size + 1)]
        live = i < num_chunks[going]
        at = torch.where(live, begins[going] + i, most - 1)
        before = state[: len(going)]
        values = parts.values[at]
        if parts.seen is not None:
            values = values - parts.seen[at] @ before
        # requests that have ended write to a chunk that nobody reads
        outputs[torch.where(live, at, most)] = parts.q[at] @ before + parts.scores[at] @ values
        after = before * parts.decay[at, :, None, None] + parts.k[at].mT @ values
        state[: len(going)] = torch.where(live.view(-1, 1, 1, 1), after, before)
    at = (begins[rows.owner] + rows.offset // size).clamp(max=most)
    return outputs[at, :, rows.offset % size], state[order.argsort()]


class _Chunks(NamedTuple):
    """What chunks bring before their first state is known; all [num_chunks, heads, ...]."""

    q: Tensor  # [..., size, key]; decayed to the chunk's beginning
    k: Tensor  # [..., size, key]; decayed to the chunk's end
    scores: Tensor  # [..., size, size]
    values: Tensor  # [..., size, value]; what is written if the first state is zero
    seen: Tensor | None  # [..., size, key]; what is written less of that state
    decay: Tensor  # [...]


def _within_chunks(x: ScanInputs) -> _Chunks:
    group = x.v.shape[2] // x.q.shape[2]
    q, k = (part.repeat_interleave(group, dim=2).transpose(1, 2) for part in (x.q, x.k))
    v = x.v.transpose(1, 2)  # [num_chunks, heads, size, dim]
    total = x.log_decay.transpose(1, 2).cumsum(-1)
    later = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(later, float("-inf")).exp()
    from_start, to_end = total.exp()[..., None], (total[..., -1:] - total).exp()[..., None]
    scores = (q @ k.mT) * decay
    values, seen = v, None
    if x.beta is not None:
        beta = x.beta.transpose(1, 2)[..., None]
        system = (k * beta @ k.mT) * decay
        right = torch.cat([v * beta, k * beta * from_start], dim=-1)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        values, seen = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    return _Chunks(q * from_start, k * to_end, scores, values, seen, total[..., -1].exp())
