"""Whether drafting changed what the target says: token equality at temperature 0, a law test above it.

Greedy: a diverging prompt is excused only where the target itself, asked again alone, puts both tokens within a stated
rounding bound of its best. Sampled: the randomised probability-integral transform of each emitted token under the
target's processed rows is uniform if and only if the token was drawn from that law; Kolmogorov-Smirnov, by position in
the verified block, since a wrong acceptance rule shows first there (Rosenblatt 1952; Marsaglia, Tsang, Wang 2003).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

RowScores = Callable[[Sequence[int], Sequence[int], int], Tensor]
"""`scores(token_ids, rows, prompt_len) -> [len(rows), vocab] float32`: what the target says after each row of a text
that begins with a prompt, asked alone, under the run's sampling settings."""

SIGNIFICANCE = 1e-4
SMALLEST_SAMPLE = 20
IMPOSSIBLE_SHARE = 0.01
"""Rounding moves the edge of a top-k or top-p set, so that a rare emitted token lies just outside when asked again."""
ROUNDING_STEPS = {torch.float32: 64, torch.float64: 64, torch.bfloat16: 4, torch.float16: 4}


class Generation(NamedTuple):
    """One finished request as the checks need it."""

    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    block_lengths: Sequence[int]  # tokens each verification step added
    failed: bool = False


@dataclass(frozen=True)
class Divergence:
    """The first place where drafting and plain decoding differ, and what the target says there."""

    prompt: int
    position: int  # in the output
    plain_token: int | None  # None: the output ended there
    drafted_token: int | None
    gap: float | None  # best logit minus the smaller of the two tokens' logits; None where one output just ended
    bound: float
    excused: bool


@dataclass(frozen=True)
class Losslessness:
    """The verdict; counts are prompts."""

    mode: Literal["greedy", "sampled", "synthetic"]
    passed: bool
    checked: int
    equal: int | None
    divergences: int | None
    excused: int | None
    p_value: float | None
    num_tokens: int
    reason: str
    details: list[dict[str, Any]] = field(default_factory=list)
    tested: bool = True  # False: too few tokens to say anything, so that nothing passed and nothing failed


def unchecked_synthetic(outputs: Sequence[Generation]) -> Losslessness:
    """The verdict on drafts that were kept by given rates: not lossless by construction, so nothing was compared."""
    return Losslessness(
        mode="synthetic",
        passed=False,
        checked=0,
        equal=None,
        divergences=None,
        excused=None,
        p_value=None,
        num_tokens=sum(len(output.token_ids) for output in outputs),
        reason="drafts were kept by given rates whatever the target said, so the output means nothing",
        tested=False,
    )


def rounding_bound(logits: Tensor, dtype: torch.dtype) -> float:
    """How far two right computations of one row [vocab] may lie apart when the target computes in `dtype`."""
    allowed = logits.masked_fill(logits.isneginf(), 0)
    return ROUNDING_STEPS[dtype] * torch.finfo(dtype).eps * max(1.0, float(allowed.abs().max()))


def check_greedy(
    plain: Sequence[Generation],
    drafted: Sequence[Generation],
    scores: RowScores,
    dtype: torch.dtype,
    plain_differences: int | None,
    *,
    measured_bound: float = 0.0,
) -> Losslessness:
    """Compares two greedy runs token by token.

    `plain_differences`: prompts on which plain decoding differed from itself at another batch size in the same run;
    None in full precision, where more than 1 % of excused prompts fails. `measured_bound`: how far two right
    computations of this target were seen to part, where that is more than `rounding_bound`.
    """
    pairs = list(zip(plain, drafted, strict=True))
    found = [
        _diverge(i, a, b, scores, dtype, measured_bound)
        for i, (a, b) in enumerate(pairs)
        if list(a.token_ids) != list(b.token_ids)
    ]
    excused = sum(d.excused for d in found)
    failed = sum(b.failed and not a.failed for a, b in pairs)
    limit = len(pairs) / 100 if plain_differences is None else chance_limit(plain_differences)
    if failed:
        reason = f"{failed} prompts failed under drafting only"
    elif excused < len(found):
        reason = f"{len(found) - excused} prompts differ beyond the rounding of {_name(dtype)}"
    elif excused > limit:
        allowed = (
            "1 %" if plain_differences is None else f"what plain decoding shows against itself ({plain_differences})"
        )
        reason = f"{excused} of {len(pairs)} prompts differ by rounding, more than {allowed}"
    else:
        reason = ""
    return Losslessness(
        mode="greedy",
        passed=not reason,
        checked=len(pairs),
        equal=len(pairs) - len(found),
        divergences=len(found),
        excused=excused,
        p_value=None,
        num_tokens=sum(len(g.token_ids) for g in drafted),
        reason=reason,
        details=[vars(d) for d in found],
    )


def count_differences(first: Sequence[Generation], second: Sequence[Generation]) -> int:
    """Prompts whose tokens differ."""
    return sum(list(a.token_ids) != list(b.token_ids) for a, b in zip(first, second, strict=True))


def chance_limit(count: int) -> float:
    """The largest count a second run of the same rate shows by chance: two standard deviations of the difference."""
    return count + 2 * math.sqrt(2 * (count + 1))


def check_sampled(
    outputs: Sequence[Generation], probs: RowScores, generator: torch.Generator, by_position: bool = True
) -> Losslessness:
    """Tests that every emitted token was drawn from the target's processed law `probs`.

    `by_position` must be False for verification rules whose acceptance looks beyond the token (block verification):
    there only the pooled law is the target's.
    """
    groups: dict[int, list[Tensor]] = {}
    impossible = 0
    for output in outputs:
        if not output.token_ids:
            continue
        known = [*output.prompt_token_ids, *output.token_ids]
        start = len(output.prompt_token_ids) - 1
        laws = probs(known[:-1], range(start, start + len(output.token_ids)), start + 1)
        tokens = torch.tensor(list(output.token_ids), device=laws.device)
        impossible += int((laws.gather(1, tokens[:, None]) <= 0).sum())
        values = probability_integrals(laws, tokens, generator)
        for value, position in zip(values, block_positions(output.block_lengths), strict=True):
            groups.setdefault(position if by_position else 0, []).append(value)
    tests = {p: torch.stack(v) for p, v in sorted(groups.items()) if len(v) >= SMALLEST_SAMPLE}
    p_values = {position: ks_p_value(values) for position, values in tests.items()}
    p_value = min(1.0, min(p_values.values()) * len(p_values)) if p_values else None
    num_tokens = sum(len(v) for v in groups.values())
    reason = ""
    if impossible > IMPOSSIBLE_SHARE * num_tokens:
        reason = f"{impossible} of {num_tokens} emitted tokens have probability 0 under the target"
    elif p_value is None:
        reason = f"too few tokens to test: {num_tokens}, at least {SMALLEST_SAMPLE} at one block position are needed"
    elif p_value <= SIGNIFICANCE:
        reason = f"emitted tokens do not follow the target's law (p = {p_value:.1e})"
    return Losslessness(
        mode="sampled",
        passed=not reason,
        checked=len(outputs),
        equal=None,
        divergences=None,
        excused=None,
        p_value=p_value,
        num_tokens=num_tokens,
        reason=reason,
        details=[{"block_position": q, "num_tokens": len(tests[q]), "p_value": p} for q, p in p_values.items()],
        tested=p_value is not None or impossible > IMPOSSIBLE_SHARE * num_tokens,
    )


def probability_integrals(laws: Tensor, tokens: Tensor, generator: torch.Generator) -> Tensor:
    """F(token - 1) + v * p(token) with v uniform: [n] float64 of laws [n, vocab] and tokens [n] int64."""
    wide = laws.double().cpu()
    wide = wide / wide.sum(-1, keepdim=True)
    index = tokens.cpu()[:, None]
    upper = wide.cumsum(-1).gather(1, index)[:, 0]
    mass = wide.gather(1, index)[:, 0]
    uniform = torch.rand(len(tokens), generator=generator, dtype=torch.float64)
    return (upper - mass + uniform * mass).clamp(0, 1)


def ks_p_value(values: Tensor) -> float:
    """P(a uniform sample of this size lies as far from uniform as `values` [n]): Kolmogorov's limit, Stephens' n."""
    n = len(values)
    ordered = values.double().sort().values
    ranks = torch.arange(1, n + 1, dtype=torch.float64)
    distance = max(float((ranks / n - ordered).max()), float((ordered - (ranks - 1) / n).max()))
    x = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * distance
    if x < 0.2:  # the series converges slowly where the answer is 1 to many digits
        return 1.0
    total = 2 * sum((-1) ** (j - 1) * math.exp(-2 * (j * x) ** 2) for j in range(1, 101))
    return min(1.0, max(0.0, total))


def block_positions(block_lengths: Sequence[int]) -> list[int]:
    """Each output token's place in the block its verification step added, from 0."""
    return [position for length in block_lengths for position in range(length)]


def _diverge(
    prompt: int, plain: Generation, drafted: Generation, scores: RowScores, dtype: torch.dtype, measured_bound: float
) -> Divergence:
    a, b = list(plain.token_ids), list(drafted.token_ids)
    shared = min(len(a), len(b))
    at = next((i for i in range(shared) if a[i] != b[i]), shared)
    if at == shared:
        ends = [tokens[at] if at < len(tokens) else None for tokens in (a, b)]
        return Divergence(prompt, at, *ends, gap=None, bound=0.0, excused=False)
    known = [*plain.prompt_token_ids, *a[:at]]
    row = scores(known, [len(known) - 1], len(plain.prompt_token_ids))[0].float()
    gap = float(row.max() - torch.minimum(row[a[at]], row[b[at]]))
    bound = max(rounding_bound(row, dtype), measured_bound)
    return Divergence(prompt, at, a[at], b[at], gap, bound, excused=gap <= bound)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
