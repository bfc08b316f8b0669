"""Which (row, step) pairs are trained, on which token, label and law."""

import pytest
import torch

from spectrain.tests.fresh import loud_head
from spectrain.tests.train.toys import Document, pack, random_document, random_target, tiny_config
from spectrain.train import alignment
from spectrain.train.batch import TrainBatch
from spectrain.train.objectives.eagle3 import Eagle3Objective, Eagle3Settings


def batch_of(masks: list[list[str]]) -> TrainBatch:
    """Rows of documents written as mask strings; token t of the whole row is t + 10."""
    rows = []
    for row in masks:
        documents, start = [], 10
        for text in row:
            n = len(text)
            mask = torch.tensor([c == "1" for c in text])
            documents.append(Document(torch.arange(start, start + n), mask, torch.zeros(n, 3, 16), torch.zeros(n, 16)))
            start += n
        rows.append(documents)
    return pack(rows, random_target(64, 16), 1)


def pairs(batch: TrainBatch, steps: int) -> set[tuple[int, int]]:
    valid = alignment.valid_rows(batch, steps)
    assert valid.dtype is torch.bool and valid.shape[1] == 1
    return {(t, k) for k, _, t in valid.nonzero().tolist()}


def test_counted_pairs_equal_the_table_made_by_hand():
    assert pairs(batch_of([["00111011"]]), 3) == {(1, 0), (2, 0), (5, 0), (1, 1)}


@pytest.mark.parametrize("steps", range(1, 7))
def test_supervision_moves_left_with_the_step_and_runs_out(steps: int):
    # prompt of 4, answer of 3: tokens 4, 5, 6
    by_hand = {0: {3, 4}, 1: {3}}
    expected = {(t, k) for k in range(steps) for t in by_hand.get(k, set())}
    assert pairs(batch_of([["0000111"]]), steps) == expected


def test_a_label_never_crosses_into_the_next_document():
    assert pairs(batch_of([["1111", "111"]]), 4) == {(0, 0), (1, 0), (0, 1), (4, 0)}


def test_padding_and_short_documents_are_never_counted():
    batch = batch_of([["1", "11", "111"]])
    wide = batch._replace(
        **{
            name: torch.nn.functional.pad(getattr(batch, name), (0, 5), value=-1 if name == "document_ids" else 0)
            for name in ("token_ids", "positions", "document_ids", "loss_mask", "target_argmax")
        }
    )
    assert pairs(batch, 5) == pairs(wide, 5) == {(3, 0)}
    stained = wide._replace(loss_mask=torch.ones_like(wide.loss_mask))
    assert pairs(stained, 5) == {(3, 0)}


def test_token_label_and_law_of_every_step():
    batch = batch_of([["111111", "111"]])
    batch = batch._replace(target_argmax=batch.token_ids + 100)
    for step in range(4):
        valid = alignment.valid_rows(batch, step + 1)[step, 0].nonzero().squeeze(1)
        own = batch.token_ids[0, valid]
        assert (alignment.input_tokens(batch, step)[0, valid] == own + 1 + step).all()
        assert (alignment.label_tokens(batch, step)[0, valid] == own + 2 + step).all()
        assert (alignment.label_tops(batch, step)[0, valid] == own + 101 + step).all()
        steps = torch.full_like(valid, step)
        assert (alignment.soft_label_rows(valid, steps) == valid + 1 + step).all()
    assert alignment.input_tokens(batch, 2)[0].tolist() == [13, 14, 15, 0, 0, 0, 0, 0, 0]
    assert alignment.label_tokens(batch, 2)[0].tolist() == [14, 15, -1, -1, -1, -1, -1, -1, -1]


def test_shift_beyond_the_row_is_all_fill():
    ids = torch.zeros(1, 3, dtype=torch.int32)
    assert alignment.shift_left(torch.ones(1, 3), 3, ids).eq(0).all()
    assert alignment.shift_left(torch.ones(1, 3), 9, ids, fill=-1).eq(-1).all()


def test_draft_ids_round_trip_and_mark_the_outside():
    used = torch.tensor([3, 5, 6, 9])
    assert alignment.to_draft_ids(used, used, 12).tolist() == [0, 1, 2, 3]
    assert alignment.to_draft_ids(torch.tensor([[-1, 0], [9, 11]]), used, 12).tolist() == [[-1, -1], [3, -1]]
    assert alignment.to_draft_ids(used, None, 12) is used


def test_gradient_reaches_the_draft_logits_of_supervised_rows_only():
    """Prompt of 4, answer of 3: row p reads token p+1 and is trained on p+2, so rows 3 and 4, then row 3 alone."""
    generator = torch.Generator().manual_seed(0)
    config, target = tiny_config(), random_target(16, 16)
    head = loud_head(config, target)
    captured = []

    def keep(_module, _inputs, output):
        output.logits_states.retain_grad()
        captured.append(output.logits_states)

    head.register_forward_hook(keep)
    objective = Eagle3Objective(config, Eagle3Settings(steps=4))
    batch = pack([[random_document(7, 16, 16, generator, prompt=4)]], target, 4)
    objective(head, target, batch).loss.backward()
    # the graph of later steps runs through feedback, not logits_states, so these gradients are the loss's own
    touched = {(t, k) for k, x in enumerate(captured) for t in x.grad[0].abs().sum(-1).nonzero().squeeze(1).tolist()}
    assert touched == {(3, 0), (4, 0), (3, 1)}
