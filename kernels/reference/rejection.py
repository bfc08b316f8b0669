"""How drafts are verified: the twin of `rejection.py`."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..noise import noise_keys, uniforms
from ..records import RejectionInputs, RejectionOutputs, Stream, VerifyMode
from .sampling import BlockStats, block_stats, draw


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
    stats = block_stats(logits)
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
        masses = block_stats(left).log_masses()
        anything_left = (rejected & (masses.amax(dim=-1) > -torch.inf))[:, None]
        scores = torch.where(anything_left, left, scores)
        log_masses = torch.where(anything_left, masses, log_masses)
    return draw(scores, log_masses, keys, fp64)
