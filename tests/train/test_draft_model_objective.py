"""The objectives of draft models and PARD against transformers, their dependency tables and their reduction."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from spectrain.heads.base import TargetFacts
from spectrain.heads.draft_model import DraftModel
from spectrain.heads.target_tensors import TargetTensors
from spectrain.tests.language_models import in_transformers, parallel_logits, random_draft_model
from spectrain.tests.train.formulas import assert_acceptance, influences, law_of, row_loss
from spectrain.tests.train.toys import (
    Document,
    counted,
    gradients,
    numbered_documents,
    pack,
    random_document,
    random_target,
    seeded,
    tiny_config,
)
from spectrain.train.batch import TrainBatch
from spectrain.train.conditional_drop import drop_rows
from spectrain.train.losses import LossKind
from spectrain.train.objectives.base import predicted_acceptance_length
from spectrain.train.objectives.draft_model import DraftModelObjective, DraftModelSettings
from spectrain.train.objectives.pard import PardObjective, PardSettings

VOCAB = 17
MASK = VOCAB - 1  # what random_draft_model takes
FACTS: TargetFacts = tiny_config(vocab=VOCAB).target
STYLES = {"llama": {}, "qwen3, tied": {"family": "qwen3", "tie_word_embeddings": True}, "qwen2": {"family": "qwen2"}}
LOSSES: list[LossKind] = ["ce", "kl", "tv", "lk_alpha"]


def make(steps: int, style: str = "llama", **settings) -> tuple[DraftModel, DraftModelObjective]:
    """A draft model and its objective; of one step an ordinary draft model, of several a PARD."""
    head = random_draft_model(FACTS, parallel=steps > 1, **STYLES[style])
    if steps == 1:
        return head, DraftModelObjective(head.config, DraftModelSettings(**settings))
    return head, PardObjective(head.config, PardSettings(steps=steps, **settings))


def pack_seeded(
    rows: list[list[Document]], target: TargetTensors, terms: int, seq: int | None = None, epoch: int = 0
) -> TrainBatch:
    return seeded(pack(rows, target, terms, seq), epoch)


def documents(*lengths: int, seed: int = 1, prompt: int = 0) -> list[Document]:
    generator = torch.Generator().manual_seed(seed)
    return [random_document(n, MASK, 16, generator, layers=0, prompt=prompt) for n in lengths]


def trained_logits(
    head: DraftModel, target: TargetTensors, batch: TrainBatch, objective: DraftModelObjective
) -> dict[tuple[int, int], Tensor]:
    """(row in batch * seq, step) -> draft logits, of every row the objective asks for."""
    supervision = objective.supervise(head, batch)
    steps, rows = supervision.weights.nonzero(as_tuple=True)
    per_step = rows.split(steps.bincount(minlength=objective.num_terms).tolist())
    logits = head.logits(objective.unroll(head, target, batch, per_step), target)
    return dict(zip(zip(rows.tolist(), steps.tolist(), strict=True), logits, strict=True))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("steps", [1, 4])
def test_training_logits_equal_those_of_transformers(style: str, steps: int, tmp_path: Path):
    """Every row and step, in packed documents, and wherever positions start."""
    head, objective = make(steps, style)
    head.eval()
    model, target = in_transformers(head, tmp_path), random_target(VOCAB, 16)
    rows = [documents(7), documents(4, 2, seed=2), documents(1, 5, seed=3)]
    batch = pack(rows, target, steps, seq=8)
    with torch.no_grad():
        found = trained_logits(head, target, batch, objective)
        moved = trained_logits(head, target, batch._replace(positions=batch.positions + 7), objective)
    expected = {}
    for b, row in enumerate(rows):
        start = 8 * b
        for document in row:
            expected |= reference_rows(model, document.token_ids.tolist(), start, steps)
            start += len(document.token_ids)
    assert found.keys() == expected.keys()
    assert len(found) == sum(max(n - 1 - k, 0) for n in (7, 4, 2, 1, 5) for k in range(steps))
    for key, logits in expected.items():
        torch.testing.assert_close(found[key], logits, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(moved[key], logits, atol=2e-5, rtol=1e-4)


def reference_rows(model: PreTrainedModel, text: list[int], start: int, steps: int) -> dict[tuple[int, int], Tensor]:
    """What transformers says after each beginning of a text, at its end and at each mask behind it."""
    found = {}
    for row in range(len(text)):
        for step, logits in enumerate(parallel_logits(model, text[: row + 1], MASK, steps)):
            if row + 1 + step < len(text):
                found[start + row, step] = logits
    return found


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("steps", [1, 3])
def test_loss_is_one_mean_of_the_formula_over_all_rows(steps: int, kind: LossKind, tmp_path: Path):
    """Row s of step b has label s+1+b, and is trained on the target's law after row s+b, the norm applied once."""
    head, objective = make(steps, loss=kind)
    head.eval()
    model, target = in_transformers(head, tmp_path), random_target(VOCAB, 16)
    texts = documents(9, 5)
    batch = counted(objective, head, pack([texts], target, steps))
    losses = []
    for document in texts:
        law, text = law_of(target, document.final), document.token_ids.tolist()
        for (row, step), logits in reference_rows(model, text, 0, steps).items():
            losses.append(row_loss(kind, logits, law[row + step], text[row + 1 + step]))
    assert batch.denominators.sum() == len(losses)
    output = objective(head, target, batch)
    assert float(output.loss.detach()) == pytest.approx(sum(losses) / len(losses), rel=1e-4)


def test_each_row_sees_the_text_up_to_its_own_and_nothing_else():
    """Row s of step b: every token 0..s of its document, masks, and no token between s and its label."""
    facts = tiny_config(vocab=32).target
    head = random_draft_model(facts, parallel=True)
    objective = PardObjective(head.config, PardSettings(steps=3))
    target, mask = random_target(32, 16), 31
    texts = numbered_documents([6, 5], 16, torch.Generator().manual_seed(0), layers=0)
    head.eval()
    embeds = head.model.embed_tokens.weight
    probe = torch.randn(32, generator=torch.Generator().manual_seed(0))
    found = trained_logits(head, target, pack([texts], target, 3, seq=13), objective)
    assert len(found) == (5 + 4 + 3) + (4 + 3 + 2)
    for (row, step), logits in found.items():
        (gradient,) = torch.autograd.grad(logits @ probe, [embeds], retain_graph=True)
        seen = gradient.abs().sum(-1).nonzero().squeeze(1).tolist()
        first = 0 if row < 6 else 6
        assert seen == [*range(first, row + 1), *([mask] if step else [])]


def test_a_row_sees_its_own_masks_and_no_other_rows():
    """Masks differ by what they attend to: disturbing a mask moves its own row's later steps and nothing else."""
    head, objective = make(4)
    head.eval()
    target = random_target(VOCAB, 16)
    batch = pack([documents(8)], target, 4)
    plain = trained_logits(head, target, batch, objective)
    supervision = objective.supervise(head, batch)
    position_of_mask = 3 + 2  # step 2 of row 3

    def disturb(_module, inputs):
        rows = inputs[0]
        embeds = rows.token_embeds.clone()
        masks = torch.arange(len(embeds)) >= batch.token_ids.numel()
        mine = masks & (rows.positions == position_of_mask)
        embeds[mine.nonzero()[0]] += 1.0  # the first of those at this position: of the row furthest back
        disturbed.append((int(mine.sum()), rows.positions[mine.nonzero()[0]]))
        return (rows._replace(token_embeds=embeds), *inputs[1:])

    disturbed: list = []
    hook = head.register_forward_pre_hook(disturb)
    changed = trained_logits(head, target, batch, objective)
    hook.remove()
    assert disturbed[0][0] == 3 and supervision.valid.sum() == 7 + 6 + 5 + 4
    moved = {key for key in plain if not torch.allclose(plain[key], changed[key], atol=1e-6)}
    # position 5 is step 3 of row 2, step 2 of row 3 and step 1 of row 4; the line orders rows, so row 2's comes first
    assert moved == {(2, 3)}


def test_only_the_table_of_counted_rows_can_change_the_loss():
    """Mask 00111011: rows (2,0) (3,0) (6,0) and (2,1) count; labels x_3 x_4 x_7 and x_4, laws after rows 2, 3 and 6."""
    head, objective = make(3, loss="kl")
    head.eval()
    target = random_target(VOCAB, 16)
    mask = torch.tensor([c == "1" for c in "00111011"])
    (document,) = documents(8, seed=3)
    document = document._replace(loss_mask=mask)
    batch = pack([[document]], target, 3)
    valid = objective.supervise(head, batch).valid
    assert [row.nonzero().squeeze(1).tolist() for row in valid] == [[2, 3, 6], [2], []]
    assert influences(objective, head, target, document) == ({0, 1, 2, 3, 4, 5, 6}, set(), {2, 3, 6})


def test_hard_labels_are_tokens_of_the_counted_rows():
    head, objective = make(3, loss="ce")
    head.eval()
    target = random_target(VOCAB, 16)
    mask = torch.tensor([c == "1" for c in "00111011"])
    (document,) = documents(8, seed=3)
    batch = pack([[document._replace(loss_mask=mask)]], target, 3)
    supervision = objective.supervise(head, batch)
    x = document.token_ids.tolist()
    steps, rows = supervision.weights.nonzero(as_tuple=True)
    assert supervision.labels[steps, rows].tolist() == [x[3], x[4], x[7], x[4]]


class TestConditionalDrop:
    def test_counts_are_those_of_the_paper(self):
        for length, steps, counts in (
            (6, 3, [6, 4, 2]),
            (512, 8, [512, 358, 250, 175, 122, 102, 102, 102]),
        ):
            (document,) = documents(length)
            batch = pack_seeded([[document]], random_target(VOCAB, 16), steps)
            everything = torch.ones(steps, 1, length, dtype=torch.bool)
            assert drop_rows(everything, batch, 0.7, 0.2).sum((1, 2)).tolist() == counts

    def test_kept_rows_are_nested_valid_and_drawn_anew_each_epoch(self):
        head, objective = make(8)
        target = random_target(VOCAB, 16)
        texts = documents(60, 45, 20, prompt=9)
        whole = make(8)[1].supervise(head.eval(), pack([texts], target, 8)).valid
        drawn = []
        for epoch in range(3):
            kept = objective.supervise(head.train(), pack_seeded([texts], target, 8, epoch=epoch)).weights
            assert not (kept & ~whole).any() and torch.equal(kept[0], whole[0])
            assert not (kept[1:] & ~kept[:-1]).any()
            drawn.append(kept)
        assert not torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[1], drawn[2])
        again = objective.supervise(head, pack_seeded([texts], target, 8, epoch=1)).weights
        assert torch.equal(again, drawn[1])

    def test_dropping_rows_changes_no_value_of_those_kept(self):
        head, objective = make(6)
        target = random_target(VOCAB, 16)
        batch = pack_seeded([documents(25, 14), documents(31, seed=4)], target, 6)
        with torch.no_grad():
            whole = trained_logits(head.eval(), target, batch, objective)
            kept = trained_logits(head.train(), target, batch, objective)
        assert len(kept) < 0.7 * len(whole)
        for key, logits in kept.items():
            torch.testing.assert_close(logits, whole[key], atol=1e-5, rtol=1e-5)

    def test_labels_are_those_of_the_whole_grid(self):
        head, objective = make(6, loss="ce")
        target = random_target(VOCAB, 16)
        batch = pack_seeded([documents(25, 14)], target, 6)
        kept = objective.supervise(head.train(), batch)
        line, x = kept.weights.nonzero().tolist(), batch.token_ids.flatten().tolist()
        assert [int(kept.labels[step, row]) for step, row in line] == [x[row + 1 + step] for step, row in line]

    def test_evaluation_measures_every_row(self):
        head, objective = make(4)
        target = random_target(VOCAB, 16)
        batch = pack([documents(12)], target, 4)
        output = objective(head.eval(), target, counted(objective, head, batch))
        assert [float(output.metrics[f"accept_{k}"][1]) for k in range(4)] == [11, 10, 9, 8]


def test_acceptance_metrics_equal_counts_on_transformers_logits(tmp_path: Path):
    facts = tiny_config(vocab=3, hidden=8).target
    head = random_draft_model(facts, parallel=True)
    objective = PardObjective(head.config, PardSettings(steps=3))
    head.eval()
    model, target = in_transformers(head, tmp_path), random_target(3, 8)
    texts = [random_document(n, 2, 8, torch.Generator().manual_seed(n), layers=0) for n in (25, 11, 4)]
    output = objective(head, target, pack([[d] for d in texts], target, 3))
    hits: list[dict[tuple[int, int], bool]] = []
    for document in texts:
        hits.append({})
        tops, text = target.logits(document.final).argmax(-1), document.token_ids.tolist()
        for row in range(len(text)):
            drafts = parallel_logits(model, text[: row + 1], 2, 3).argmax(-1).tolist()
            hits[-1] |= {(row, k): drafts[k] == int(tops[row + k]) for k in range(3) if row + 1 + k < len(text)}
    shares = assert_acceptance(output, hits, 3)
    assert predicted_acceptance_length(output.metrics) == pytest.approx(1 + sum(shares))
    assert 0 < shares[2] < shares[0]


def test_nothing_to_learn_gives_zero_and_gradients_that_are_zero():
    for steps in (1, 3):
        head, objective = make(steps)
        target = random_target(VOCAB, 16)
        batch = pack_seeded([documents(6, prompt=6)], target, steps)
        output = objective(head, target, counted(objective, head, batch))
        output.loss.backward()
        assert float(output.loss.detach()) == 0
        assert all(not gradient.any() for gradient in gradients(head).values())  # pyright: ignore[reportArgumentType]


def test_bad_settings_and_missing_states_are_refused():
    head, objective = make(2)
    target = random_target(VOCAB, 16)
    batch = pack_seeded([documents(5)], target, 2)
    with pytest.raises(ValueError, match="shards without id L"):
        objective(head, target, batch._replace(final_states=None))
    for settings in ({"steps": 0}, {"retention": 1.5}, {"min_retention": math.nan}, {"attention": "sdpa"}):
        with pytest.raises(ValueError, match=f"objective.{next(iter(settings))}"):
            PardSettings(**settings)
