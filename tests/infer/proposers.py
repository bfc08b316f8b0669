"""Proposers the engine tests need: drafts that are right until they are not, and drafts that are never meant to be."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from spectrain.infer.planes import Planes
from spectrain.infer.proposers.base import DeviceProposer, Drafts, DraftStep, ObservedRows, Released, Requirements
from spectrain.infer.proposers.host import HostDrafts, HostProposer, HostStep


def keep_drafts(proposer: DeviceProposer | HostProposer) -> dict[tuple[int, int], list[int]]:
    """Everything a proposer drafts from now on, by request and number of known tokens."""
    found: dict[tuple[int, int], list[int]] = {}
    propose: Callable[[Any], Any] = proposer.propose

    def keep(step: DraftStep | HostStep) -> Drafts | HostDrafts:
        drafts = propose(step)
        known = step.seq_lens if isinstance(step, DraftStep) else step.num_known
        for i, (request, length) in enumerate(zip(step.request_ids, known.tolist(), strict=True)):
            found[request, length] = drafts.token_ids[i, : drafts.lengths[i]].tolist()
        return drafts

    proposer.propose = keep
    return found


class RecordingProposer(DeviceProposer):
    """Proposes nothing and keeps every row it was shown, per request, in the order of arrival."""

    def __init__(self, layer_ids: tuple[int, ...] = ()) -> None:
        self.requirements = Requirements(layer_ids=layer_ids, on_host=True)
        self.rows: dict[int, list[tuple[int, int, int, torch.Tensor | None]]] = {}
        self.released: list[tuple[int, bool]] = []

    def bind(self, planes: Planes, num_rows: int) -> None:
        self.planes = planes

    def observe(self, rows: ObservedRows) -> None:
        firsts = rows.batch.cu_seqlens.tolist()
        for i, request_id in enumerate(rows.request_ids):
            for row in range(firsts[i], int(rows.last_rows[i]) + 1):
                state = None if rows.states is None else rows.states[row].clone()
                token, following = int(rows.batch.token_ids[row]), int(rows.next_token_ids[row])
                self.rows.setdefault(request_id, []).append((int(rows.batch.positions[row]), token, following, state))

    def propose(self, step: DraftStep) -> Drafts:
        return Drafts(torch.empty(len(step.seq_lens), 0, dtype=torch.int64), torch.zeros_like(step.seq_lens), None)

    def release(self, request: Released) -> None:
        self.released.append((request.request_id, request.finished))
        if not request.finished:
            self.rows.pop(request.request_id, None)


class NoisyOracle(RecordingProposer):
    """Drafts a known continuation, each token replaced by a random one with probability `error`.

    `continuations` maps a prompt to prompt + output tokens; which prompt a request has is read from its rows.
    """

    def __init__(
        self, continuations: Sequence[Sequence[int]], k: int, error: float, vocab_size: int, seed: int = 0
    ) -> None:
        super().__init__()
        self.continuations, self.k, self.error, self.vocab_size = continuations, k, error, vocab_size
        self.generator = torch.Generator().manual_seed(seed)

    def propose(self, step: DraftStep) -> Drafts:
        drafts = torch.randint(self.vocab_size, (len(step.request_ids), self.k), generator=self.generator)
        for i, (request_id, length) in enumerate(zip(step.request_ids, step.seq_lens.tolist(), strict=True)):
            known = [token for _, token, _, _ in self.rows[request_id]] + [int(step.last_token_ids[i])]
            truth = self._continuation(known)[length : length + self.k]
            for j, token in enumerate(truth):
                if torch.rand((), generator=self.generator) >= self.error:
                    drafts[i, j] = token
        return Drafts(drafts, step.room.clamp(max=self.k), None)

    def _continuation(self, known: list[int]) -> Sequence[int]:
        return next((c for c in self.continuations if list(c[: len(known)]) == known), known)


class LawProposer(RecordingProposer):
    """Draws drafts from a fixed bigram law [vocab, vocab] and carries it, or hides it (`point_mass`)."""

    def __init__(self, law: torch.Tensor, k: int, *, point_mass: bool = False, seed: int = 0) -> None:
        super().__init__()
        self.law, self.k, self.point_mass = law, k, point_mass
        self.generator = torch.Generator().manual_seed(seed)

    def propose(self, step: DraftStep) -> Drafts:
        token, tokens, laws, confidence = step.last_token_ids, [], [], []
        for _ in range(self.k):
            rows = self.law[token]
            token = torch.multinomial(rows, 1, generator=self.generator)[:, 0]
            tokens.append(token)
            laws.append(rows.log())
            confidence.append(self.confidence(rows, token))
        log_probs = None if self.point_mass else torch.stack(laws, dim=1)
        ids, lengths = torch.stack(tokens, dim=1), step.room.clamp(max=self.k)
        return Drafts(ids, lengths, log_probs, confidence=torch.stack(confidence, dim=1))

    def confidence(self, rows: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        """What is told of each draft: by the contract, only what was known before it was `drawn`."""
        return rows.amax(-1)


class ScriptedProposer(RecordingProposer):
    """Returns the given token lists, one a call, for every request."""

    def __init__(self, scripts: Mapping[int, Sequence[int]], k: int) -> None:
        super().__init__()
        self.scripts, self.k = scripts, k

    def propose(self, step: DraftStep) -> Drafts:
        rows, lengths = [], []
        for length in step.seq_lens.tolist():
            script = list(self.scripts.get(length, []))[: self.k]
            lengths.append(len(script))
            rows.append(script + [-1] * (self.k - len(script)))
        return Drafts(torch.tensor(rows, dtype=torch.int64), torch.tensor(lengths), None)
