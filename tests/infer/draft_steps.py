"""Draft steps made by hand, for proposers that see tokens only."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch

from spectrain.infer.planes import Planes
from spectrain.infer.proposers.base import DeviceProposer, Drafts, DraftStep, Proposer
from spectrain.infer.proposers.host import HostDrafts, HostProposer, HostStep
from spectrain.infer.texts import HostTexts

GARBAGE = 7777

P = TypeVar("P", bound=Proposer)


def step_of(
    texts: Sequence[Sequence[int]],
    *,
    width: int = 64,
    room: int | Sequence[int] = 99,
    request_ids: Sequence[int] | None = None,
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
    )


class Told(NamedTuple):
    """What an engine keeps for a proposer on the host."""

    texts: HostTexts
    owners: dict[int, int]  # request ids by row


_told: WeakKeyDictionary[HostProposer, Told] = WeakKeyDictionary()


def host_step_of(
    proposer: HostProposer,
    texts: Sequence[Sequence[int]],
    *,
    width: int = 64,
    room: int | Sequence[int] = 99,
    request_ids: Sequence[int] | None = None,
    prompt_lens: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
    num_rows: int | None = None,
    wants_confidence: bool = False,
) -> HostStep:
    """The same for a proposer on the host, which is told what is new since its last step."""
    slots = list(range(len(texts))) if rows is None else list(rows)
    ids = list(range(len(texts))) if request_ids is None else list(request_ids)
    lens = [len(text) - 1 for text in texts] if prompt_lens is None else list(prompt_lens)
    if proposer not in _told:
        _told[proposer] = Told(HostTexts(num_rows or max(slots) + 1, width), {})
        _told[proposer].texts.tokens[:] = GARBAGE
    known, owners = _told[proposer]
    for row, request_id, text, prompt_len in zip(slots, ids, texts, lens, strict=True):
        if owners.get(row) != request_id:
            owners[row] = request_id
            known.admit(row, text, prompt_len)
        else:
            new = np.array([text[known.num_known[row] :]], dtype=np.int64)
            known.append(np.array([row]), new, np.array([new.shape[1]]))
    left = np.full(len(slots), room) if isinstance(room, int) else np.array(room)
    return known.step(ids, np.array(slots), left, wants_confidence=wants_confidence)


def drafts_for(proposer: Proposer, texts: Sequence[Sequence[int]], **fields: Any) -> list[list[int]]:
    """What a proposer drafts in a step of these texts; fields as of `host_step_of`."""
    if isinstance(proposer, HostProposer):
        return drafted(proposer.propose(host_step_of(proposer, texts, **fields)))
    assert isinstance(proposer, DeviceProposer)
    fields.pop("prompt_lens", None)
    return drafted(proposer.propose(step_of(texts, **fields)))


def bound(proposer: P, num_rows: int) -> P:
    """The proposer with room for so many requests, without an engine."""
    proposer.bind(Planes((), 1, 1, torch.device("cpu")), num_rows)
    return proposer


def drafted(drafts: Drafts | HostDrafts) -> list[list[int]]:
    """The drafts as lists; what stands behind a length must be -1."""
    lengths = drafts.lengths.tolist()
    rows = drafts.token_ids.tolist()
    assert all(set(row[length:]) <= {-1} for row, length in zip(rows, lengths, strict=True))
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]
