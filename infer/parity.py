"""The load-time parity check: packed requests on our cache give what each gives alone in the library's attention."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .batch import PackedBatch
from .planes import slots_of
from .probe import TargetError

LENGTHS = (7, 9)
CUTS = (5, 6)
BLOCK_SIZE = 4
BLOCK_TABLES = ((3, 1), (5, 2, 4))
NUM_BLOCKS = 6


def packed_batch(
    token_ids: Sequence[Sequence[int]],
    starts: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
    device: torch.device,
) -> PackedBatch:
    """A batch in which piece b continues request b at position `starts[b]`; the logits of every row are asked for."""
    lengths = [len(piece) for piece in token_ids]
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    positions = [torch.arange(start, end) for start, end in zip(starts, ends, strict=True)]
    slots = [slots_of(table, p, block_size) for table, p in zip(block_tables, positions, strict=True)]
    widest = max(map(len, block_tables))
    tables = [[*table, *[0] * (widest - len(table))] for table in block_tables]
    return PackedBatch(
        token_ids=torch.tensor([token for piece in token_ids for token in piece], device=device),
        positions=torch.cat(positions).to(device),
        slot_mapping=torch.cat(slots).to(device),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int().to(device),
        seq_lens=torch.tensor(ends, dtype=torch.int32, device=device),
        block_tables=torch.tensor(tables, dtype=torch.int32, device=device),
        logits_rows=torch.arange(sum(lengths), device=device),
        max_query_len=max(lengths),
        max_seq_len=max(ends),
    )


def check_parity(
    name: str,
    run: Callable[[PackedBatch], Tensor],
    documents: Sequence[Tensor],
    alone: Sequence[Tensor],
    dtype: torch.dtype,
) -> None:
    """Compares `run` over the documents, in two chunks each, with their lone logits [seq, vocab]; raises TargetError.

    Wide dtypes are held to their worst row. In half precision a router may pick another expert over one rounding, so
    there the median row of each document counts; a leak between documents moves nearly all of them.
    """
    device, ids = documents[0].device, [document.tolist() for document in documents]
    steps = [
        ([d[:cut] for d, cut in zip(ids, CUTS, strict=True)], [0] * len(ids)),
        ([d[cut:] for d, cut in zip(ids, CUTS, strict=True)], list(CUTS)),
    ]
    rows: list[list[Tensor]] = [[] for _ in ids]
    for tokens, starts in steps:
        logits = run(packed_batch(tokens, starts, BLOCK_TABLES, BLOCK_SIZE, device))
        for parts, part in zip(rows, logits.split([len(piece) for piece in tokens]), strict=True):
            parts.append(part)
    half = dtype.itemsize < 4
    bound = 0.1 if half else 1e-3
    for parts, expected in zip(rows, alone, strict=True):
        errors = (torch.cat(parts) - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-6)
        error = (errors.median() if half else errors.max()).item()
        if not error <= bound:
            raise TargetError(
                f"{name} is refused: packed with another request its logits are off by {error:.2g} relative to a lone "
                f"forward, expected at most {bound:g}; its attention is not what it hands over, use another target"
            )
