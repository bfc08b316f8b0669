"""The kernels in plain PyTorch: the CPU path, and the oracle the Triton kernels are tested against.

Names and signatures are those of `rejection.py`, `sampling.py`, `attention.py`, `linear.py`, `fused.py` and
`gated_steps.py`.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .noise import BLOCK_COUNTERS, gumbels, noise_keys, uniforms
from .records import (
    SURVIVAL_PRIOR,
    VOCAB_BLOCK,
    RejectionInputs,
    RejectionOutputs,
    Stream,
    SurvivalModel,
    VerifyMode,
    rope_heads,
)

SHORT_QUERY = 16
GROUP_SLOTS = 1024
"""Requests of at most SHORT_QUERY query rows and similar length attend together, padded to this many slots in all: more
would leave the processor's cache, fewer would pay for more calls."""


class BlockStats(NamedTuple):
    """Per row and block of the vocabulary, each [num_rows, num_blocks] float32."""

    maximum: Tensor
    total: Tensor  # sum of exp(logit - maximum)

    def log_masses(self) -> Tensor:
        return self.maximum + self.total.log()


def verify(inputs: RejectionInputs, *, fp64_gumbel: bool = False) -> RejectionOutputs:
    """Keeps a prefix of each request's drafts and draws the token after it.

    STANDARD keeps draft x of row j iff `log u + log q(x) < log p(x)`; a point mass has q(x) = 1 (Leviathan et al.
    2211.17192, Chen et al. 2302.01318). BLOCK keeps the longest prefix i with u < h_i (Sun et al. 2403.10444), where
    P_0 = 1, P_i = min(1, P_{i-1} p(x_i) / q(x_i)), h = P for the last draft and S_i / (S_i + 1 - P_i) before it, with
    S_i the sum of max(P_i p - q, 0) over the next row; for point masses both rules emit the same law, and the first
    runs. SYNTHETIC keeps draft j iff u < rates[j]. The law is exactly the target's in the first two.

    The row behind the kept drafts is drawn from `max(p - q, 0)`, in BLOCK from `max(P p - q, 0)`, from p without x for
    a point mass, from p after a placeholder, past all drafts and where nothing is left. Temperature 0 keeps drafts that
    are the argmax (lowest id on ties), or by rate in SYNTHETIC, and then gives the argmax. Raises ValueError on fields
    that do not belong together.
    """
    inputs.check()
    logits, drafts = inputs.target_logits.float(), inputs.draft_token_ids
    batch, k = drafts.shape
    first = inputs.cu_rows[:-1].long()
    num_drafts = (inputs.cu_rows[1:].long() - first - 1).clamp(max=k)
    steps = torch.arange(k + 1, device=logits.device)
    rows = first[:, None] + torch.minimum(steps, num_drafts[:, None].clamp(min=0))
    rows = rows.clamp(max=logits.shape[0] - 1)  # [batch, k + 1]

    greedy = inputs.temperature == 0
    stats = _block_stats(logits)
    row_max = stats.maximum.amax(dim=-1)
    unusable = ~torch.isfinite(row_max)[rows] | (steps > num_drafts[:, None])
    row_argmax = logits.argmax(dim=-1) if bool(greedy.any()) else torch.zeros_like(row_max).long()
    row_lse = row_max + (stats.total * (stats.maximum - row_max[:, None]).exp()).sum(dim=-1).log()
    real = (drafts >= 0) & (drafts < logits.shape[1]) & (steps[:k] < num_drafts[:, None])

    # block verification has looked at the numbers behind the drafts it keeps: no later step may meet them again
    u = uniforms(noise_keys(inputs.seeds[:, None], inputs.positions[:, None], Stream.ACCEPT), steps[:k])
    log_p, log_q = _draft_log_probs(inputs, logits, row_lse, rows, real)
    if inputs.rates is not None:
        keep = u < inputs.rates[:k]
    else:
        keep = torch.where(greedy[:, None], row_argmax[rows[:, :k]] == drafts, u.log() + log_q < log_p)
    accepted = (keep & real & ~unusable[:, :k]).long().cumprod(dim=1).sum(dim=1)  # [batch]
    needed = steps == accepted[:, None]
    log_weight = torch.zeros(batch, k + 1, device=logits.device)
    if inputs.mode is VerifyMode.BLOCK and inputs.draft_log_probs is not None:
        log_weight = _block_weights(torch.where(real & ~unusable[:, :k], log_p - log_q, -torch.inf))
        length = real.long().cumprod(dim=1).sum(dim=1)
        longest = _longest_prefix(inputs, logits, rows, row_lse, log_weight, length, u)
        accepted = torch.where(greedy, accepted, longest)
        needed = (steps == accepted[:, None]) | (~greedy[:, None] & (steps < length[:, None]))

    last_row = rows.gather(1, accepted[:, None])[:, 0]
    last_token = row_argmax[last_row]
    shift = row_lse[last_row] - log_weight.gather(1, accepted[:, None])[:, 0]
    failed = (unusable & needed).any(dim=1)
    drawn = (~greedy & ~failed).nonzero()[:, 0]
    if drawn.numel():
        last_token[drawn] = _recover(inputs, logits, stats, drawn, accepted, last_row, shift, real, fp64_gumbel)
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
    """One token id [batch] int64 per row of logits [batch, vocab] that the temperature was applied to already.

    Rows of temperature [batch] 0 give their argmax, others a draw keyed by (seed, position, stream). A row of NaN
    gives some id in range.
    """
    token_ids = logits.argmax(dim=-1)
    rows = (temperature > 0).nonzero()[:, 0]
    if rows.numel():
        scores = logits[rows].float()
        keys = noise_keys(seeds[rows], positions[rows], stream)
        token_ids[rows] = _draw(scores, _block_stats(scores).log_masses(), keys, fp64_gumbel)
    return token_ids


def _block_stats(logits: Tensor) -> BlockStats:
    maxima, totals = [], []
    # block by block: torch splits the sum of one long row over threads, but not that of several rows, and a request's
    # tokens must not depend on its batch mates
    for block in logits.split(VOCAB_BLOCK, dim=-1):
        maximum = block.amax(dim=-1)
        base = maximum.masked_fill(maximum == -torch.inf, 0)
        maxima.append(maximum)
        totals.append((block - base[:, None]).exp_().sum(dim=-1))
    return BlockStats(torch.stack(maxima, dim=-1), torch.stack(totals, dim=-1))


def _draw(scores: Tensor, log_masses: Tensor, keys: Tensor, fp64: bool) -> Tensor:
    """A block by its mass [batch, num_blocks], then an id by its score [batch, vocab] in the block."""
    dtype = torch.float64 if fp64 else torch.float32
    counters = BLOCK_COUNTERS + torch.arange(log_masses.shape[1], device=keys.device)
    block = gumbels(keys[:, None], counters, dtype).add_(log_masses).argmax(dim=-1)
    last = scores.shape[1] - 1
    tokens = block[:, None] * VOCAB_BLOCK + torch.arange(min(VOCAB_BLOCK, last + 1), device=keys.device)
    race = gumbels(keys[:, None], tokens, dtype).add_(scores.gather(1, tokens.clamp(max=last)))
    best = race.masked_fill_(tokens > last, -torch.inf).argmax(dim=-1, keepdim=True)
    return tokens.gather(1, best)[:, 0].clamp_(max=last)


def _draft_log_probs(
    inputs: RejectionInputs, logits: Tensor, row_lse: Tensor, rows: Tensor, real: Tensor
) -> tuple[Tensor, Tensor]:
    """log p and log q [batch, k] of the drafts; +inf for the q of a draft that its law cannot draw."""
    ids = inputs.draft_token_ids.masked_fill(~real, 0)
    own = rows[:, : ids.shape[1]]
    log_p = logits[own, ids] - row_lse[own]
    if inputs.draft_log_probs is None:
        return log_p, torch.zeros_like(log_p)
    columns = ids if inputs.law_columns is None else inputs.law_columns[ids].long()
    log_q = inputs.draft_log_probs.gather(2, columns.clamp(min=0)[..., None])[..., 0]
    return log_p, log_q.masked_fill((columns < 0) | ~(log_q > -torch.inf), torch.inf)


def _block_weights(ratio: Tensor) -> Tensor:
    """log P [batch, k + 1] of ratios log p - log q [batch, k]."""
    weights = [ratio.new_zeros(ratio.shape[0])]
    for column in ratio.unbind(dim=1):
        weights.append((weights[-1] + column).clamp(max=0))
    return torch.stack(weights, dim=1)


def _longest_prefix(
    inputs: RejectionInputs,
    logits: Tensor,
    rows: Tensor,
    row_lse: Tensor,
    log_weight: Tensor,
    length: Tensor,
    u: Tensor,
) -> Tensor:
    """The largest i with u_i < h_i, 0 if there is none, for drafts of `length` [batch] before any placeholder."""
    longest = torch.zeros_like(length)
    for i in range(1, rows.shape[1]):
        weight, chance = log_weight[:, i], u[:, i - 1]
        keep = (chance.log() < weight) & (length == i)
        doubtful = (length > i).nonzero()[:, 0]
        if doubtful.numel():
            row = rows[doubtful, i]
            shift = (row_lse[row] - weight[doubtful])[:, None]
            left = _left_over(inputs, logits[row], shift, doubtful, torch.full_like(doubtful, i)).sum(dim=-1)
            h = chance[doubtful] * (left + 1 - weight[doubtful].exp()) < left
            keep[doubtful] = h | (weight[doubtful] == 0)
        longest = torch.where(keep, i, longest)
    return longest


def _left_over(inputs: RejectionInputs, scores: Tensor, shift: Tensor, requests: Tensor, step: Tensor) -> Tensor:
    """max(exp(scores - shift) - q, 0) [num_requests, vocab], q the law of each request's draft `step`."""
    assert inputs.draft_log_probs is not None
    q = inputs.draft_log_probs[requests, step].exp()
    if inputs.law_columns is not None:
        q = q[:, inputs.law_columns.clamp(min=0)].masked_fill_(inputs.law_columns < 0, 0)
    left = (scores - shift).exp_() - q
    return torch.where(left > 0, left, 0)


def _recover(
    inputs: RejectionInputs,
    logits: Tensor,
    stats: BlockStats,
    requests: Tensor,
    accepted: Tensor,
    last_row: Tensor,
    shift: Tensor,
    real: Tensor,
    fp64: bool,
) -> Tensor:
    """The token after the kept drafts of the given requests [num_requests] int64."""
    accepted, last_row = accepted[requests], last_row[requests]
    scores, log_masses = logits[last_row], stats.log_masses()[last_row]
    keys = noise_keys(inputs.seeds[requests], inputs.positions[requests] + accepted, Stream.RECOVER)
    k = inputs.draft_token_ids.shape[1]
    if k:
        step = accepted.clamp(max=k - 1)
        rejected = (accepted < k) & real[requests, step]
        if inputs.draft_log_probs is None:
            ids = inputs.draft_token_ids[requests, step].masked_fill(~rejected, 0)
            left = scores.scatter(1, ids[:, None], -torch.inf)
        else:
            left = _left_over(inputs, scores, shift[requests, None], requests, step).log_()
        masses = _block_stats(left).log_masses()
        anything_left = (rejected & (masses.amax(dim=-1) > -torch.inf))[:, None]
        scores = torch.where(anything_left, left, scores)
        log_masses = torch.where(anything_left, masses, log_masses)
    return _draw(scores, log_masses, keys, fp64)


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
    causal: bool = True,
) -> Tensor:
    """Attention of packed query rows over paged keys and values, accumulated in float32.

    q [num_tokens, q_heads, width_k]; k_plane and v_plane [num_blocks, block_size, kv_heads, width_k or width_v];
    cu_seqlens [batch + 1] and seq_lens [batch] int32: the queries of request b are the last rows of its seq_lens[b]
    tokens; block_tables [batch, max_blocks] int32. Query t sees key p <= t, with t - window < p if `window`, with
    p // chunk == t // chunk if `chunk`; without `causal` it also sees the later keys of its request. `softcap` c turns
    a score s into c * tanh(s / c); `sinks` [q_heads] join the softmax as keys without a value. Returns
    [num_tokens, q_heads, width_v].
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


def draft_survival(model: SurvivalModel, log_odds: Tensor, num_drafts: Tensor) -> Tensor:
    """Probability [batch, k] float32 that each draft and all before it are accepted; -1 beyond num_drafts [batch].

    It never rises with the position, and at one position it does not depend on later ones.
    """
    bias, slope = model.coefficients.unbind(1)
    # a product in parallel may round a later entry above an earlier one
    survival = torch.sigmoid(bias + slope * log_odds).cumprod(dim=1).cummin(dim=1).values
    position = torch.arange(log_odds.shape[1], device=log_odds.device)
    return torch.where(position < num_drafts[:, None], survival, -1.0)


def learn_survival(
    model: SurvivalModel, log_odds: Tensor, num_verified: Tensor, num_emitted: Tensor, memory: float
) -> None:
    """Learns in place from a step: request b verified num_verified[b] drafts and emitted num_emitted[b] tokens.

    log_odds [batch, k] float32. Drafts behind the first rejection teach nothing, nor does a request that emitted
    nothing. A position forgets by exp(-1 / memory) a draft.
    """
    position = torch.arange(log_odds.shape[1], device=log_odds.device)
    accepted = num_emitted[:, None].long() - 1
    reached = ((position < num_verified[:, None]) & (position <= accepted)).float()
    bias, slope = model.coefficients.unbind(1)
    logits = bias + slope * log_odds
    probs = logits.sigmoid()
    weight = reached * probs * (1 - probs)
    response = reached * ((position < accepted).float() - probs) + weight * logits
    keep = (-reached.sum(0) / memory).exp()[:, None]
    information = torch.stack([weight, weight * log_odds, weight * log_odds**2], dim=2).sum(0)
    evidence = torch.stack([response, response * log_odds], dim=2).sum(0)
    model.information.mul_(keep).add_(information)
    model.evidence.mul_(keep).add_(evidence)
    strength = model.evidence.new_tensor(SURVIVAL_PRIOR)
    centre = torch.cat([model.evidence.new_tensor([[0.0, 1.0]]), model.coefficients[:-1]])
    right_bias, right_slope = (model.evidence + strength * centre).unbind(1)
    a, b, d = model.information.unbind(1)
    a, d = a + strength[0], d + strength[1]
    solved = torch.stack([d * right_bias - b * right_slope, a * right_slope - b * right_bias], dim=1)
    solved = solved / (a * d - b * b)[:, None]
    # a falling slope would prefer the drafts the head doubts; it can only be noise
    model.coefficients.copy_(torch.stack([solved[:, 0].clamp(-8, 8), solved[:, 1].clamp(0, 4)], dim=1))
