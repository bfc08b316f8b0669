"""Medusa's and the MLP speculator's objectives: the papers' formulas, the dependency table, the reduction."""

import dataclasses

import pytest
import torch
from torch import Tensor

from spectrain.heads.target_tensors import FinalNorm
from spectrain.tests.fresh import fresh_head, loud_head
from spectrain.tests.train.formulas import assert_acceptance, influences, law_of
from spectrain.tests.train.per_step import (
    STYLES,
    make_config,
    make_objective,
    teacher_forced,
)
from spectrain.tests.train.toys import Document, counted, numbered_documents, pack, random_document, random_target
from spectrain.train.losses import LossKind

KINDS = ("ce", "kl", "tv", "lk_lambda", "lk_alpha")
BOTH = ("medusa", "mlp")


def documents(generator: torch.Generator) -> list[list[Document]]:
    return [[random_document(n, 16, 16, generator, layers=0) for n in row] for row in ([7], [4, 2], [1, 5])]


@pytest.mark.parametrize("style", STYLES)
def test_training_logits_equal_the_formulas(style: str):
    config, target = make_config(style), random_target(16, 16)
    head = loud_head(config, target, random_norms=True)
    rows = documents(torch.Generator().manual_seed(1))
    batch = pack(rows, target, 3, seq=8)
    states = make_objective(config).unroll(head, target, batch, torch.arange(24))
    found = torch.stack([head.logits(x, target, k) for k, x in enumerate(states)])
    compared = 0
    for b, row in enumerate(rows):
        start = 8 * b
        for document in row:
            for (t, k), expected in teacher_forced(head, target, document.token_ids, document.final).items():
                torch.testing.assert_close(found[k, start + t], expected, atol=1e-5, rtol=1e-5)
                compared += 1
            start += len(document.token_ids)
    assert compared == 15 + 6 + 1 + 0 + 9  # sum over documents of min(3, n-1-t)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("style", [*BOTH, "medusa, token map", "mlp, token map", "medusa, shared lm_head"])
def test_loss_equals_the_formula_on_reference_logits(style: str, kind: LossKind):
    """Soft labels included: softmax(lm_head(norm(h_L))), the norm exactly once, at the row before the label."""
    config, target = make_config(style), random_target(16, 16)
    head = loud_head(config, target, random_norms=True)
    rows = documents(torch.Generator().manual_seed(1))
    objective = make_objective(config, head_decay=0.6, loss=kind, lk_eta=2.0)
    batch = counted(objective, head, pack(rows, target, 3))
    output = objective(head, target, batch)
    ids = head.draft_to_target()
    ids = torch.arange(16) if ids is None else ids
    pairs: list[list[tuple[Tensor, Tensor, Tensor]]] = [[], [], []]
    for document in (d for row in rows for d in row):
        law = law_of(target, document.final)
        for (t, k), logits in teacher_forced(head, target, document.token_ids, document.final).items():
            if t + 2 + k >= len(document.token_ids):
                continue
            p, label = law[t + 1 + k], document.token_ids[t + 2 + k]
            if (label if kind == "ce" else p.argmax()) in ids:
                pairs[k].append((logits.softmax(0), p[ids], (ids == label).nonzero()))
    assert batch.denominators.tolist() == [len(part) for part in pairs] and all(pairs)
    expected = sum(0.6 ** (k + 1) * float(mean_loss(kind, part)) for k, part in enumerate(pairs))
    assert float(output.loss.detach()) == pytest.approx(expected, rel=1e-5)

    normed_twice = dataclasses.replace(target, norm=lambda x: target.norm(target.norm(x)))
    without_norm = dataclasses.replace(target, norm=FinalNorm("none", None, None, 0.0))
    for wrong in (normed_twice, without_norm):
        assert abs(float(objective(head, wrong, batch).loss.detach()) - expected) > 1e-3


def mean_loss(kind: str, pairs: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    alphas = torch.stack([torch.minimum(p, q).sum() for q, p, _ in pairs])
    kl = torch.stack([(p / p.sum() * (p / p.sum() / q).log()).sum() for q, p, _ in pairs])
    if kind == "ce":
        return -torch.stack([q[label[0, 0]] for q, _, label in pairs]).log().mean()
    share = (-2.0 * alphas.mean()).exp()
    tv = 1 - alphas
    values = {"kl": kl, "tv": tv, "lk_alpha": -alphas.log(), "lk_lambda": share * kl + (1 - share) * tv}
    return values[kind].mean()


@pytest.mark.parametrize("style", [*BOTH, "mlp, tied", "mlp, scaled input", "medusa, shared lm_head"])
def test_each_row_depends_on_exactly_what_the_drafter_knows(style: str):
    """Medusa: h_t alone. MLP head i: h_t and the tokens x_{t+1}..x_{t+1+i}. All of it, and nothing of a neighbour."""
    config, target = make_config(style, vocab=32), random_target(32, 16)
    head, lengths, generator = loud_head(config, target, random_norms=True), [6, 5], torch.Generator().manual_seed(0)
    batch = pack([numbered_documents(lengths, 16, generator, layers=0)], target, 3, seq=13)
    assert batch.final_states is not None
    final = batch.final_states.requires_grad_()
    tables = [p for name, p in head.named_parameters() if ".emb." in name]
    states = list(make_objective(config).unroll(head, target, batch._replace(final_states=final), torch.arange(13)))
    start = 0
    for n in lengths:
        for k in range(3):
            logits = head.logits(states[k], target, k)
            probe = torch.randn(logits.shape[-1], generator=generator)
            for t in range(n - 1 - k):
                by_state, *by_table = torch.autograd.grad(
                    logits[start + t] @ probe, [final, *tables], retain_graph=True, allow_unused=True
                )
                assert by_state[0].abs().sum(-1).nonzero().squeeze(1).tolist() == [start + t]
                used = [grad.abs().sum(-1).nonzero()[:, 0].tolist() for grad in by_table if grad is not None]
                tokens = {token for part in used for token in part}
                known = range(start + t + 1, start + t + 2 + k) if tables else range(0)
                assert tokens == set(known)
        start += n


@pytest.mark.parametrize("style", BOTH)
@pytest.mark.parametrize("kind", ["ce", "kl"])
def test_only_the_table_of_counted_rows_can_change_the_loss(style: str, kind: LossKind):
    """Mask 00111011 counts (1,0) (2,0) (5,0) (1,1): heads read rows 1, 2, 5, soft labels come from rows 2, 3, 6."""
    config, target = make_config(style), random_target(16, 16)
    head = loud_head(config, target, random_norms=True)
    mask = torch.tensor([c == "1" for c in "00111011"])
    document = random_document(8, 16, 16, torch.Generator().manual_seed(3), layers=0)._replace(loss_mask=mask)
    labels = {3, 4, 7} if kind == "ce" else set()  # x_3 and x_7, and x_4 of the second head
    inputs = {2, 3, 6} if style == "mlp" else set()  # bonus tokens; x_3 also at the second step
    laws = {2, 3, 6} if kind == "kl" else set()
    found = influences(make_objective(config, loss=kind), head, target, document)
    assert found == (labels | inputs, set(), {1, 2, 5} | laws)


@pytest.mark.parametrize("style", ["medusa, token map", "mlp, token map"])
@pytest.mark.parametrize("kind", ["ce", "kl"])
def test_rows_the_head_cannot_draft_are_removed_and_still_count_as_misses(style: str, kind: LossKind):
    config, target = make_config(style, draft_vocab_size=4), random_target(16, 16)
    head = loud_head(config, target, random_norms=True)
    document = random_document(40, 16, 16, torch.Generator().manual_seed(0), layers=0)
    objective = make_objective(config, loss=kind)
    batch = counted(objective, head, pack([[document]], target, 3))
    ids = head.draft_to_target()
    assert ids is not None
    wanted = target.logits(document.final).argmax(-1).roll(-1) if kind == "kl" else document.token_ids.roll(-2)
    expected = [sum(int(wanted[t + k] in ids) for t in range(38 - k)) for k in range(3)]
    assert batch.denominators.tolist() == expected and 0 < expected[0] < 38
    output = objective(head, target, batch)
    assert output.metrics["loss_0"][1] == expected[0]
    assert output.metrics["agree_0"][1] == 38 and output.metrics["agree_0"][0] <= expected[0]


def test_acceptance_metrics_equal_counts_on_reference_logits():
    config, target = make_config("mlp", vocab=2, hidden=8), random_target(2, 8)
    head = loud_head(config, target, random_norms=True)
    texts = [random_document(n, 2, 8, torch.Generator().manual_seed(n), layers=0) for n in (25, 11, 4)]
    output = make_objective(config)(head, target, pack([[d] for d in texts], target, 3))
    hits = []
    for document in texts:
        tops = target.logits(document.final).argmax(-1)
        logits = teacher_forced(head, target, document.token_ids, document.final)
        labelled = [(t, k) for t, k in logits if t + 2 + k < len(document.token_ids)]
        hits.append({(t, k): int(logits[t, k].argmax()) == int(tops[t + 1 + k]) for t, k in labelled})
    assert_acceptance(output, hits, 3)


def test_shards_without_the_last_layer_are_refused():
    config, target = make_config("medusa"), random_target(16, 16)
    batch = pack(documents(torch.Generator().manual_seed(0)), target, 3)._replace(final_states=None)
    with pytest.raises(ValueError, match="without id L; extract again"):
        make_objective(config)(fresh_head(config, target), target, batch)
