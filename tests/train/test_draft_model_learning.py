"""Draft models and PARD trained on targets of known law, decoded by transformers, which shares no code of ours."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from spectrain.heads.draft_model import DraftModel
from spectrain.heads.target_tensors import TargetTensors
from spectrain.tests.language_models import chain_drafts, in_transformers, parallel_logits, random_draft_model
from spectrain.tests.train.test_draft_model_objective import pack_seeded
from spectrain.tests.train.texts import (
    CYCLE,
    ENTROPIES,
    certain_law,
    cross_entropy,
    cycle_documents,
    fibonacci_documents,
    overlap,
)
from spectrain.tests.train.toys import MK, Document, law_target, mk_windows, share, tiny_config, train
from spectrain.train import alignment
from spectrain.train.objectives.base import LossOutput, predicted_acceptance_length
from spectrain.train.objectives.draft_model import DraftModelObjective, DraftModelSettings
from spectrain.train.objectives.pard import PardObjective, PardSettings

DRAFTS = 4
LABEL_TOKENS, LABEL_ROWS = alignment.label_tokens, alignment.soft_label_rows
METHODS = ["draft_model", "pard"]


def learn(
    method: str, documents: list[Document], law: Tensor, train_steps: int, lr: float = 1e-2, **settings: object
) -> tuple[DraftModel, TargetTensors, LossOutput]:
    """Trains over the vocabulary of the law and one token more, the mask."""
    vocab = law.shape[1] + 1
    target = law_target(torch.nn.functional.pad(law, (0, 1)), 16)
    head = random_draft_model(tiny_config(vocab=vocab).target, parallel=method == "pard")
    steps = int(str(settings.pop("steps", DRAFTS)))
    if method == "pard":
        objective = PardObjective(head.config, PardSettings(steps=steps, retention=1.0, **settings))
    else:
        objective = DraftModelObjective(head.config, DraftModelSettings(**settings))
    batch = pack_seeded([[d] for d in documents], target, objective.num_terms)
    return head, target, train(objective, head, target, batch, train_steps, lr)  # pyright: ignore[reportArgumentType]


def acceptance_length(head: DraftModel, method: str, documents: list[Document], folder: Path, row: int = 2) -> float:
    """Greedy drafts after rows 0..`row` of each text, counted up to the first that differs from the text."""
    model, counts = in_transformers(head, folder), []
    for document in documents:
        text = document.token_ids.tolist()
        known, rest = text[: row + 1], text[row + 1 : row + 1 + DRAFTS]
        if method == "pard":
            drafts = parallel_logits(model, known, head.config.vocab_size - 1, DRAFTS).argmax(-1).tolist()
        else:
            drafts = chain_drafts(model, known, DRAFTS)
        hits = [a == b for a, b in zip(drafts, rest, strict=True)]
        counts.append(hits.index(False) if False in hits else DRAFTS)
    return 1 + sum(counts) / len(counts)


@pytest.mark.parametrize(("method", "loss"), [("draft_model", "ce"), ("pard", "kl")])
def test_cycle_is_drafted_to_the_end(method: str, loss: str, tmp_path: Path):
    documents = cycle_documents(9, layers=0)
    head, _, output = learn(method, documents, certain_law(CYCLE), 60, loss=loss)
    assert acceptance_length(head, method, documents, tmp_path) == DRAFTS + 1
    assert predicted_acceptance_length(output.metrics) == pytest.approx(1 + (DRAFTS if method == "pard" else 1))


@pytest.mark.parametrize(
    ("method", "loss", "by"),
    [("draft_model", "ce", -1), ("draft_model", "kl", 1), ("pard", "ce", 1), ("pard", "kl", -1)],
)
def test_cycle_with_labels_one_off_accepts_nothing(
    method: str, loss: str, by: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(alignment, "soft_label_rows", lambda rows, steps, ahead: LABEL_ROWS(rows, steps, ahead) + by)
    monkeypatch.setattr(
        alignment, "label_tokens", lambda batch, step, ahead: (LABEL_TOKENS(batch, step, ahead) + by) % CYCLE
    )
    documents = cycle_documents(9, layers=0)
    masked = [
        d._replace(loss_mask=(torch.arange(10) > 0) & (torch.arange(10) < 9)) for d in cycle_documents(10, layers=0)
    ]
    head, _, _ = learn(method, masked, certain_law(CYCLE), 40, loss=loss)
    assert acceptance_length(head, method, documents, tmp_path) == 1


@pytest.mark.parametrize("method", METHODS)
def test_fibonacci_needs_the_token_before_the_newest(method: str, tmp_path: Path):
    documents = fibonacci_documents(7, modulus=3, layers=0)
    head, _, _ = learn(method, documents, certain_law(3), 120, loss="ce")
    assert acceptance_length(head, method, documents, tmp_path) == DRAFTS + 1


def test_each_step_of_a_parallel_draft_converges_to_its_own_entropy_and_never_below():
    """Step 1 knows the text up to x_0 alone: its law is a row of P^2, although its label is the target's law after x_1.

    Every bigram of the windows occurs in exact proportion, so the floors are those of the stationary chain.
    """
    documents = [row[0]._replace(aux=row[0].aux[:, :0]) for row in mk_windows(3, 16)]
    output = learn("pard", documents, MK, 50, 5e-2, steps=2, loss="kl")[2]
    for step, floor in enumerate(ENTROPIES[:2]):
        assert floor - 1e-4 < cross_entropy(output, step) < floor + 3e-3, step
        assert share(output, f"alpha_{step}") == pytest.approx(overlap(step + 1), abs=2e-2)


def test_a_draft_model_converges_to_the_entropy_of_the_chain():
    windows = [row[0] for row in mk_windows(3, 16)]
    documents = [d._replace(aux=d.aux[:, :0]) for d in windows]
    output = learn("draft_model", documents, MK, 70, 3e-2, loss="kl")[2]
    assert share(output, "entropy_0") == pytest.approx(0.766596, abs=1e-4)
    assert -1e-6 < share(output, "loss_0") < 2e-3 and share(output, "alpha_0") > 0.98
