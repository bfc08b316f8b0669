"""Draft rows of heads whose steps do not wait for each other: all steps of all rows in one line, for one forward."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class DraftLine(NamedTuple):
    """The draft rows of a batch: steps 1, 2, ... of each row that has any, row by row, behind the rows of step 0."""

    from_rows: Tensor  # [num_drafts] int64, in batch * seq
    steps: Tensor  # [num_drafts] int64
    places: Tensor  # [num_rows] int64; where the rows asked for lie, step by step, once step 0's batch * seq precede


def draft_line(per_step: Sequence[Tensor], num_rows: int, pad: bool) -> DraftLine:
    """The rows asked for at each step and, since later steps attend to them, all earlier steps of theirs.

    `per_step[k]` [rows] int64 in `num_rows` = batch * seq. With `pad` the line is lengthened to one of few lengths.
    """
    device = per_step[0].device
    deepest = torch.zeros(num_rows, dtype=torch.int64, device=device)
    for step, rows in enumerate(per_step):
        deepest[rows] = step
    starts = deepest.cumsum(0) - deepest
    from_rows = torch.arange(num_rows, device=device).repeat_interleave(deepest)
    steps = torch.arange(len(from_rows), device=device) - starts[from_rows] + 1
    places = [rows if step == 0 else num_rows + starts[rows] + step - 1 for step, rows in enumerate(per_step)]
    if pad and len(from_rows):
        padding = -len(from_rows) % max(128, num_rows // 2)
        from_rows = torch.cat([from_rows, from_rows[-1:].expand(padding)])
        steps = torch.cat([steps, torch.ones_like(steps[:1]).expand(padding)])
    return DraftLine(from_rows, steps, torch.cat(places))
