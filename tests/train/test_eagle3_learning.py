"""EAGLE-3 trained on targets of known law, decoded by a drafter that shares no code with training."""

import pytest
import torch
from torch import Tensor

from spectrain.heads.eagle3 import Eagle3Head
from spectrain.heads.target_tensors import TargetTensors
from spectrain.tests.fresh import loud_head
from spectrain.tests.train.reference_decoder import accepted_drafts
from spectrain.tests.train.texts import (
    CYCLE,
    FIB,
    blank,
    certain_law,
    cross_entropy,
    cycle_documents,
    fibonacci_documents,
    shortened,
    unshifted,
)
from spectrain.tests.train.toys import (
    MK,
    Document,
    law_target,
    mk_windows,
    pack,
    share,
    tiny_config,
    train,
)
from spectrain.train import alignment
from spectrain.train.attention import UnrolledAttend
from spectrain.train.objectives.base import LossOutput, predicted_acceptance_length
from spectrain.train.objectives.eagle3 import Eagle3Objective, Eagle3Settings

DRAFTS = 4
FIB_LENGTH, FIB_STEPS = 9, 110
INPUT_TOKENS, LABEL_ROWS, LABEL_TOPS = alignment.input_tokens, alignment.soft_label_rows, alignment.label_tops


def fit(documents: list[Document], vocab: int, steps: int, lr: float = 1e-2, **settings: object):
    """A head trained on the documents, the target, and the last metrics."""
    target = law_target(certain_law(vocab), 16)
    config = tiny_config(vocab=vocab)
    head = loud_head(config, target)
    objective = Eagle3Objective(config, Eagle3Settings(steps=DRAFTS, **settings))
    output = train(objective, head, target, pack([[d] for d in documents], target, DRAFTS), steps, lr)
    return head, target, output


def acceptance_length(head: Eagle3Head, target: TargetTensors, documents: list[Document], row: int = 2) -> float:
    counts = [accepted_drafts(head, target, d.token_ids, d.aux, row, DRAFTS) for d in documents]
    return 1 + sum(counts) / len(counts)


def test_cycle_is_drafted_to_the_end():
    documents = cycle_documents(9)
    head, target, output = fit(documents, CYCLE, steps=80)
    assert acceptance_length(head, target, documents) == DRAFTS + 1
    assert predicted_acceptance_length(output.metrics) == pytest.approx(DRAFTS + 1)


@pytest.mark.parametrize("by", [-1, 1])
def test_cycle_with_labels_one_off_accepts_nothing(by: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(alignment, "soft_label_rows", lambda *where: LABEL_ROWS(*where) + by)
    documents = cycle_documents(9)
    head, target, _ = fit(shortened(cycle_documents(10)), CYCLE, steps=40)
    assert acceptance_length(head, target, documents) == 1


@pytest.mark.parametrize("by", [-1, 1])
def test_cycle_with_tokens_one_off_accepts_nothing_where_the_token_decides(by: int, monkeypatch: pytest.MonkeyPatch):
    """States are blank here: beside a telling state a wrong token goes unnoticed on a cycle."""
    documents = blank(cycle_documents(9))
    monkeypatch.setattr(alignment, "input_tokens", lambda batch, step: (INPUT_TOKENS(batch, step) + by) % CYCLE)
    head, target, _ = fit(documents, CYCLE, steps=40)
    assert acceptance_length(head, target, documents) == 1


def test_fibonacci_needs_token_state_and_own_history():
    documents = fibonacci_documents(FIB_LENGTH)
    head, target, output = fit(documents, FIB, FIB_STEPS)
    assert acceptance_length(head, target, documents) == DRAFTS + 1
    assert predicted_acceptance_length(output.metrics) == pytest.approx(DRAFTS + 1)


def test_fibonacci_with_labels_one_ahead_accepts_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(alignment, "soft_label_rows", lambda *where: LABEL_ROWS(*where) + 1)
    documents = fibonacci_documents(FIB_LENGTH)
    head, target, _ = fit(shortened(documents), FIB, FIB_STEPS)
    # after row 2 the bonus token is x_3 and x_5 = x_4 + x_3: only where x_3 is 0 do the two labels coincide
    differing = [d for d in documents if d.token_ids[3] != 0]
    assert len(differing) == 20
    assert acceptance_length(head, target, differing) == 1


class BlindLaterSteps(UnrolledAttend):
    """Later steps attend to nothing and are given no state of their own."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first = layer not in self._history
        out = super().__call__(layer, q, k, v)
        return out if first else torch.zeros_like(out)


def test_fibonacci_fails_from_step_one_without_history_and_feedback(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("spectrain.train.objectives.eagle3.UnrolledAttend", BlindLaterSteps)
    documents = fibonacci_documents(FIB_LENGTH)
    target, config = law_target(certain_law(FIB), 16), tiny_config(vocab=FIB)
    head = loud_head(config, target)
    head.register_forward_hook(lambda _m, _i, output: output._replace(feedback=torch.zeros_like(output.feedback)))
    objective = Eagle3Objective(config, Eagle3Settings(steps=DRAFTS))
    output = train(objective, head, target, pack([[d] for d in documents], target, DRAFTS), FIB_STEPS, 1e-2)
    assert share(output, "agree_0") == 1.0
    assert all(share(output, f"agree_{k}") < 0.5 for k in range(1, DRAFTS))


def learn_chain(
    steps: int, rows: list[list[Document]], train_steps: int, lr: float = 3e-2, **config_settings: object
) -> LossOutput:
    target = law_target(MK, 8)
    config = tiny_config(vocab=3, hidden=8, **config_settings)
    reduced = config.draft_vocab_size < 3
    head = loud_head(config, target, draft_vocab=torch.arange(2) if reduced else None)
    objective = Eagle3Objective(config, Eagle3Settings(steps=steps))
    return train(objective, head, target, pack(rows, target, steps), train_steps, lr)


def test_every_step_converges_to_the_entropy_of_the_chain_and_never_below():
    output = learn_chain(3, mk_windows(5, 8)[::3], 250, 1e-2)  # rows 0, 1, 2 of every third window: each bigram once
    assert share(output, "entropy_0") == pytest.approx(0.766596, abs=1e-5)
    for step in range(3):
        assert -1e-6 < share(output, f"loss_{step}") < 3e-3 and share(output, f"alpha_{step}") > 0.97
    assert 0.766596 - 1e-5 < cross_entropy(output) < 0.766596 + 3e-3
    assert sum(0.8**k for k in range(7)) * 0.766596 == pytest.approx(3.029145, abs=1e-5)


def test_unshifted_token_stops_at_the_entropy_two_tokens_away(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(alignment, "input_tokens", unshifted)
    assert cross_entropy(learn_chain(1, mk_windows(3, 8), 70)) == pytest.approx(0.945307, abs=2e-3)


def test_label_one_ahead_stops_at_the_entropy_two_tokens_away(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(alignment, "soft_label_rows", lambda *where: LABEL_ROWS(*where) + 1)
    assert cross_entropy(learn_chain(1, [blank(row) for row in mk_windows(3, 8)], 70)) == pytest.approx(
        0.945307, abs=2e-3
    )


def test_draft_vocabulary_drops_rows_whose_top_token_is_outside():
    """.408446 is the floor over contexts 0 and 1; were context 2 counted it would be .463549."""
    found = cross_entropy(learn_chain(1, mk_windows(3, 8), 70, draft_vocab_size=2))
    assert found == pytest.approx(0.408446, abs=1e-3)
