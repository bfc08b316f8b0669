"""Paged attention: the twin of `attention.py`."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..records import AttentionInputs

SHORT_QUERY = 16
GROUP_SLOTS = 1024
"""Requests of at most SHORT_QUERY query rows and similar length attend together, padded to this many slots in all: more
would leave the processor's cache, fewer would pay for more calls."""


def store_kv(k: Tensor, v: Tensor | None, k_plane: Tensor, v_plane: Tensor | None, slot_mapping: Tensor) -> None:
    """Writes rows k [num_tokens, heads, width_k] and v [num_tokens, heads, width_v] to their slots of a plane.

    Planes are [num_blocks, block_size, heads, width]; slot_mapping [num_tokens] int64. Rows that share a slot (the
    padding block's) leave any one of them there.
    """
    k_plane.view(-1, *k_plane.shape[2:])[slot_mapping] = k.to(k_plane.dtype)
    if v is not None and v_plane is not None:
        v_plane.view(-1, *v_plane.shape[2:])[slot_mapping] = v.to(v_plane.dtype)


def paged_attention(inputs: AttentionInputs) -> Tensor:
    """What each query row attends to, accumulated in float32: [num_tokens, q_heads, width_v] in the dtype of q."""
    q, k_plane, v_plane, cu_seqlens, seq_lens, block_tables, _, max_seq_len, *_ = inputs
    scale, softcap, sinks, causal = inputs.scale, inputs.softcap, inputs.sinks, inputs.causal
    out = q.new_empty(*q.shape[:2], v_plane.shape[-1])
    starts, lengths = cu_seqlens.tolist(), seq_lens.tolist()
    query_lens = [end - start for start, end in zip(starts[:-1], starts[1:], strict=True)]
    window, chunk = (0 if size >= max_seq_len else size for size in (inputs.window, inputs.chunk))
    dense = not softcap and sinks is None and k_plane.shape[-1] == v_plane.shape[-1]
    for group in _groups(query_lens, lengths):
        longest_query = max(query_lens[b] for b in group)
        group_lens = [lengths[b] for b in group]
        index = torch.tensor(group, device=q.device)
        table = block_tables[index, : -(-max(group_lens) // k_plane.shape[1])]
        keys, values = _gather(k_plane, table, group_lens), _gather(v_plane, table, group_lens)
        if dense and causal and not window and not chunk and len(group) == 1 and longest_query in (1, group_lens[0]):
            own = slice(starts[group[0]], starts[group[0] + 1])
            out[own] = _attend_causal(q[own], keys, values, scale)
            continue
        query_len = (cu_seqlens[1:] - cu_seqlens[:-1])[index, None].long()
        offsets = torch.minimum(torch.arange(longest_query, device=q.device), query_len - 1)  # padding repeats a row
        rows = cu_seqlens[index, None].long() + offsets  # [group, longest_query]
        ends = seq_lens[index, None].long()
        positions = ends - query_len + offsets
        reach = positions if causal else (ends - 1).expand_as(positions)
        visible = _visible(positions, reach, max(group_lens), window, chunk)
        queries = q[rows].transpose(1, 2)  # [group, q_heads, longest_query, width_k]
        attended = _attend(queries, keys, values, visible, scale, softcap, sinks).transpose(1, 2)
        out[rows] = attended.to(out.dtype)
    return out


def _groups(query_lens: list[int], lengths: list[int]) -> list[list[int]]:
    """Which requests attend together: many short queries, or one long one."""
    groups: list[list[int]] = []
    for b in sorted((b for b, rows in enumerate(query_lens) if 0 < rows <= SHORT_QUERY), key=lengths.__getitem__):
        if groups and (len(groups[-1]) + 1) * lengths[b] <= GROUP_SLOTS:
            groups[-1].append(b)
        else:
            groups.append([b])
    return groups + [[b] for b, rows in enumerate(query_lens) if rows > SHORT_QUERY]


def _gather(plane: Tensor, table: Tensor, lengths: list[int]) -> Tensor:
    """The rows [group, heads, seq, width] of block tables [group, num_blocks], cut to the longest length.

    Slots past a shorter request may hold another one's NaN, which a weight of zero would not silence: they are zeroed.
    """
    rows = plane.view(plane.shape[0], -1).index_select(0, table.flatten())
    rows = rows.view(table.shape[0], -1, *plane.shape[2:])[:, : max(lengths)]
    for request, length in enumerate(lengths):
        rows[request, length:].zero_()
    return rows.transpose(1, 2)


def _attend_causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One request whose queries are its newest token or all of its tokens: no mask is needed. q [seq, heads, width]."""
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k.to(q.dtype), v.to(q.dtype), is_causal=q.shape[0] > 1, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def _visible(positions: Tensor, reach: Tensor, num_keys: int, window: int, chunk: int) -> Tensor:
    """[group, queries, num_keys] bool: queries at positions [group, queries] see keys up to `reach`."""
    key = torch.arange(num_keys, device=positions.device)
    query = positions[..., None]
    visible = key <= reach[..., None]
    if window:
        visible &= key > query - window
    if chunk:
        visible &= key // chunk == query // chunk
    return visible


def _attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """Dense attention of q [group, q_heads, queries, width_k]; query heads that share a key head become its rows."""
    group, q_heads, num_queries, width = q.shape
    kv_heads = k.shape[1]
    per_key = q_heads // kv_heads
    packed = q.reshape(group, kv_heads, per_key * num_queries, width)
    mask = visible.repeat(1, per_key, 1)[:, None]  # [group, 1, per_key * queries, keys]
    if not softcap and sinks is None and k.shape[-1] == v.shape[-1]:
        out = F.scaled_dot_product_attention(packed, k.to(q.dtype), v.to(q.dtype), attn_mask=mask, scale=scale)
        return out.reshape(group, q_heads, num_queries, -1)
    scores = packed.float() @ k.float().transpose(-1, -2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        sink = sinks.float().reshape(1, kv_heads, per_key, 1, 1).expand(group, -1, -1, num_queries, 1)
        scores = torch.cat([scores, sink.reshape(group, kv_heads, -1, 1)], dim=-1)
    probs = scores.softmax(dim=-1)[..., : k.shape[2]]
    return (probs @ v.float()).reshape(group, q_heads, num_queries, -1)
