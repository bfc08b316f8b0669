"""Acceptance rates for synthetic verification: a benchmark of the engine under a given acceptance, without a good head.

Rates are given as people measure them, p_i = the share of steps whose first i drafts were all kept, so the acceptance
length with its bonus token is 1 + sum p_i. Verification wants the chance c_i = p_i / p_(i-1) of draft i once all before
it were kept. Not lossless: the emitted tokens mean nothing.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor


def synthetic_rates(
    num_draft_tokens: int,
    *,
    rates: Sequence[float] | Path | None = None,
    length: float | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Conditional rates [num_draft_tokens] float32, from per-position rates (or a file of them) or a mean length.

    `rates` may go on past num_draft_tokens. Raises ValueError unless exactly one of the two is given and in range.
    """
    if (rates is None) == (length is None):
        both = "neither" if rates is None else "both"
        raise ValueError(f"synthetic acceptance takes either rates or a mean length, found {both}")
    if rates is not None:
        survival = read_rates(rates) if isinstance(rates, Path) else list(rates)
        check_survival(survival, num_draft_tokens)
    else:
        assert length is not None
        survival = survival_of_length(length, num_draft_tokens)
    return torch.tensor(conditional(survival[:num_draft_tokens]), dtype=torch.float32, device=device)


def read_rates(path: Path) -> list[float]:
    """Per-position rates of a JSON file: a list, or an object that holds one under "acceptance_by_position".

    Raises ValueError when the file holds something else.
    """
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} must be a JSON file of acceptance rates, but it could not be read: {error}"
        ) from error
    if isinstance(content, dict):
        content = content.get("acceptance_by_position")
    if not isinstance(content, list) or not all(type(rate) in (int, float) for rate in content):
        raise ValueError(
            f"{path} must hold a list of numbers, one rate per draft position, or an object with it under "
            f'"acceptance_by_position"; found {str(content)[:60]}'
        )
    return [float(rate) for rate in content]


def parse_rates(text: str) -> list[float]:
    """Per-position rates given as `.8,.6,.5` or as the name of a file that `read_rates` takes.

    Raises ValueError where it is neither.
    """
    path = Path(text)
    if path.is_file():
        return read_rates(path)
    try:
        return [float(rate) for rate in text.split(",")]
    except ValueError as error:
        raise ValueError(
            f"acceptance rates are numbers between commas or a JSON file of them, found {text[:60]!r} and no such file"
        ) from error


def check_survival(survival: Sequence[float], num_draft_tokens: int) -> None:
    """Raises ValueError unless there is a rate per draft, each in [0, 1] and none above the one before it."""
    if len(survival) < num_draft_tokens:
        raise ValueError(
            f"{num_draft_tokens} drafts need as many acceptance rates, found {len(survival)}; draft fewer or add rates"
        )
    for i, rate in enumerate(survival):
        if not 0 <= rate <= 1:
            raise ValueError(f"acceptance rates must lie in [0, 1], found {rate} at position {i + 1}")
        if i and rate > survival[i - 1]:
            raise ValueError(
                f"acceptance rates must not rise, for rate i counts steps that kept all of the first i drafts; found "
                f"{survival[i - 1]} then {rate} at position {i + 1}"
            )


def survival_of_length(length: float, num_draft_tokens: int) -> list[float]:
    """The rates of the given mean acceptance length in [1, k + 1] whose number of kept drafts varies least.

    That number is then one of the two integers around length - 1. Raises ValueError when the length is out of range.
    """
    if not 1 <= length <= num_draft_tokens + 1:
        raise ValueError(
            f"the mean acceptance length of {num_draft_tokens} drafts lies between 1 and {num_draft_tokens + 1} (the "
            f"bonus token counts), found {length}"
        )
    kept = length - 1
    return [min(1.0, max(0.0, kept - i)) for i in range(num_draft_tokens)]


def conditional(survival: Sequence[float]) -> list[float]:
    """The chance of each draft once all before it were kept; 0 behind a rate of 0."""
    before = [1.0, *survival]
    return [rate / last if last > 0 else 0.0 for last, rate in zip(before, survival, strict=False)]
