"""The kernels in plain PyTorch: the CPU path, and the oracle the Triton kernels are tested against.

Names and signatures are those of `rejection.py`, `attention.py`, `linear.py` and `fused.py`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .noise import gumbels, noise_keys, uniforms
from .records import RejectionInputs, RejectionOutputs, Stream, rope_heads

SUM_BLOCK = 8192
"""Sums over the vocabulary run in blocks of this size: torch splits one long row over threads, but not several rows,
and a request's tokens must not depend on its batch mates."""

SHORT_QUERY = 16
GROUP_SLOTS = 1024
"""Requests of at most SHORT_QUERY query rows and similar length attend together, padded to this many slots in all: more
would leave the processor's cache, fewer would pay for more calls."""


def verify(inputs: RejectionInputs, *, fp64_gumbel: bool = False) -> RejectionOutputs:
    """Accepts a prefix of each request's drafts and draws the token after it; the law is exactly the target's.

    Draft x of row j is kept iff `log u + log q(x) < log p(x)` (a point mass has q(x) = 1), greedy iff x is the argmax
    (lowest id on ties). The first rejected row is drawn from `max(p - q, 0)`, from p without x for a point mass, from p
    after a placeholder or where nothing is left; a row past all drafts from p. Leviathan et al. 2211.17192, Chen et
    al. 2302.01318. Raises ValueError on shapes that do not belong together.
    """
    inputs.check_shapes()
    logits, drafts = inputs.target_logits, inputs.draft_token_ids
    batch, k = drafts.shape
    first = inputs.cu_rows[:-1].long()
    num_drafts = inputs.cu_rows[1:].long() - first - 1
    steps = torch.arange(k + 1, device=logits.device)
    rows = first[:, None] + torch.minimum(steps, num_drafts[:, None])  # [batch, k + 1]

    row_max = logits.amax(dim=-1)
    row_bad = ~torch.isfinite(row_max)
    row_argmax = logits.argmax(dim=-1) if bool((inputs.temperature == 0).any()) else torch.zeros_like(row_bad).long()
    real = (drafts >= 0) & (drafts < logits.shape[1]) & (steps[:k] < num_drafts[:, None])

    sampled = (inputs.temperature > 0).nonzero()[:, 0]
    accept = row_argmax[rows[:, :k]] == drafts
    row_lse = row_max
    if sampled.numel():
        row_lse = _log_sum_exp(logits, row_max)
        ratio_test = _sampled_accepts(inputs, rows[:, :k], row_lse, real)
        accept = torch.where((inputs.temperature > 0)[:, None], ratio_test, accept)
    accepted = (accept & real).long().cumprod(dim=1).sum(dim=1)  # [batch]
    last_row = rows.gather(1, accepted[:, None])[:, 0]

    last_token = row_argmax[last_row]
    if sampled.numel():
        last_token[sampled] = _recover(inputs, sampled, accepted, last_row, row_lse, real, fp64_gumbel)

    failed = (row_bad[rows] & (steps <= accepted[:, None])).any(dim=1)
    token_ids = F.pad(drafts, (0, 1)).scatter(1, accepted[:, None], last_token[:, None])
    token_ids = token_ids.masked_fill((steps > accepted[:, None]) | failed[:, None], -1)
    return RejectionOutputs(token_ids, (accepted + 1).masked_fill(failed, 0).int(), failed)


def sample(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    stream: Stream,
    *,
    fp64_gumbel: bool = False,
) -> Tensor:
    """One token id [batch] int64 per row of logits [batch, vocab] float32 that the temperature was applied to already.

    Rows of temperature [batch] 0 give their argmax, others a draw keyed by (seed, position, stream). A row of NaN
    gives some id in range.
    """
    token_ids = logits.argmax(dim=-1)
    rows = (temperature > 0).nonzero()[:, 0]
    if rows.numel():
        keys = noise_keys(seeds[rows], positions[rows], stream)
        token_ids[rows] = _race(logits[rows], keys, fp64_gumbel).indices
    return token_ids


def _race(scores: Tensor, keys: Tensor, fp64: bool) -> "torch.return_types.max":
    noise = gumbels(keys, scores.shape[1], torch.float64 if fp64 else torch.float32)
    return noise.add_(scores).max(dim=-1)


def _log_sum_exp(logits: Tensor, row_max: Tensor) -> Tensor:
    total = torch.zeros_like(row_max)
    for block in logits.split(SUM_BLOCK, dim=-1):
        total += (block - row_max[:, None]).exp_().sum(dim=-1)
    return row_max + total.log()


def _sampled_accepts(inputs: RejectionInputs, rows: Tensor, row_lse: Tensor, real: Tensor) -> Tensor:
    """Whether each draft [batch, k] passes the ratio test of its own row."""
    ids = inputs.draft_token_ids.masked_fill(~real, 0)
    steps = torch.arange(ids.shape[1], device=ids.device)
    keys = noise_keys(inputs.seeds[:, None].expand_as(ids), inputs.positions[:, None] + steps, Stream.ACCEPT)
    log_u = uniforms(keys, torch.zeros_like(ids)).log()
    log_p = inputs.target_logits[rows, ids] - row_lse[rows]
    if inputs.draft_log_probs is None:
        return log_u < log_p
    columns, known = ids, real
    if inputs.token_map is not None:
        columns = torch.searchsorted(inputs.token_map, ids).clamp_(max=inputs.token_map.shape[0] - 1)
        known = inputs.token_map[columns] == ids
    log_q = inputs.draft_log_probs.gather(2, columns[..., None])[..., 0]
    return known & (log_q > -torch.inf) & (log_u + log_q < log_p)


def _recover(
    inputs: RejectionInputs,
    requests: Tensor,
    accepted: Tensor,
    last_row: Tensor,
    row_lse: Tensor,
    real: Tensor,
    fp64: bool,
) -> Tensor:
    """The token after the accepted drafts of the given requests [num_requests] int64."""
    accepted, last_row = accepted[requests], last_row[requests]
    logits = inputs.target_logits[last_row]
    keys = noise_keys(inputs.seeds[requests], inputs.positions[requests] + accepted, Stream.RECOVER)
    plain = _race(logits, keys, fp64).indices
    k = inputs.draft_token_ids.shape[1]
    if k == 0:
        return plain
    step = accepted.clamp(max=k - 1)
    rejected = (accepted < k) & real[requests, step]
    if inputs.draft_log_probs is None:
        ids = inputs.draft_token_ids[requests, step].masked_fill(~rejected, 0)
        residual = logits.scatter(1, ids[:, None], -torch.inf)
    else:
        p = (logits - row_lse[last_row, None]).exp_()
        q = inputs.draft_log_probs[requests, step].exp()
        columns = slice(None) if inputs.token_map is None else inputs.token_map
        p[:, columns] -= q
        residual = torch.where(p > 0, p, 0).log_()
    best = _race(residual, keys, fp64)
    return torch.where(rejected & (best.values > -torch.inf), best.indices, plain)


def store_kv(k: Tensor, v: Tensor | None, k_plane: Tensor, v_plane: Tensor | None, slot_mapping: Tensor) -> None:
    """Writes rows k [num_tokens, heads, width_k] and v [num_tokens, heads, width_v] to their slots of a plane.

    Planes are [num_blocks, block_size, heads, width]; slot_mapping [num_tokens] int64. Rows that share a slot (the
    padding block's) leave any one of them there.
    """
    k_plane.view(-1, *k_plane.shape[2:])[slot_mapping] = k.to(k_plane.dtype)
    if v is not None and v_plane is not None:
        v_plane.view(-1, *v_plane.shape[2:])[slot_mapping] = v.to(v_plane.dtype)


def paged_attention(
    q: Tensor,
    k_plane: Tensor,
    v_plane: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    *,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of packed query rows over paged keys and values, accumulated in float32.

    q [num_tokens, q_heads, width_k]; k_plane and v_plane [num_blocks, block_size, kv_heads, width_k or width_v];
    cu_seqlens [batch + 1] and seq_lens [batch] int32: the queries of request b are the last rows of its seq_lens[b]
    tokens; block_tables [batch, max_blocks] int32. Query t sees key p <= t, with t - window < p if `window`, with
    p // chunk == t // chunk if `chunk`. `softcap` c turns a score s into c * tanh(s / c); `sinks` [q_heads] join the
    softmax as keys without a value. Returns [num_tokens, q_heads, width_v].
    """
    out = q.new_empty(*q.shape[:2], v_plane.shape[-1])
    starts, lengths = cu_seqlens.tolist(), seq_lens.tolist()
    query_lens = [end - start for start, end in zip(starts[:-1], starts[1:], strict=True)]
    window, chunk = (0 if size >= max_seq_len else size for size in (window, chunk))
    dense = not softcap and sinks is None and k_plane.shape[-1] == v_plane.shape[-1]
    for group in _groups(query_lens, lengths):
        longest_query = max(query_lens[b] for b in group)
        group_lens = [lengths[b] for b in group]
        index = torch.tensor(group, device=q.device)
        table = block_tables[index, : -(-max(group_lens) // k_plane.shape[1])]
        keys, values = _gather(k_plane, table, group_lens), _gather(v_plane, table, group_lens)
        if dense and not window and not chunk and len(group) == 1 and longest_query in (1, group_lens[0]):
            own = slice(starts[group[0]], starts[group[0] + 1])
            out[own] = _attend_causal(q[own], keys, values, scale)
            continue
        query_len = (cu_seqlens[1:] - cu_seqlens[:-1])[index, None].long()
        offsets = torch.minimum(torch.arange(longest_query, device=q.device), query_len - 1)  # padding repeats a row
        rows = cu_seqlens[index, None].long() + offsets  # [group, longest_query]
        visible = _visible(seq_lens[index, None].long() - query_len + offsets, max(group_lens), window, chunk)
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


def _visible(positions: Tensor, num_keys: int, window: int, chunk: int) -> Tensor:
    """[group, queries, num_keys] bool for the queries at positions [group, queries]."""
    key = torch.arange(num_keys, device=positions.device)
    query = positions[..., None]
    visible = key <= query
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


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """x [rows, in] times weight [out, in], summed in float32, plus bias [out] and residual [rows, out]: [rows, out].

    The result has `out_dtype`, that of x when None. In half precision the kernels round once, at the end; here the
    product is rounded before the residual is added.
    """
    out = F.linear(x, weight, bias)
    if residual is not None:
        out = out.to(torch.promote_types(out.dtype, torch.float32)) + residual
    return out.to(out_dtype or x.dtype)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """silu(gate) * up [rows, width] of x [rows, in], gate and up being the halves of weight [2 * width, in]."""
    return silu_mul(linear(x, weight, bias))


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False) -> Tensor:
    """x [rows, width] over its root mean square, times weight [width], in the dtype of x.

    As Llama: normalised in float32 whatever the dtype, rounded, then scaled. With `unit_offset` as Gemma: scaled by
    1 + weight in float32 and rounded once.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    if unit_offset:
        return (wide * (1.0 + weight.float())).to(x.dtype)
    return (weight * wide.to(x.dtype)).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up [rows, width] of gate_up [rows, 2 * width], gates first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rope_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    k_plane: Tensor,
    v_plane: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """Turns the queries and keys of packed rows, writes keys and values to their slots, returns the queries.

    qkv [rows, (q_heads + 2 * kv_heads) * width], heads in that order; cos and sin [rows, width] in transformers'
    half-split layout; q_norm and k_norm [width] RMS norms of each head before turning, or None; planes [num_blocks,
    block_size, kv_heads, width]; slot_mapping [rows] int64. Returns [rows, q_heads, width]. Raises ValueError on
    shapes that do not belong together.
    """
    q_heads, kv_heads, width = rope_heads(qkv, cos, sin, k_plane, v_plane)
    q, k, v = qkv.view(-1, q_heads + 2 * kv_heads, width).split((q_heads, kv_heads, kv_heads), dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    store_kv(_turn(k, cos, sin), v, k_plane, v_plane, slot_mapping)
    return _turn(q, cos, sin)


def _turn(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    turned = heads * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]
    return turned.to(heads.dtype)
