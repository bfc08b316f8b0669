"""DFlash and DSpark trained on targets of known law, decoded by drafters that share no code with training."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from spectrain.heads.dflash import DFlashConfig, DFlashHead
from spectrain.heads.target_tensors import TargetTensors
from spectrain.tests.fresh import fresh_head, loud_head, objective_of
from spectrain.tests.train.blocks import BlockDrafter, block_batch, block_config, drafter_of, spark_config
from spectrain.tests.train.texts import (
    CYCLE,
    ENTROPIES,
    FIB,
    blank,
    certain_law,
    cross_entropy,
    cycle_documents,
    fibonacci_documents,
    overlap,
    shortened,
    unshifted,
)
from spectrain.tests.train.toys import MK, MK_STATIONARY, Document, law_target, mk_windows, share, train
from spectrain.train import alignment, attention
from spectrain.train.attention import BlockAttend
from spectrain.train.objectives.base import LossOutput, predicted_acceptance_length
from spectrain.train.objectives.dflash import DFlashObjective, DFlashSettings

DRAFTS = 3
INPUT_TOKENS, LABEL_TOKENS, LABEL_ROWS = alignment.input_tokens, alignment.label_tokens, alignment.soft_label_rows


def fit(
    documents: list[Document],
    vocab: int,
    steps: int,
    config: dict[str, Any] | None = None,
    shape: Callable[..., DFlashConfig] = block_config,
    **settings: Any,
) -> tuple[DFlashHead, TargetTensors, LossOutput]:
    """A head trained on the documents; ids 0..vocab-1 are text, id vocab is the mask token."""
    target = law_target(certain_law(vocab + 1), 16)
    block = DRAFTS if shape is spark_config else DRAFTS + 1
    head_config = shape(vocab=vocab + 1, hidden=16, **{"block_size": block, **(config or {})})
    head = loud_head(head_config, target)
    objective = objective_of(head_config, slot_decay=50.0, **settings)
    output = train(objective, head, target, block_batch([documents], target, head_config), steps, 1e-2)
    assert isinstance(head, DFlashHead)
    return head, target, output


def acceptance_length(head: DFlashHead, target: TargetTensors, documents: list[Document], anchor: int = 3) -> float:
    """Tokens of a first round whose drafts are compared with the text, the target's own output."""
    total = 0
    for document in documents:
        drafts = drafter_of(head, target, document.aux).drafts(anchor, int(document.token_ids[anchor]))[:DRAFTS]
        hits = [draft == int(document.token_ids[anchor + 1 + k]) for k, draft in enumerate(drafts)]
        total += next((k for k, hit in enumerate(hits) if not hit), len(hits))
    return 1 + total / len(documents)


@pytest.mark.parametrize("config", [{}, {"sample_from_anchor": True, "causal": True, "block_size": DRAFTS}], ids=str)
def test_cycle_is_drafted_to_the_end(config: dict[str, Any]) -> None:
    documents = cycle_documents(9)
    head, target, output = fit(documents, CYCLE, 160, config)
    assert acceptance_length(head, target, documents) == DRAFTS + 1
    assert predicted_acceptance_length(output.metrics) == pytest.approx(DRAFTS + 1)


def test_dspark_drafts_a_cycle_to_the_end() -> None:
    documents = cycle_documents(9)
    head, target, _ = fit(documents, CYCLE, 100, shape=spark_config)
    assert acceptance_length(head, target, documents) == DRAFTS + 1


@pytest.mark.parametrize("by", [-1, 1])
def test_dspark_with_previous_tokens_one_off_accepts_nothing_where_they_decide(
    by: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anchors too; states are blank, and the served walk is right."""
    monkeypatch.setattr(alignment, "input_tokens", lambda batch, step: (INPUT_TOKENS(batch, step) + by) % CYCLE)
    documents = blank(cycle_documents(9))
    head, target, _ = fit(documents, CYCLE, 60, shape=spark_config)
    assert acceptance_length(head, target, documents) == 1


@pytest.mark.parametrize(("by", "loss"), [(-1, "ce"), (1, "kl"), (1, "ce")])
def test_cycle_with_labels_one_off_accepts_nothing(by: int, loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        alignment, "label_tokens", lambda batch, step, ahead: (LABEL_TOKENS(batch, step, ahead) + by) % CYCLE
    )
    monkeypatch.setattr(alignment, "soft_label_rows", lambda rows, steps, ahead: LABEL_ROWS(rows, steps, ahead) + by)
    documents = shortened(cycle_documents(10))
    head, target, _ = fit(documents, CYCLE, 60, loss=loss)
    assert acceptance_length(head, target, cycle_documents(9)) == 1


@pytest.mark.parametrize("served", [False, True])
def test_cycle_served_in_the_other_mode_accepts_nothing(served: bool) -> None:
    """Trained from the anchor and served from the slot behind it, or the other way round, where slot 0 is untrained."""
    documents = cycle_documents(9)
    block = DRAFTS + 1
    head, target, _ = fit(documents, CYCLE, 60, {"sample_from_anchor": not served, "block_size": block})
    other = DFlashHead(block_config(vocab=CYCLE + 1, block_size=block, sample_from_anchor=served))
    other.load_state_dict(head.state_dict())
    found = acceptance_length(other, target, documents)
    assert found < 1.5 if served else found == 1


@pytest.mark.parametrize("by", [-1, 1])
def test_cycle_with_anchors_one_off_accepts_nothing_where_the_token_decides(
    by: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alignment, "input_tokens", lambda batch, step: (INPUT_TOKENS(batch, step) + by) % CYCLE)
    documents = blank(cycle_documents(9))
    head, target, _ = fit(documents, CYCLE, 60)
    assert acceptance_length(head, target, documents) == 1


@pytest.fixture(scope="module")
def fibonacci() -> tuple[DFlashHead, TargetTensors, LossOutput]:
    return fit(fibonacci_documents(8), FIB, 250, {"causal": True})


def test_fibonacci_needs_the_anchor_and_the_state_before_it(fibonacci) -> None:
    head, target, output = fibonacci
    assert acceptance_length(head, target, fibonacci_documents(8)) == DRAFTS + 1
    assert predicted_acceptance_length(output.metrics) == pytest.approx(DRAFTS + 1)


def test_dspark_drafts_fibonacci() -> None:
    head, target, _ = fit(fibonacci_documents(8), FIB, 200, shape=spark_config)
    assert acceptance_length(head, target, fibonacci_documents(8)) == DRAFTS + 1


@pytest.mark.parametrize("by", [-1, 1])
def test_fibonacci_served_one_position_off_loses_its_drafts(fibonacci, by: int) -> None:
    """Where a block stands is what tells its slots apart from each other and from the context."""
    head, target, _ = fibonacci
    documents = [d for d in fibonacci_documents(8) if d.token_ids.any()]
    right = acceptance_length(head, target, documents)
    moved = 0.0
    for document in documents:
        drafter = BlockDrafter(head, target, document.aux)
        drafter.shift = by
        drafts = drafter.drafts(3, int(document.token_ids[3]))
        moved += drafts[0] == int(document.token_ids[4])
    assert right == DRAFTS + 1 and moved / len(documents) < 0.8


def shift_context(monkeypatch: pytest.MonkeyPatch, by: int) -> None:
    """Blocks see the context `by` rows further than they should."""

    def sees(ids: Tensor, line: int, row: Tensor, slot: Tensor, column: Tensor, window: int) -> Tensor:
        return (column <= row + by) & (ids[line, column] == ids[line, row.clamp(min=0)])

    cut = BlockAttend._cut
    monkeypatch.setattr(attention, "sees_context", sees)
    monkeypatch.setattr(BlockAttend, "_cut", lambda self: [(*p[:2], min(p[2] + by, self._seq)) for p in cut(self)])


def test_fibonacci_without_the_state_before_the_anchor_is_at_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks at the very beginning of a document then know one token of the two that decide."""
    shift_context(monkeypatch, -1)
    beginnings = [d._replace(loss_mask=torch.arange(8) < 3) for d in fibonacci_documents(8)]
    _, _, output = fit(beginnings, FIB, 60)
    assert share(output, "agree_0") == pytest.approx(1 / FIB)


def learn_chain(length: int, steps: int = 90, **settings: Any) -> LossOutput:
    """Trained on every window of the chain, states blank: what a window happens to hold before the anchor is no help.

    The last id is the mask token, which never comes.
    """
    law = torch.cat([torch.cat([MK, torch.full((3, 1), 1e-12)], dim=1), torch.full((1, 4), 0.25)])
    target, config = law_target(law, 16), block_config(vocab=4, hidden=16, block_size=3)
    head = fresh_head(config, target)
    windows = blank([d for [d] in mk_windows(length, 16)])
    batch = block_batch([windows[i : i + 31] for i in range(0, 186, 31)], target, config)
    objective = DFlashObjective(config, DFlashSettings(loss="kl", slot_decay=4.0, **settings))
    return train(objective, head, target, batch, steps, 2e-2)


def test_each_slot_converges_to_the_entropy_at_its_distance_and_never_below() -> None:
    output = learn_chain(4)
    for draft, floor in enumerate((0.766596, 0.945307)):
        assert floor - 1e-4 < cross_entropy(output, draft) < floor + 3e-3
        assert share(output, f"alpha_{draft}") == pytest.approx(overlap(draft + 1), abs=2e-2)
    assert overlap(2) == pytest.approx(0.767621, abs=1e-6)
    power, found = MK.clone(), []
    for _ in range(15):
        found.append(float((MK_STATIONARY * -(power * power.log()).sum(-1)).sum()))
        power = power @ MK
    assert found[:5] == pytest.approx(ENTROPIES, abs=1e-6)
    for slots, decay, expected in ((7, 4.0, 0.941931), (15, 7.0, 0.985428)):
        weights = [math.exp(-k / decay) for k in range(slots)]
        mean = sum(w * h for w, h in zip(weights, found, strict=False)) / sum(weights)
        assert mean == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
def test_an_unshifted_anchor_stops_at_the_entropy_one_token_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alignment, "input_tokens", unshifted)
    assert cross_entropy(learn_chain(3), 0) == pytest.approx(0.945307, abs=3e-3)


@pytest.mark.slow
def test_a_label_one_ahead_stops_at_the_entropy_one_token_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alignment, "soft_label_rows", lambda rows, steps, ahead: LABEL_ROWS(rows, steps, ahead) + 1)
    assert cross_entropy(learn_chain(3), 0) == pytest.approx(0.945307, abs=3e-3)


def test_confidence_weights_reach_the_same_optimum() -> None:
    output = learn_chain(4, 120, slot_weights="dpace")
    for draft, floor in enumerate((0.766596, 0.945307)):
        assert floor - 1e-4 < cross_entropy(output, draft) < floor + 1.5e-2
