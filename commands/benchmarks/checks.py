"""Whether two ways to decode the same prompts say the same, by the rule of `infer/losslessness.py`."""

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from ...infer.engine import Engine
from ...infer.losslessness import Generation, check_greedy, rounding_bound
from ...infer.planes import Planes
from ...infer.proposers.base import DeviceProposer, Drafts, DraftStep, ObservedRows, Released, Requirements
from ...infer.sampling import SamplingParams
from ...infer.scoring import score_logits, score_rows
from .record import Check

WRONG_EVERY = 4
NOISE_TEXTS = 4
"""Texts whose rows are computed twice, to see what rounding does."""


def texts_so_far(engine: Engine) -> list[list[int]]:
    """Output tokens of the running requests, in the order they were added."""
    running = sorted(engine.scheduler.running, key=lambda request: request.request_id)
    return [list(request.output_token_ids) for request in running]


def same_text(
    name: str,
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
    found: Sequence[Sequence[int]],
) -> Check:
    """Compares greedy outputs as far as both go; `engine`, idle, is asked for the margin where they part.

    In full precision they must be equal on all but 1 % of the prompts. In half precision every kernel rounds in its own
    way and random weights leave small margins: each difference must lie within the rounding bound, or within what
    rounding was measured to do to the difference of two logits.
    """
    lengths = [min(len(a), len(b)) for a, b in zip(expected, found, strict=True)]
    first, second = (
        [Generation(prompt, text[:length], ()) for prompt, text, length in zip(prompts, texts, lengths, strict=True)]
        for texts in (expected, found)
    )
    dtype = engine.target.dtype
    scores = partial(score_logits, engine, SamplingParams(ignore_eos=True))
    if dtype in (torch.float32, torch.float64):
        allowed, measured = None, Rounding(0.0, True)
    else:
        allowed, measured = len(prompts), _measure_rounding(engine, first[:NOISE_TEXTS])
    verdict = check_greedy(first, second, scores, dtype, allowed, measured_bound=measured.bound)
    said = f"{verdict.equal} of {verdict.checked} texts equal over {sum(lengths)} tokens"
    if verdict.divergences:
        widest = max(
            found["gap"] / found["bound"] if found["gap"] is not None else math.inf for found in verdict.details
        )
        said += f", {verdict.excused} of {verdict.divergences} others part within rounding"
        said += f", the widest at {widest:.2f} of a bound of {measured.bound:.3f}"
    if not measured.is_small:
        said += "; rows computed alone and together differ by more than rounding"
    # texts that share nothing prove nothing
    passed = verdict.passed and measured.is_small and min(lengths, default=0) > 0
    return Check(name, passed, said if verdict.passed else f"{said}; {verdict.reason}")


class Rounding(NamedTuple):
    """How far rounding was seen to move the difference of two logits."""

    bound: float  # six standard deviations
    is_small: bool  # whether that is what rounding can do


def _measure_rounding(engine: Engine, texts: Sequence[Generation]) -> Rounding:
    """Compares rows computed one by one with the same rows in one prefill."""
    parted, widest = [], []
    for generation in texts:
        prompt, text = generation.prompt_token_ids, generation.token_ids
        known, rows = [*prompt, *text], range(len(prompt) - 1, len(prompt) - 1 + len(text))
        together, alone = score_rows(engine, known, rows), score_rows(engine, known, rows, one_by_one=True)
        parted.append((together - alone).square().mean())
        widest.append(rounding_bound(together, engine.target.dtype))
    deviation = float(torch.stack(parted).mean().sqrt())
    return Rounding(6 * math.sqrt(2) * deviation, deviation < max(widest) / 2)


class KnownText(DeviceProposer):
    """Drafts the known continuation of each request, a wrong token now and then; a request's seed names its text.

    So that a check sees every row of a verification step: drafts that are right are kept, and what follows them counts.
    """

    requirements = Requirements(observes=False)

    def __init__(
        self, texts: Sequence[Sequence[int]], num_draft_tokens: int, vocab_size: int, device: torch.device
    ) -> None:
        self.num_draft_tokens, self.vocab_size = num_draft_tokens, vocab_size
        longest = max(map(len, texts))
        padded = [[*text, *[0] * (longest - len(text))] for text in texts]
        self._texts = torch.tensor(padded, dtype=torch.int64, device=device)

    def bind(self, planes: Planes, num_rows: int) -> None:
        pass

    def observe(self, rows: ObservedRows) -> None:
        pass

    def propose(self, step: DraftStep) -> Drafts:
        texts = self._texts
        positions = step.seq_lens[:, None] + torch.arange(self.num_draft_tokens, device=texts.device)
        ids = texts[step.seeds.clamp(0, len(texts) - 1)[:, None], positions.clamp(max=texts.shape[1] - 1)]
        wrong = positions % WRONG_EVERY == 0
        return Drafts(torch.where(wrong, (ids + 1) % self.vocab_size, ids), step.room, None)

    def release(self, request: Released) -> None:
        pass
