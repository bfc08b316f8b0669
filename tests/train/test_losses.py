"""The fused losses against their plain formulas, closed-form optima and extreme inputs."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from spectrain.heads.target_tensors import FinalNorm, TargetTensors
from spectrain.tests.train.toys import MK, MK_STATIONARY, law_target, random_target
from spectrain.train.losses import LossKind, LossRows, LossSettings, RowLosses, soft_linear_loss

KINDS: list[LossKind] = ["ce", "kl", "tv", "lk_lambda", "lk_alpha"]


def plain_row_losses(kind: LossKind, logits: Tensor, p: Tensor, labels: Tensor, kl_share: Tensor) -> Tensor:
    """p [rows, draft_vocab] is not renormalised."""
    q = logits.softmax(-1)
    kept = p / p.sum(-1, keepdim=True)
    alpha = torch.minimum(p, q).sum(-1)
    kl = (kept * (kept.log() - q.log())).sum(-1)
    return {
        "ce": -q.log().gather(1, labels[:, None])[:, 0],
        "kl": kl,
        "tv": 1 - alpha,
        "lk_lambda": kl_share * kl + (1 - kl_share) * (1 - alpha),
        "lk_alpha": -alpha.log(),
    }[kind]


def problem(rows: int, vocab: int, draft_vocab: int, terms: int = 3, hidden: int = 5, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    target = random_target(vocab, 7, seed)
    ids = None if draft_vocab == vocab else torch.randperm(vocab, generator=generator)[:draft_vocab]
    num_targets = max(1, rows // 2)
    loss_rows = LossRows(
        states=torch.randn(rows, hidden, generator=generator, requires_grad=True),
        weights=torch.rand(rows, generator=generator),
        terms=torch.randint(0, terms, (rows,), generator=generator),
        targets=torch.randint(0, num_targets, (rows,), generator=generator),
        labels=torch.randint(0, draft_vocab, (rows,), generator=generator),
    )
    weight = torch.randn(draft_vocab, hidden, generator=generator, requires_grad=True)
    normed = torch.randn(num_targets, 7, generator=generator)
    return loss_rows, weight, target, normed, ids


def plain(kind: LossKind, rows: LossRows, weight: Tensor, target: TargetTensors, normed: Tensor, ids, eta: float):
    p = target.logits_of_normed(normed).softmax(-1)[rows.targets]
    p = p if ids is None else p[:, ids]
    logits = rows.states @ weight.T
    accepting = p / p.sum(-1, keepdim=True) if kind in ("ce", "kl") else p
    alpha = torch.minimum(accepting, logits.softmax(-1)).sum(-1).detach()
    shares = torch.empty_like(alpha)
    for term in rows.terms.unique():
        own = rows.terms == term
        shares[own] = torch.exp(-eta * (alpha[own] * rows.weights[own]).sum() / rows.weights[own].sum())
    losses = plain_row_losses(kind, logits, p, rows.labels, shares)
    return (rows.weights * losses).sum(), losses, alpha


@pytest.mark.parametrize("rows, vocab, draft_vocab, chunk", [(1, 9, 9, 1), (63, 31, 17, 200), (100, 40, 40, 1 << 20)])
@pytest.mark.parametrize("kind", KINDS)
def test_value_and_gradients_equal_plain_autograd(kind: LossKind, rows: int, vocab: int, draft_vocab: int, chunk: int):
    loss_rows, weight, target, normed, ids = problem(rows, vocab, draft_vocab)
    settings = LossSettings(loss=kind, lk_eta=2.0, chunk_elements=chunk)
    fused = soft_linear_loss(loss_rows, weight, target, normed, ids, settings)
    total, losses, alpha = plain(kind, loss_rows, weight, target, normed, ids, 2.0)
    torch.testing.assert_close(fused.total, total, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(fused.losses, losses.detach(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(fused.alphas, alpha, atol=1e-5, rtol=1e-4)
    assert (fused.top_ids == (loss_rows.states @ weight.T).argmax(-1)).all()
    wanted = [loss_rows.states, weight]
    for found, expected in zip(
        torch.autograd.grad(3 * fused.total, wanted), torch.autograd.grad(3 * total, wanted), strict=True
    ):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["ce", "kl", "tv", "lk_alpha"])
def test_numeric_gradients_in_float64(kind: LossKind):
    loss_rows, weight, target, normed, ids = problem(6, 5, 3, hidden=3)

    def total(states: Tensor, weight: Tensor) -> Tensor:
        settings = LossSettings(loss=kind, chunk_elements=20)
        return soft_linear_loss(loss_rows._replace(states=states), weight, target, normed, ids, settings).total

    states = loss_rows.states.detach().double().requires_grad_()
    assert torch.autograd.gradcheck(total, (states, weight.detach().double().requires_grad_()))


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_give_zero_and_zero_gradients(kind: LossKind):
    loss_rows, weight, target, normed, ids = problem(4, 9, 6)
    none = LossRows(*(x[:0] for x in loss_rows))
    fused = soft_linear_loss(none, weight, target, normed[:0], ids, LossSettings(loss=kind))
    states_grad, weight_grad = torch.autograd.grad(fused.total, [loss_rows.states, weight])
    assert fused.total == 0 and (states_grad == 0).all() and (weight_grad == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_output_weight_gets_no_gradient_buffer(kind: LossKind):
    loss_rows, weight, target, normed, ids = problem(5, 9, 6)
    fused = soft_linear_loss(loss_rows, weight.detach(), target, normed, ids, LossSettings(loss=kind))
    total = plain(kind, loss_rows, weight, target, normed, ids, 3.0)[0]
    found, expected = (torch.autograd.grad(x, loss_rows.states)[0] for x in (fused.total, total))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        quiet = soft_linear_loss(loss_rows, weight, target, normed, ids, LossSettings(loss=kind))
    assert not quiet.total.requires_grad
    torch.testing.assert_close(quiet.total, fused.total.detach())


class LargestTensor(TorchDispatchMode):
    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor):
                self.largest = max(self.largest, x.numel())
        return out


@pytest.mark.parametrize("kind", KINDS)
def test_no_tensor_of_all_rows_by_vocabulary_exists(kind: LossKind):
    rows, vocab = 600, 50
    loss_rows, weight, target, normed, ids = problem(rows, vocab, vocab)
    with LargestTensor() as seen:
        settings = LossSettings(loss=kind, chunk_elements=4000)
        soft_linear_loss(loss_rows, weight, target, normed, ids, settings).total.backward()
    assert seen.largest < rows * vocab / 4


@pytest.mark.parametrize("scale", [1.0, 3e4])
@pytest.mark.parametrize("kind", KINDS)
def test_huge_logits_stay_finite(kind: LossKind, scale: float):
    generator = torch.Generator().manual_seed(0)
    signs = torch.randn(8, 8, generator=generator).sign()
    target = TargetTensors(torch.zeros(8, 8), scale * signs, None, FinalNorm("none", None, None, 0.0))
    states = torch.eye(8, requires_grad=True)
    weight = (scale * torch.randn(8, 8, generator=generator).sign()).requires_grad_()
    each = torch.arange(8)
    rows = LossRows(states, torch.ones(8), torch.zeros(8, dtype=torch.int64), each, each)
    out = soft_linear_loss(rows, weight, target, torch.eye(8), None, LossSettings(loss=kind))
    out.total.backward()
    for x in (out.total, out.losses, out.entropies, out.alphas, states.grad, weight.grad):
        assert x is not None and torch.isfinite(x).all()


@pytest.mark.parametrize("kind", KINDS)
def test_loss_is_float32_under_autocast(kind: LossKind):
    loss_rows, weight, target, normed, ids = problem(40, 64, 33, hidden=32)
    settings = LossSettings(loss=kind)
    wide = soft_linear_loss(loss_rows, weight, target, normed, ids, settings)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = soft_linear_loss(loss_rows, weight, target, normed, ids, settings)
    assert {x.dtype for x in (low.total, low.losses, low.alphas)} == {torch.float32}
    assert low.total != wide.total  # the products did run in bfloat16
    torch.testing.assert_close(low.total, wide.total, rtol=2e-2, atol=0)
    wanted = [loss_rows.states, weight]
    for found, expected in zip(
        torch.autograd.grad(low.total, wanted), torch.autograd.grad(wide.total, wanted), strict=True
    ):
        assert found.dtype is torch.float32
        assert (found - expected).norm() < 0.05 * expected.norm()


def one_row(q: Tensor, p: Tensor, settings: LossSettings) -> RowLosses:
    rows = LossRows(torch.ones(1, 1), torch.ones(1), *torch.zeros(3, 1, dtype=torch.int64))
    return soft_linear_loss(rows, q.log()[:, None], law_target(p[None], 1), torch.ones(1, 1), None, settings)


def test_point_values():
    p, q = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.5, 0.2, 0.3])
    expected = {"kl": 0.121172, "tv": 0.2, "lk_lambda": 0.192849, "lk_alpha": 0.223144, "ce": -math.log(0.5)}
    for kind, value in expected.items():
        out = one_row(q, p, LossSettings(loss=kind, lk_eta=3.0))
        assert float(out.total) == pytest.approx(value, abs=1e-6)
        assert float(out.alphas[0]) == pytest.approx(0.8, abs=1e-6)


def test_acceptance_loss_of_a_point_mass_is_cross_entropy():
    q = torch.tensor([0.5, 0.2, 0.3])
    out = one_row(q, torch.tensor([0.0, 1.0, 0.0]), LossSettings(loss="lk_alpha"))
    assert float(out.total) == pytest.approx(-math.log(0.2), abs=1e-5)


def fit_table(
    weights: Tensor,
    law: Tensor,
    settings: LossSettings,
    ids: Tensor | None = None,
    measure: LossSettings | None = None,
) -> RowLosses:
    """One free logit per draft token, shared by all rows (a head that does not see the context).

    Fitted with `settings`, reported as `measure` (None: the same) sees it.
    """
    width = law.shape[1] if ids is None else len(ids)
    table = torch.zeros(width, 1, requires_grad=True)
    count = len(law)
    labels = torch.zeros(count, dtype=torch.int64)
    rows = LossRows(torch.ones(count, 1), weights, torch.zeros_like(labels), torch.arange(count), labels)
    target, normed = law_target(law, count), torch.eye(count)
    optimizer = torch.optim.Adam([table], lr=0.1)
    for i in range(400):
        optimizer.param_groups[0]["lr"] = 0.1 * 0.985**i
        optimizer.zero_grad()
        soft_linear_loss(rows, table, target, normed, ids, settings).total.backward()
        optimizer.step()
    return soft_linear_loss(rows, table, target, normed, ids, measure or settings)


@pytest.mark.parametrize("start, by_kl, by_tv", [(0, 0.7880, 0.8675), (1, 0.7775, 0.8400), (2, 0.7031, 0.7500)])
def test_each_objective_reaches_its_own_optimum(start: int, by_kl: float, by_tv: float):
    """The second slot of a parallel head on the MK chain: it does not know slot 1's token."""
    weights = MK[start]

    def acceptance(settings: LossSettings) -> float:
        return float(weights @ fit_table(weights, MK, settings).alphas)

    assert acceptance(LossSettings(loss="kl")) == pytest.approx(by_kl, abs=1e-3)
    assert acceptance(LossSettings(loss="tv")) == pytest.approx(by_tv, abs=1e-3)
    assert acceptance(LossSettings(loss="lk_lambda", lk_eta=0.0)) == pytest.approx(by_kl, abs=1e-3)
    assert acceptance(LossSettings(loss="lk_lambda", lk_eta=30.0)) == pytest.approx(by_tv, abs=2e-3)
    assert by_kl - 1e-3 <= acceptance(LossSettings(loss="lk_lambda", lk_eta=3.0)) <= by_tv + 1e-3
    grid = torch.cartesian_prod(torch.linspace(0.002, 1, 500), torch.linspace(0.002, 1, 500))
    laws = torch.cat([grid, 1 - grid.sum(1, keepdim=True)], dim=1)
    laws = laws[laws[:, 2] > 0]
    best = (torch.minimum(laws[:, None], MK).sum(-1).log() @ weights).max()
    assert -float(fit_table(weights, MK, LossSettings(loss="lk_alpha")).total.detach()) == pytest.approx(
        float(best), abs=2e-3
    )


def test_reduced_vocabulary_caps_acceptance_and_moves_the_floor():
    """MK with draft vocabulary {0, 1}: the renormalised target reaches the cap in every context."""
    ids = torch.tensor([0, 1])
    alphas, floors = [], []
    for context in range(3):
        law = MK[context : context + 1]
        fit = fit_table(torch.ones(1), law, LossSettings(loss="kl"), ids)
        accepted = fit_table(torch.ones(1), law, LossSettings(loss="kl"), ids, measure=LossSettings(loss="tv"))
        alphas.append(float(accepted.alphas[0]))
        floors.append(float(fit.losses[0] + fit.entropies[0]))
    assert alphas == pytest.approx([0.95, 0.80, 0.50], abs=1e-3)
    assert float(MK_STATIONARY @ torch.tensor(alphas)) == pytest.approx(0.806452, abs=1e-3)
    assert float(MK_STATIONARY @ torch.tensor(floors)) == pytest.approx(0.463549, abs=1e-4)
    kept = MK_STATIONARY[:2] / MK_STATIONARY[:2].sum()  # contexts whose top token can be drafted
    assert float(kept @ torch.tensor(floors[:2])) == pytest.approx(0.408446, abs=1e-4)


def test_bad_settings_say_what_was_found():
    with pytest.raises(ValueError, match="objective.loss must be one of ce, kl.*found 'mse'"):
        LossSettings(loss="mse")
    with pytest.raises(ValueError, match="lk_eta must be 0 or more, found -1"):
        LossSettings(lk_eta=-1)
