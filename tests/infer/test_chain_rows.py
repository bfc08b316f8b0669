"""Where the rows of a draft chain are put, and what its tokens are drawn with."""

import torch

from spectrain.infer.proposers.drafting import ChainRows, draw, draw_all
from spectrain.tests.infer.draft_steps import step_of


def test_rows_follow_each_other_and_those_without_room_go_to_the_padding_block() -> None:
    step = step_of([[7] * 5, [7] * 3, [7] * 1], room=[3, 1, 0])
    step = step._replace(block_tables=torch.tensor([[4, 9], [6, 0], [2, 0]], dtype=torch.int32))
    rows = ChainRows(step, step.seq_lens - 2, step.room, 3, block_size=4)
    positions = [[3, 1, 0], [4, 0, 0], [5, 0, 0]]
    slots = [[4 * 4 + 3, 6 * 4 + 1, 0], [9 * 4, 0, 0], [9 * 4 + 1, 0, 0]]
    for k in range(3):
        batch = rows.at(k, torch.tensor([11, 12, 13]))
        assert batch.positions.tolist() == positions[k] and batch.slot_mapping.tolist() == slots[k]
        assert batch.seq_lens.tolist() == [position + 1 for position in positions[k]]
        assert batch.cu_seqlens.tolist() == [0, 1, 2, 3] and batch.token_ids.tolist() == [11, 12, 13]


def test_no_two_drafts_share_their_noise_even_of_one_position() -> None:
    """A position drafted again, after a draft of it was dropped unseen, must not be told by the noise of the first."""
    num_drafts, logits = 3, torch.zeros(1, 3, 50_000)
    found = {}
    for length in range(1, 9):
        step = step_of([[7] * length])._replace(temperature=torch.ones(1), seeds=torch.tensor([5]))
        tokens, _ = draw_all(logits, step, 0, num_drafts, None, True)
        found |= {(length, k): int(tokens[0, k]) for k in range(num_drafts)}
        alone, _ = draw(logits[:, 0], step, 2, num_drafts, None, True)
        assert int(alone) == found[length, 2]
    assert len(set(found.values())) == len(found)
