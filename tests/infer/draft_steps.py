"""Draft steps made by hand, for proposers that see tokens only."""

from collections.abc import Sequence
from typing import TypeVar

import torch

from spectrain.infer.planes import Planes
from spectrain.infer.proposers.base import Drafts, DraftStep, Proposer

GARBAGE = 7777

P = TypeVar("P", bound=Proposer)


def step_of(
    texts: Sequence[Sequence[int]],
    *,
    width: int = 64,
    room: int | Sequence[int] = 99,
    request_ids: Sequence[int] | None = None,
    prompt_lens: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
    num_rows: int | None = None,
    wants_confidence: bool = False,
) -> DraftStep:
    """One step of requests with these known texts; whatever of the table they do not cover is garbage."""
    batch = len(texts)
    slots = list(range(batch)) if rows is None else list(rows)
    tokens = torch.full((num_rows or max(slots) + 1, width), GARBAGE, dtype=torch.int32)
    for row, text in zip(slots, texts, strict=True):
        tokens[row, : len(text)] = torch.tensor(list(text), dtype=torch.int32)
    lengths = torch.tensor([len(text) for text in texts])
    return DraftStep(
        request_ids=list(range(batch)) if request_ids is None else list(request_ids),
        slots=torch.tensor(slots),
        block_tables=torch.zeros(batch, 1, dtype=torch.int32),
        seq_lens=lengths,
        last_token_ids=torch.tensor([text[-1] for text in texts]),
        room=torch.tensor([room] * batch if isinstance(room, int) else list(room)),
        temperature=torch.zeros(batch),
        seeds=torch.zeros(batch, dtype=torch.int64),
        wants_confidence=wants_confidence,
        tokens=tokens,
        prompt_lens=torch.tensor([len(text) - 1 for text in texts] if prompt_lens is None else list(prompt_lens)),
    )


def bound(proposer: P, num_rows: int) -> P:
    """The proposer with room for so many requests, without an engine."""
    proposer.bind(Planes((), 1, 1, torch.device("cpu")), num_rows)
    return proposer


def drafted(drafts: Drafts) -> list[list[int]]:
    """The drafts as lists; what stands behind a length must be -1."""
    lengths = drafts.lengths.tolist()
    rows = drafts.token_ids.tolist()
    assert all(set(row[length:]) <= {-1} for row, length in zip(rows, lengths, strict=True))
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]
