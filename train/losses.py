"""Losses of a draft law q against the target's law p, fused with both vocabulary products.

Row formulas, with p over the whole target vocabulary read at the draft vocabulary's columns and p~ = p / sum(p) there:
    ce         -log q(label)
    kl         sum p~ (log p~ - log q)
    tv         1 - alpha,  alpha = sum min(p, q): the probability that a token drawn from q is accepted (2211.17192)
    lk_alpha   -log alpha
    lk_lambda  s kl + (1 - s) tv,  s = exp(-eta mean(alpha)), the mean per term and without gradient (2602.23881)
    ce_tv      s ce + (1 - s) |p - q|_1,  s = ce_share; the norm is 2 tv (2607.05147)
Logits of either side exist for one chunk of rows at a time. Gradients are made in the forward pass, chunk by chunk, in
float32 up to the products. Rows that share a target row share its logits. The mean of lk_lambda runs over the rows of
one call: of them all, it alone depends on how a batch is split.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..heads.target_tensors import TargetTensors

LossKind = Literal["ce", "kl", "tv", "lk_lambda", "lk_alpha", "ce_tv"]
HARD_LABELS = ("ce", "ce_tv")  # losses that ask for the text's own tokens


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """Which loss; `lk_eta` is lk_lambda's eta, `ce_share` ce_tv's s; `chunk_elements` bounds what is held at once."""

    loss: LossKind = "kl"
    lk_eta: float = 3.0
    ce_share: float = 0.1
    chunk_elements: int = 1 << 25

    def __post_init__(self) -> None:
        if self.loss not in get_args(LossKind):
            raise ValueError(f"objective.loss must be one of {', '.join(get_args(LossKind))}, found {self.loss!r}")
        if not self.lk_eta >= 0:
            raise ValueError(f"objective.lk_eta must be 0 or more, found {self.lk_eta}")
        if not 0 <= self.ce_share <= 1:
            raise ValueError(f"objective.ce_share must lie between 0 and 1, found {self.ce_share}")


class LossRows(NamedTuple):
    """The draft rows of one call and what each is trained on."""

    states: Tensor  # [rows, hidden]; the head's logits_states
    weights: Tensor  # [rows] float32; multiply the row losses in the sum
    terms: Tensor  # [rows] int64; draft step or head, for lk_lambda's means
    targets: Tensor  # [rows] int64; index into the normed target states
    labels: Tensor  # [rows] int64 draft ids; read by ce and ce_tv only


class RowLosses(NamedTuple):
    """`total` carries the gradient; the rest is for metrics."""

    total: Tensor  # [] float32; sum of weights * losses
    losses: Tensor  # [rows] float32
    entropies: Tensor  # [rows] float32; of p~, so that kl + entropy is the soft cross-entropy
    alphas: Tensor  # [rows] float32; for ce and kl against p~, which makes them slightly larger
    top_ids: Tensor  # [rows] int64; the draft's top token, a draft id


class _Law(NamedTuple):
    """The target's law after some rows, read at the draft vocabulary's columns; float32."""

    log_p: Tensor  # [targets, draft_vocab]; over the whole target vocabulary
    p: Tensor  # [targets, draft_vocab]
    kept: Tensor  # [targets, draft_vocab]; renormalised
    entropies: Tensor  # [targets]; of kept


class _ChunkLoss(NamedTuple):
    losses: Tensor  # [rows]
    alphas: Tensor  # [rows]
    logit_grads: Tensor | None  # [rows, draft_vocab]


def soft_linear_loss(
    rows: LossRows,
    weight: Tensor,
    target: TargetTensors,
    normed_states: Tensor,
    draft_to_target: Tensor | None,
    settings: LossSettings,
    frozen: Tensor | None = None,
) -> RowLosses:
    """The weighted loss of draft logits `states @ weight.T` against the target's law at each row.

    `weight` [draft_vocab, hidden], or the last columns of it, where the first ones, `frozen` [draft_vocab, width], get
    no gradient; `normed_states` [target_rows, target_hidden], the final norm applied;
    `draft_to_target` [draft_vocab] int64 or None. Products run in the autocast dtype where autocast is on, otherwise in
    the dtype of `states`; the gradients of `states` and `weight` arrive in their own dtypes.
    """
    product_dtype = _product_dtype(rows.states)
    if draft_to_target is not None and settings.loss in ("ce", "kl"):
        # p~ is all they need, so the target's logits outside the draft vocabulary are never made
        bias = None if target.lm_head_bias is None else target.lm_head_bias[draft_to_target]
        target = dataclasses.replace(target, lm_head=target.lm_head[draft_to_target], lm_head_bias=bias)
        draft_to_target = None
    target = dataclasses.replace(target, lm_head=target.lm_head.detach().to(product_dtype))
    if not torch.is_grad_enabled():
        weight = weight.detach()
    order = rows.targets.argsort(stable=True)
    rows = LossRows(*(x[order] for x in rows))
    call = _Call(
        rows=LossRows(*(x.detach() for x in rows)),
        target=target,
        normed_states=normed_states.detach().to(product_dtype),
        draft_to_target=draft_to_target,
        settings=settings,
        product_dtype=product_dtype,
        kl_shares=None,
        frozen=None if frozen is None else frozen.detach(),
    )
    with torch.autocast(rows.states.device.type, enabled=False):
        if settings.loss == "lk_lambda":
            measure = dataclasses.replace(call, settings=dataclasses.replace(settings, loss="tv"))
            alphas = _run(measure, weight.detach(), want_states=False, want_weight=False).alphas
            call = dataclasses.replace(call, kl_shares=_kl_shares(alphas, call.rows, settings.lk_eta))
        total, *per_row = cast(tuple[Tensor, ...], _FusedLoss.apply(rows.states, weight, call))
    return RowLosses(total, *(torch.empty_like(x).scatter_(0, order, x) for x in per_row))


@torch.no_grad()
def label_probs(states: Tensor, weight: Tensor, labels: Tensor, chunk_elements: int) -> Tensor:
    """The draft law's probability [rows] float32 of labels [rows] int64 at states [rows, hidden]."""
    size = max(1, chunk_elements // len(weight))
    product_dtype = _product_dtype(states)
    weight = weight.to(product_dtype)
    probs = []
    for part, wanted in zip(states.to(product_dtype).split(size), labels.split(size), strict=True):
        logits = nn.functional.linear(part, weight).to(_wide(product_dtype))
        probs.append((logits.gather(1, wanted[:, None])[:, 0] - logits.logsumexp(dim=-1)).exp())
    return torch.cat(probs).float()


@dataclass(frozen=True)
class _Call:
    rows: LossRows  # sorted by target row, without graph
    target: TargetTensors
    normed_states: Tensor
    draft_to_target: Tensor | None
    settings: LossSettings
    product_dtype: torch.dtype
    kl_shares: Tensor | None  # [rows]; lk_lambda only
    frozen: Tensor | None  # [draft_vocab, width]


class _Results(NamedTuple):
    losses: Tensor
    entropies: Tensor
    alphas: Tensor
    top_ids: Tensor
    states_grad: Tensor | None
    weight_grad: Tensor | None  # float32


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, call: _Call) -> tuple[Tensor, ...]:
        want_states, want_weight, _ = ctx.needs_input_grad
        results = _run(call, weight, want_states, want_weight)
        ctx.save_for_backward(results.states_grad, results.weight_grad)
        ctx.dtypes = states.dtype, weight.dtype
        per_row = (results.losses, results.entropies, results.alphas, results.top_ids)
        ctx.mark_non_differentiable(*per_row)
        return (call.rows.weights.to(results.losses.dtype) @ results.losses, *per_row)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        states_grad, weight_grad = _scaled_grads(ctx, grads[0])
        return states_grad, weight_grad, None


@once_differentiable
def _scaled_grads(ctx: Any, total_grad: Tensor) -> tuple[Tensor | None, ...]:
    return tuple(
        None if grad is None else (grad * total_grad).to(dtype)
        for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
    )


def _run(call: _Call, weight: Tensor, want_states: bool, want_weight: bool) -> _Results:
    rows, num_rows = call.rows, len(call.rows.targets)
    product_weight, width = weight.to(call.product_dtype), 0
    if call.frozen is not None:
        width = call.frozen.shape[1]
        product_weight = torch.cat([call.frozen.to(call.product_dtype), product_weight], dim=1)
    states = rows.states.to(call.product_dtype)
    device = weight.device
    wide = _wide(states.dtype)
    losses, entropies, alphas = (torch.zeros(num_rows, dtype=wide, device=device) for _ in range(3))
    top_ids = torch.zeros(num_rows, dtype=torch.int64, device=device)
    states_grad = torch.zeros_like(states) if want_states else None
    weight_grad = torch.zeros(weight.shape, dtype=_wide(weight.dtype), device=device) if want_weight else None
    for targets, part in _chunks(call, len(weight)):
        law, index = _target_law(call, targets), rows.targets[part] - targets.start
        logits = (states[part] @ product_weight.T).to(wide)
        top_ids[part] = logits.argmax(dim=-1)
        chunk = _row_losses(call, part, logits, law, index, want_states or want_weight)
        losses[part], entropies[part], alphas[part] = chunk.losses, law.entropies[index], chunk.alphas
        if chunk.logit_grads is not None:
            grads = (chunk.logit_grads * rows.weights[part, None]).to(call.product_dtype)
            if states_grad is not None:
                states_grad[part] = grads @ product_weight
            if weight_grad is not None:
                weight_grad += grads.T @ states[part, width:]
    return _Results(losses, entropies, alphas, top_ids, states_grad, weight_grad)


def _chunks(call: _Call, draft_vocab: int) -> list[tuple[slice, slice]]:
    """Slices of target rows, each with the slice of (sorted) draft rows that are trained on them."""
    num_targets, num_rows = len(call.normed_states), len(call.rows.targets)
    per_target = len(call.target.lm_head) + math.ceil(num_rows / max(num_targets, 1)) * draft_vocab
    size = max(1, call.settings.chunk_elements // per_target)
    starts = list(range(0, num_targets, size))
    edges = torch.tensor([*starts, num_targets], device=call.rows.targets.device)
    cuts = torch.searchsorted(call.rows.targets, edges).tolist()
    return [
        (slice(start, min(start + size, num_targets)), slice(cuts[i], cuts[i + 1]))
        for i, start in enumerate(starts)
        if cuts[i] < cuts[i + 1]
    ]


def _target_law(call: _Call, targets: slice) -> _Law:
    logits = call.target.logits_of_normed(call.normed_states[targets])
    log_p = logits - logits.logsumexp(dim=-1, keepdim=True)
    if call.draft_to_target is not None:
        log_p = log_p[:, call.draft_to_target]
    log_kept = log_p.log_softmax(dim=-1)
    kept = log_kept.exp()
    return _Law(log_p, log_p.exp(), kept, -(kept * log_kept).sum(dim=-1))


def _row_losses(call: _Call, part: slice, logits: Tensor, law: _Law, index: Tensor, want_grad: bool) -> _ChunkLoss:
    """Losses of one chunk's rows, row r against law[index[r]], and their gradients in the draft logits."""
    kind = call.settings.loss
    log_q = logits.log_softmax(dim=-1)
    q, p = log_q.exp(), law.p[index]
    alphas = torch.minimum(p, q).sum(dim=-1)
    if kind == "ce":
        return _cross_entropy(call.rows.labels[part, None], log_q, q, alphas, want_grad)
    if kind == "kl":
        return _divergence(law, index, log_q, q, alphas, want_grad)
    if kind == "lk_alpha":
        return _log_acceptance(law.log_p[index], log_q, q, alphas, want_grad)
    losses, grads = 1 - alphas, None
    if want_grad:
        falls = q * _smaller(q, p)
        grads = torch.addcmul(-falls, q, falls.sum(dim=-1, keepdim=True))
    if call.kl_shares is not None:
        share = call.kl_shares[part]
        kl = _divergence(law, index, log_q, q, alphas, want_grad)
        losses = torch.lerp(losses, kl.losses, share)
        if grads is not None and kl.logit_grads is not None:
            grads = torch.lerp(grads, kl.logit_grads, share.unsqueeze(-1))
    if kind == "ce_tv":
        ce = _cross_entropy(call.rows.labels[part, None], log_q, q, alphas, want_grad)
        losses = torch.lerp(2 * losses, ce.losses, call.settings.ce_share)
        if grads is not None and ce.logit_grads is not None:
            grads = torch.lerp(2 * grads, ce.logit_grads, call.settings.ce_share)
    return _ChunkLoss(losses, alphas, grads)


def _cross_entropy(labels: Tensor, log_q: Tensor, q: Tensor, alphas: Tensor, want_grad: bool) -> _ChunkLoss:
    """labels [rows, 1]."""
    grads = q.scatter_add(1, labels, torch.full_like(labels, -1, dtype=q.dtype)) if want_grad else None
    return _ChunkLoss(-log_q.gather(1, labels).squeeze(1), alphas, grads)


def _divergence(law: _Law, index: Tensor, log_q: Tensor, q: Tensor, alphas: Tensor, want_grad: bool) -> _ChunkLoss:
    kept = law.kept[index]
    losses = -(kept * log_q).sum(dim=-1) - law.entropies[index]
    return _ChunkLoss(losses, alphas, q - kept if want_grad else None)


def _log_acceptance(log_p: Tensor, log_q: Tensor, q: Tensor, alphas: Tensor, want_grad: bool) -> _ChunkLoss:
    # in logarithms throughout: alpha itself underflows where the laws hardly meet
    log_min = torch.minimum(log_p, log_q)
    log_alphas = log_min.logsumexp(dim=-1)
    if not want_grad:
        return _ChunkLoss(-log_alphas, alphas, None)
    falls = (log_min - log_alphas.unsqueeze(-1)).exp() * _smaller(log_q, log_p)
    return _ChunkLoss(-log_alphas, alphas, torch.addcmul(-falls, q, falls.sum(dim=-1, keepdim=True)))


def _smaller(a: Tensor, b: Tensor) -> Tensor:
    """1 where a < b, 0 where a > b, 1/2 where equal: the subgradient torch.minimum takes."""
    return torch.sign(b - a).add_(1).mul_(0.5)


def _kl_shares(alphas: Tensor, rows: LossRows, eta: float) -> Tensor:
    weights = rows.weights.to(alphas.dtype)
    sums = torch.bincount(rows.terms, weights * alphas)
    totals = torch.bincount(rows.terms, weights)
    return torch.exp(-eta * (sums / totals)[rows.terms]).to(alphas.dtype)


def _product_dtype(states: Tensor) -> torch.dtype:
    device = states.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
