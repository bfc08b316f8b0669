"""Where the rows of a draft chain are put: behind the known tokens, and with nobody where there is no room."""

import torch

from spectrain.infer.proposers.drafting import ChainRows
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
