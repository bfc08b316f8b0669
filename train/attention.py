"""Attention of an unrolled draft head: causal over true states, and over a row's own earlier draft steps.

At step j row t sees the step-0 keys of its document up to t, and its own keys of steps 1..j: what the drafter has in
its cache when it drafts token j from row t. The first part is ordinary causal attention; the second adds j columns to
its softmax, which needs only the first part's log-sum-exp. So no backend builds the keys of all steps side by side.
Where the steps of a row do not wait for each other (P-EAGLE) all of them run at once, over those rows that have any.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from .alignment import document_line

AttentionBackend = Literal["dense", "flex"]

QUERY_BLOCK = 256  # rows of scores the dense backend holds at once


@dataclass(frozen=True, kw_only=True)
class AttentionSettings:
    """What a recipe's `objective` section says of attention; `auto` is flex on CUDA and dense elsewhere."""

    attention: Literal["auto", "dense", "flex"] = "auto"

    def __post_init__(self) -> None:
        if self.attention not in ("auto", "dense", "flex"):
            raise ValueError(f"objective.attention must be auto, dense or flex, found {self.attention!r}")


class CausalAttention(Protocol):
    """Attention within documents; q [batch, seq, heads, head_dim], k and v [batch, seq, kv_heads, head_dim]."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The output [batch, seq, heads, head_dim]."""
        ...

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and the log-sum-exp of the scores [batch, seq, heads] float32; both differentiable."""
        ...


class UnrolledAttend:
    """The trainer's `attend` (heads/base.py) for one batch; call it once per layer and step, in step order.

    Keys and values of earlier steps keep their graph: gradients flow through the whole unrolling.
    """

    def __init__(self, document_ids: Tensor, backend: AttentionBackend) -> None:
        """`document_ids` [batch, seq]; `flex` needs CUDA."""
        self._causal: CausalAttention = _Flex(document_ids) if backend == "flex" else _Dense(document_ids)
        self._history: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        history = self._history.setdefault(layer, [])
        history.append((k, v))
        first_k, first_v = history[0]
        if len(history) == 1:
            return self._causal(q, first_k, first_v)
        out, lse = self._causal.with_lse(q, first_k, first_v)
        own = [tensor for pair in history[1:] for tensor in pair]
        return _recomputed(_add_own_columns, q.shape[1], q, out, lse, *own)


class ParallelAttend:
    """As `UnrolledAttend`, with all steps side by side: first the rows [batch * seq] of step 0, then draft rows.

    Draft rows [num_drafts] are ordered by the row they draft from, then by step; those of one row are its steps 1, 2
    and so on without a gap.
    """

    def __init__(
        self, document_ids: Tensor, from_rows: Tensor, steps: Tensor, max_step: int, backend: AttentionBackend
    ) -> None:
        """`from_rows` and `steps` [num_drafts] int64: the row in batch * seq, and the step, 1 to `max_step`."""
        batch, seq = document_ids.shape
        self.shape, self.steps, self.max_step = (batch, seq), steps, max_step
        kind = _Flex if backend == "flex" else _Dense
        self._causal: CausalAttention = kind(document_ids)
        self._prefix: CausalAttention | None = (
            kind(document_line(document_ids)[None], from_rows) if len(steps) else None
        )

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first = self.shape[0] * self.shape[1]
        out = self._causal(*(x[:first].unflatten(0, self.shape) for x in (q, k, v))).flatten(0, 1)
        if self._prefix is None:
            return out
        drafts, lse = self._prefix.with_lse(q[None, first:], k[None, :first], v[None, :first])
        add_own = partial(_add_own_rows, steps=self.steps, max_step=self.max_step)
        drafts = _recomputed(add_own, len(self.steps), q[None, first:], drafts, lse, k[None, first:], v[None, first:])
        return torch.cat([out, drafts[0]])


def choose_backend(wanted: Literal["auto", "dense", "flex"], device: torch.device) -> AttentionBackend:
    """`auto` is flex on CUDA and dense elsewhere; raises ValueError for flex elsewhere."""
    if wanted == "flex" and device.type != "cuda":
        raise ValueError(
            f"objective.attention=flex needs a CUDA device, found {device.type}; set it to auto or dense there"
        )
    if wanted == "auto":
        return "flex" if device.type == "cuda" else "dense"
    return wanted


def _add_own_rows(q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, steps: Tensor, max_step: int) -> Tensor:
    """Draft row i of step j adds its own key and those of the j - 1 rows before it."""
    own = [x.roll(back, dims=1) for back in range(max_step) for x in (k, v)]
    visible = torch.stack([steps > back for back in range(max_step)], dim=-1)
    return _add_own_columns(q, out, lse, *own, visible=visible)


def _add_own_columns(q: Tensor, out: Tensor, lse: Tensor, *own: Tensor, visible: Tensor | None = None) -> Tensor:
    """`own`: k, v of each added column, in q's rows; `visible` [seq, columns] hides some of them."""
    kv_heads = own[0].shape[2]
    grouped = q.unflatten(2, (kv_heads, -1)).float()  # [batch, seq, kv_heads, group, head_dim]
    scale = q.shape[-1] ** -0.5
    scores = [(grouped * k.float().unsqueeze(3)).sum(-1).flatten(2) * scale for k in own[::2]]
    columns = torch.stack(scores, dim=-1)
    if visible is not None:
        columns = columns.masked_fill(~visible[None, :, None], -torch.inf)
    shares = torch.cat([lse[..., None], columns], dim=-1).softmax(dim=-1)  # [batch, seq, heads, 1 + columns]
    mixed = out.float() * shares[..., :1]
    for i, v in enumerate(own[1::2], start=1):
        share = shares[..., i].unflatten(2, (kv_heads, -1)).unsqueeze(-1)
        mixed = mixed + (share * v.float().unsqueeze(3)).flatten(2, 3)
    return mixed.to(q.dtype)


def _recomputed(function: Callable[..., Any], seq: int, *inputs: Tensor) -> Any:
    """Runs `function` keeping only its inputs for the backward pass; short rows are not worth the second run."""
    if seq <= QUERY_BLOCK or not torch.is_grad_enabled():
        return function(*inputs)
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)


class _Dense:
    """Queries stand at every row of the keys or, if `rows` [queries] int64 ascending are given, at those."""

    def __init__(self, document_ids: Tensor, rows: Tensor | None = None) -> None:
        keys = torch.arange(document_ids.shape[1], device=document_ids.device)
        rows = keys if rows is None else rows
        same = document_ids[:, rows, None] == document_ids[:, None]
        self._mask = same & (keys <= rows[:, None])  # [batch, query, key]
        # a block of rows sees from where its first row's document begins up to its last row
        self._begins = self._mask[:, ::QUERY_BLOCK].any(0).int().argmax(-1).tolist()
        self._ends = (rows[QUERY_BLOCK - 1 :: QUERY_BLOCK] + 1).tolist() + [len(keys)]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, attn_mask=self._mask.unsqueeze(1), enable_gqa=True)
        return out.transpose(1, 2)

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        outs, lses = [], []
        blocks = range(0, q.shape[1], QUERY_BLOCK)
        for start, first, last in zip(blocks, self._begins, self._ends, strict=False):
            end = min(start + QUERY_BLOCK, q.shape[1])
            block = partial(_dense_block, mask=self._mask[:, start:end, first:last])
            out, lse = _recomputed(block, q.shape[1], q[:, start:end], k[:, first:last], v[:, first:last])
            outs.append(out)
            lses.append(lse)
        return torch.cat(outs, dim=1), torch.cat(lses, dim=1)


def _dense_block(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    rows, group = q.shape[1], q.shape[2] // k.shape[2]
    folded = (
        q.unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    )  # [batch, kv_heads, group * rows, head_dim]
    scores = (folded @ k.permute(0, 2, 3, 1)).float() * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~mask.repeat(1, group, 1).unsqueeze(1), -torch.inf)
    lse = scores.logsumexp(dim=-1)
    out = (scores - lse.unsqueeze(-1)).exp().to(v.dtype) @ v.transpose(1, 2)
    out = out.unflatten(2, (group, rows)).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return out, lse.unflatten(2, (group, rows)).permute(0, 3, 1, 2).flatten(2, 3)


class _Flex:
    """As `_Dense`."""

    def __init__(self, document_ids: Tensor, rows: Tensor | None = None) -> None:
        from torch.nn.attention.flex_attention import create_block_mask

        def sees(b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            row = query if rows is None else rows[query]
            return (key <= row) & (document_ids[b, row] == document_ids[b, key])

        batch, seq = document_ids.shape
        queries = seq if rows is None else len(rows)
        self._mask = create_block_mask(sees, batch, None, queries, seq, device=str(document_ids.device))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.with_lse(q, k, v)[0]

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        from torch.nn.attention.flex_attention import AuxRequest

        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, aux = _compiled_flex()(q, k, v, block_mask=self._mask, enable_gqa=True, return_aux=AuxRequest(lse=True))
        return out.transpose(1, 2), aux.lse.transpose(1, 2)


@cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


class BlockAttend:
    """The trainer's `attend` for block drafters: a block sees the context before its anchor, and itself.

    The block behind row t sees the context rows of its document up to t, and its own rows: all of them, or with
    `causal` those up to each. A `window` counts rows back from each row, itself included; 0 is none.
    """

    def __init__(
        self,
        document_ids: Tensor,
        rows: Tensor,
        block_size: int,
        context: Sequence[tuple[Tensor, Tensor]],
        backend: AttentionBackend,
        *,
        causal: bool,
        window: int,
    ) -> None:
        """`rows` [num_blocks] int64, ascending, in batch * seq; `context` keys and values [batch, seq, kv_heads,
        head_dim] of each layer. `flex` needs CUDA."""
        self._batch, self._seq = document_ids.shape
        self._document_ids, self._context, self._causal, self._window = document_ids, context, causal, window
        self._rows, self._size = rows, block_size
        self._slots = torch.arange(block_size, device=rows.device)
        self._flex = None
        if backend == "flex" and len(rows):
            self._flex = _FlexBlocks(document_ids, rows, block_size, causal, window)
        self._pieces = [] if self._flex else self._cut()

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [num_blocks, block, heads, head_dim], k and v with kv_heads; returns the shape of q."""
        context_k, context_v = self._context[layer]
        if self._flex is not None:
            return self._flex(q, k, v, context_k, context_v)
        own = sees_own(self._slots[:, None], self._slots, self._causal)
        outs = []
        for blocks, line, end in self._pieces:
            columns = torch.arange(end, device=q.device)
            rows = self._rows[blocks, None, None] - line * self._seq
            seen = sees_context(self._document_ids, line, rows, self._slots[:, None], columns, self._window)
            inputs = (q[blocks], k[blocks], v[blocks], context_k[line, :end], context_v[line, :end], seen, own)
            outs.append(_recomputed(_attend_blocks, self._seq, *inputs))
        return torch.cat(outs)

    def _cut(self) -> list[tuple[slice, int, int]]:
        """Runs of blocks of one batch row, the batch row, and how many of its context rows they may see."""
        rows, size = self._rows.tolist(), max(1, QUERY_BLOCK // self._size)
        pieces, start = [], 0
        for line in range(self._batch):
            end = bisect_left(rows, (line + 1) * self._seq)
            for first in range(start, end, size):
                last = min(first + size, end)
                pieces.append((slice(first, last), line, rows[last - 1] - line * self._seq + 1))
            start = end
        return pieces or [(slice(0, 0), 0, 0)]


def sees_context(
    document_ids: Tensor, line: Tensor | int, row: Tensor, slot: Tensor, column: Tensor, window: int
) -> Tensor:
    """Whether slots of blocks behind `row` see the context row `column`, both of one line of `document_ids`."""
    seen = (column <= row) & (document_ids[line, column] == document_ids[line, row.clamp(min=0)])
    return seen & (row + 1 + slot - column < window) if window else seen


def sees_own(slot: Tensor, other: Tensor, causal: bool) -> Tensor:
    """Whether a slot sees another one of its block."""
    return other <= slot if causal else (other >= 0) & (slot >= 0)


def _attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor, seen: Tensor, own: Tensor
) -> Tensor:
    """seen [blocks, block, context] bool; own [block, block] bool."""
    grouped = q.unflatten(2, (k.shape[2], -1))  # [blocks, block, kv_heads, group, head_dim]
    before = torch.einsum("nbkgd,ckd->nkgbc", grouped, context_k).float().masked_fill(~seen[:, None, None], -torch.inf)
    inside = torch.einsum("nbkgd,nskd->nkgbs", grouped, k).float().masked_fill(~own, -torch.inf)
    shares = (torch.cat([before, inside], dim=-1) * q.shape[-1] ** -0.5).softmax(dim=-1).to(v.dtype)
    before, inside = shares.split([before.shape[-1], inside.shape[-1]], dim=-1)
    out = torch.einsum("nkgbc,ckd->nbkgd", before, context_v) + torch.einsum("nkgbs,nskd->nbkgd", inside, v)
    return out.flatten(2, 3)


class _FlexBlocks:
    """Blocks of a batch row side by side behind its context, in few different widths: each is compiled for itself."""

    def __init__(self, document_ids: Tensor, rows: Tensor, size: int, causal: bool, window: int) -> None:
        from torch.nn.attention.flex_attention import create_block_mask

        batch, seq = document_ids.shape
        lines = rows // seq
        counts = lines.bincount(minlength=batch)
        width = 1 << max(int(counts.max()) - 1, 128 // size).bit_length()
        place = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[lines]
        self._place = lines * width + place  # [num_blocks]
        self._blocks = torch.zeros(batch * width, dtype=torch.int64, device=rows.device)
        self._blocks[self._place] = torch.arange(len(rows), device=rows.device)
        columns = torch.full((batch * width,), -1, device=rows.device)
        columns[self._place] = rows % seq
        columns = columns.view(batch, width)

        def sees(b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            block, slot, other = query // size, query % size, key - seq
            before = sees_context(document_ids, b, columns[b, block], slot, key.clamp(max=seq - 1), window)
            inside = (other // size == block) & sees_own(slot, other % size, causal)
            return torch.where(key < seq, before, inside)

        queries = width * size
        self._mask = create_block_mask(sees, batch, None, queries, seq + queries, device=str(rows.device))
        self._shape = batch, width

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor) -> Tensor:
        q, k, v = (x[self._blocks].unflatten(0, self._shape).flatten(1, 2) for x in (q, k, v))
        k, v = torch.cat([context_k, k], dim=1), torch.cat([context_v, v], dim=1)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = _compiled_flex()(q, k, v, block_mask=self._mask, enable_gqa=True).transpose(1, 2)
        return out.unflatten(1, (self._shape[1], -1)).flatten(0, 1)[self._place]
