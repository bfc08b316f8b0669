"""What every objective owes its caller: `from spectrain.tests.train.invariance import assert_no_rows_give_zeros`."""

import torch
from torch import Tensor

from spectrain.heads.base import DraftHead
from spectrain.heads.target_tensors import TargetTensors
from spectrain.tests.train.toys import Document, gradients, pack, random_document, seeded
from spectrain.train.batch import TrainBatch
from spectrain.train.objectives.base import Objective, predicted_acceptance_length

LENGTHS = [(9, 2), (5, 0), (3, 0), (12, 8), (7, 5), (4, 4), (10, 0), (6, 1)]
"""Tokens of each document, and of these prompt."""


def assert_layout_changes_nothing(objective: Objective, head: DraftHead, target: TargetTensors) -> None:
    """Gradients do not depend on accumulation, padding, packing or ranks, nor on what was drawn for a document."""
    generator = torch.Generator().manual_seed(0)
    texts = [_document(head, target, n, generator, prompt) for n, prompt in LENGTHS]

    def packed(rows: list[list[Document]], seq: int | None = None) -> TrainBatch:
        return seeded(pack(rows, target, objective.num_terms, seq))

    whole, blank = packed([[d] for d in texts]), packed([[texts[5]]])
    denominators = objective.count(head, whole)
    assert (denominators > 0).all()

    def summed(batches: list[TrainBatch]) -> dict[str, Tensor]:
        head.zero_grad()
        assert torch.stack([objective.count(head, b) for b in batches]).sum(0).tolist() == denominators.tolist()
        for batch in batches:
            objective(head, target, batch._replace(denominators=denominators)).loss.backward()
        return gradients(head)

    expected = summed([whole])
    layouts = {
        "accumulation": [packed([[d]]) for d in texts],
        "padding": [packed([[d] for d in texts], seq=29)],
        "packing": [packed([texts[:3], texts[3:5], texts[5:]])],
        "two unequal ranks": [packed([[d] for d in texts[:3]]), packed([texts[3:]])],
        "a rank without rows": [whole, blank._replace(loss_mask=torch.zeros_like(blank.loss_mask))],
    }
    for layout, batches in layouts.items():
        for name, gradient in summed(batches).items():
            assert torch.isfinite(gradient).all(), (layout, name)
            apart = (gradient - expected[name]).abs().max()
            assert apart < 1e-5 * expected[name].abs().max() + 1e-6, (layout, name, apart)


def assert_no_rows_give_zeros(objective: Objective, head: DraftHead, target: TargetTensors) -> None:
    """A batch in which nothing is supervised: a loss of 0, and zeros for every trainable parameter."""
    document = _document(head, target, 6, torch.Generator().manual_seed(0), 6)
    empty = seeded(pack([[document]], target, objective.num_terms, seq=9))
    assert objective.count(head, empty).tolist() == [0] * objective.num_terms
    output = objective(head, target, empty._replace(denominators=torch.zeros(objective.num_terms)))
    output.loss.backward()
    assert output.loss == 0
    assert all((gradient == 0).all() for gradient in gradients(head).values())
    assert predicted_acceptance_length(output.metrics) == 1.0


def _document(head: DraftHead, target: TargetTensors, tokens: int, generator: torch.Generator, prompt: int) -> Document:
    hidden, layers = target.lm_head.shape[1], len(head.config.layer_ids)
    return random_document(tokens, head.config.vocab_size, hidden, generator, layers=layers, prompt=prompt)
