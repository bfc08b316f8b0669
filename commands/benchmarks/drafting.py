"""Drafting without a head: what n-gram drafts cost a step, on the host and on the device, beside a plain decoding step.

The proposers run alone on texts that repeat themselves, all requests growing by a few tokens a step. Checked: both
draft the same, and what a search of the whole text from scratch finds.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ...infer.planes import Planes
from ...infer.proposers.base import DraftStep
from ...infer.proposers.ngram import NgramProposer
from ...infer.proposers.ngram_gpu import NgramGpuProposer
from ...infer.proposers.ngram_rule import NgramRule
from ...infer.proposers.none import NoneProposer
from ...infer.target import Target
from ...infer.texts import HostTexts
from ..engines import build_engine
from .record import Check, Record
from .steady import recorded, start, steady, stop, tokens_needed
from .targets import Source, random_prompts
from .timing import Timing, synchronize, time_calls

REPEATS = 5
EMITTED = 3  # tokens a request a step
PIECE = 16  # texts are made of pieces of this many tokens, each of which comes twice on average
SEARCHED = 4  # steps whose drafts are searched for from scratch


class Work(NamedTuple):
    """What to draft for."""

    requests: int
    context: int
    steps: int
    num_draft_tokens: int
    rule: NgramRule

    @property
    def grown(self) -> int:
        """Tokens that a request has in the end."""
        return self.context + EMITTED * (self.steps * REPEATS + 1)

    @property
    def width(self) -> int:
        return self.grown + self.num_draft_tokens + 2


class Measured(NamedTuple):
    """One method: a step, the step that first sees the texts, and every draft in between."""

    step: Timing
    first_ms: float
    drafts: list[list[list[int]]]  # by step and request


def run(record: Record, source: Source, work: Work) -> None:
    """Adds a row a method; raises BenchError where drafts are not what a search finds."""
    decode_ms = _decode_ms(source, work)
    texts = _texts(work, record.device)
    found = {"ngram": _on_host(texts, work), "ngram_gpu": _on_device(texts, work)}
    checks = [_same(found["ngram"].drafts, found["ngram_gpu"].drafts), _searched(found["ngram"].drafts, texts, work)]
    for name, measured in found.items():
        lengths = [len(draft) for drafts in measured.drafts for draft in drafts]
        row: dict[str, Any] = {
            "method": name,
            "requests": work.requests,
            "context": work.context,
            "num_draft_tokens": work.num_draft_tokens,
            "us": measured.step.ms * 1000,
            "spread": measured.step.spread,
            "decode_ms": decode_ms,
            "to_decode_step": measured.step.ms / decode_ms,
            "first_step_ms": measured.first_ms,
            "drafted_a_request": sum(lengths) / len(lengths),
        }
        record.add(row, checks)


def _decode_ms(source: Source, work: Work) -> float:
    """Target and sampling of a plain step at this load: the recorded calls alone where there are any."""
    new = tokens_needed(work.steps, 0, work.requests * work.context)
    target = Target.from_model(source.build(), max_length=work.context + new)
    engine = build_engine(
        target, NoneProposer(), num_draft_tokens=0, batch_size=work.requests, longest=work.context + new
    )
    start(engine, random_prompts(work.requests, work.context, target.vocab_size), new)
    loop, alone = steady(engine, work.steps), recorded(engine)
    stop(engine)
    ms = loop.target_ms if alone is None else alone.target.ms
    assert ms is not None, "a steady loop decodes"
    return ms


def _texts(work: Work, device: torch.device) -> torch.Tensor:
    """A request table's tokens [requests, width] int32."""
    rng = np.random.default_rng(0)
    count = -(-work.width // PIECE)
    pieces = rng.integers(0, 100_000, (work.requests, count // 2 + 1, PIECE))
    order = rng.integers(0, count // 2 + 1, (work.requests, count))
    tokens = pieces[np.arange(work.requests)[:, None], order].reshape(work.requests, -1)[:, : work.width]
    return torch.from_numpy(tokens.astype(np.int32)).to(device)


def _on_host(texts: torch.Tensor, work: Work) -> Measured:
    """What was emitted comes from the device, and drafts go there."""
    proposer, known = NgramProposer(work.num_draft_tokens, work.rule), HostTexts(*texts.shape)
    proposer.bind(Planes((), 1, 1, texts.device), work.requests)
    rows = np.arange(work.requests)
    for row, text in enumerate(texts[:, : work.context].cpu().numpy()):
        known.admit(row, text, work.context)
    room, counts = np.full(work.requests, work.num_draft_tokens), np.full(work.requests, EMITTED)

    def step(index: int) -> tuple[np.ndarray, np.ndarray]:
        if index:
            end = work.context + EMITTED * index
            known.append(rows, texts[:, end - EMITTED : end].cpu().numpy(), counts)
        ids, lengths, *_ = proposer.propose(known.step(rows.tolist(), rows, room))
        torch.from_numpy(np.concatenate([ids, lengths[:, None]], axis=1)).to(texts.device)
        return ids, lengths

    return _measured(step, texts.device, work)


def _on_device(texts: torch.Tensor, work: Work) -> Measured:
    """The drafting alone, replayed where a GPU records it."""
    proposer, device = NgramGpuProposer(work.num_draft_tokens, work.rule), texts.device

    steps = [_step(texts, work.context + EMITTED * i, work) for i in range(work.steps * REPEATS + 1)]
    measured = _measured(lambda index: proposer.propose(steps[index])[:2], device, work)
    if device.type != "cuda":
        return measured
    return measured._replace(step=time_calls([lambda: proposer.propose(steps[-1])], device))


def _measured(step: Callable[[int], tuple[Any, Any]], device: torch.device, work: Work) -> Measured:
    """Runs every step once, in order; `step` gives ids [requests, k] and lengths [requests]."""
    times: list[float] = []
    drafts: list[list[list[int]]] = []
    for index in range(work.steps * REPEATS + 1):
        synchronize(device)
        begun = time.perf_counter()
        ids, lengths = step(index)
        synchronize(device)
        times.append(1000 * (time.perf_counter() - begun))
        drafts.append([row[:length] for row, length in zip(ids.tolist(), lengths.tolist(), strict=True)])
    each = times[1:]
    return Measured(Timing.of([sum(each[i::REPEATS]) / work.steps for i in range(REPEATS)]), times[0], drafts)


def _step(texts: torch.Tensor, known: int, work: Work) -> DraftStep:
    device, rows = texts.device, torch.arange(work.requests, device=texts.device)
    full = torch.full_like(rows, known)
    return DraftStep(
        request_ids=list(range(work.requests)),
        slots=rows,
        block_tables=torch.zeros(work.requests, 1, dtype=torch.int32, device=device),
        seq_lens=full,
        last_token_ids=texts[:, known - 1].long(),
        room=torch.full_like(rows, work.num_draft_tokens),
        temperature=torch.zeros(work.requests, device=device),
        seeds=rows,
        tokens=texts,
    )


def _same(host: Sequence[Sequence[list[int]]], device: Sequence[Sequence[list[int]]]) -> Check:
    pairs = [pair for steps in zip(host, device, strict=True) for pair in zip(*steps, strict=True)]
    equal = sum(first == second for first, second in pairs)
    # drafts that are all empty prove nothing
    passed = equal == len(pairs) and any(first for first, _ in pairs)
    return Check("host = device", passed, f"{equal} of {len(pairs)} drafts equal")


def _searched(drafts: Sequence[Sequence[list[int]]], texts: torch.Tensor, work: Work) -> Check:
    """Searches whole texts for their ends, by comparing every window of them."""
    tokens, right, total = texts.cpu().numpy(), 0, 0
    for i in np.linspace(0, len(drafts) - 1, SEARCHED).astype(int).tolist():
        known = work.context + EMITTED * i
        for text, draft in zip(tokens, drafts[i], strict=True):
            right += draft == search(text[:known], work.rule, work.num_draft_tokens)
            total += 1
    return Check("drafts = search from scratch", right == total, f"{right} of {total} drafts equal")


def search(text: np.ndarray, rule: NgramRule, num_draft_tokens: int) -> list[int]:
    """The draft behind a text [length] by the rule's own words."""
    for n in range(min(rule.max_n, len(text) - 1), rule.min_n - 1, -1):
        windows = np.lib.stride_tricks.sliding_window_view(text[:-1], n)
        places = np.flatnonzero((windows == text[-n:]).all(axis=1))
        if len(places):
            begin = int(places[0 if rule.occurrence == "earliest" else -1]) + n
            return text[begin : begin + num_draft_tokens].tolist()
    return []
