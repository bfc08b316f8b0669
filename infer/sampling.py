"""Sampling settings and what they do to logits: the same steps for every verified row and for plain decoding.

Nothing here draws a token; `verify.py` does.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

SMALLEST_TEMPERATURE = 1e-6
"""Dividing by less can overflow float32; the law is already that of the argmax."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled and when it stops. Raises ValueError on a value outside its range."""

    temperature: float = 0.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0  # 1 = off
    min_p: float = 0.0  # 0 = off; keeps tokens at least this fraction as likely as the likeliest
    seed: int | None = None  # None: the engine draws one
    max_tokens: int = 256
    min_tokens: int = 0  # no end or stop token before this many
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        checks = (
            ("temperature", "a finite number >= 0", math.isfinite(self.temperature) and self.temperature >= 0),
            ("top_k", "an integer >= 0 (0 turns it off)", self.top_k >= 0),
            ("top_p", "in (0, 1] (1 turns it off)", 0 < self.top_p <= 1),
            ("min_p", "in [0, 1] (0 turns it off)", 0 <= self.min_p <= 1),
            ("seed", "None or an integer of 64 signed bits", self.seed is None or -(2**63) <= self.seed < 2**63),
            ("max_tokens", "an integer >= 1", self.max_tokens >= 1),
            ("min_tokens", f"between 0 and max_tokens = {self.max_tokens}", 0 <= self.min_tokens <= self.max_tokens),
            ("stop_token_ids", "token ids >= 0", all(token >= 0 for token in self.stop_token_ids)),
        )
        for name, expected, good in checks:
            if not good:
                raise ValueError(f"{name} must be {expected}, found {getattr(self, name)}")


class RowSettings(NamedTuple):
    """The settings of each logits row; None where no row asks for the step."""

    temperature: Tensor  # [num_rows] float32; 0 = greedy, the row is left as it is
    top_k: Tensor | None = None  # [num_rows] int64; 0 = off
    top_p: Tensor | None = None  # [num_rows] float32; 1 = off
    min_p: Tensor | None = None  # [num_rows] float32; 0 = off
    forbidden_rows: Tensor | None = None  # [num_forbidden] int64, and
    forbidden_ids: Tensor | None = None  # [num_forbidden] int64: the token ids that a row must not give
    largest_top_k: int = 0


def row_settings(
    params: Sequence[SamplingParams],
    rows_per_request: Sequence[int],
    num_generated: Sequence[int],
    end_ids: Sequence[Sequence[int]],
    device: torch.device | str = "cpu",
) -> RowSettings:
    """Spreads the settings of each request over its rows.

    Row j of a request that has `num_generated` tokens decides its token number num_generated + j (from 0); before
    `min_tokens` that may not be one of the request's `end_ids`. Greedy rows ask for nothing but this.
    """
    per_row = [p for p, count in zip(params, rows_per_request, strict=True) for _ in range(count)]

    def column(name: str, off: float, dtype: torch.dtype) -> Tensor | None:
        values = [getattr(p, name) if p.temperature > 0 else off for p in per_row]
        return torch.tensor(values, dtype=dtype, device=device) if any(value != off for value in values) else None

    forbidden: list[tuple[int, int]] = []
    first_row = 0
    for p, count, generated, ends in zip(params, rows_per_request, num_generated, end_ids, strict=True):
        early = range(first_row, first_row + min(count, max(0, p.min_tokens - generated)))
        forbidden += [(row, token) for row in early for token in ends]
        first_row += count
    pairs = torch.tensor(forbidden, dtype=torch.int64, device=device) if forbidden else None
    return RowSettings(
        temperature=torch.tensor([p.temperature for p in per_row], dtype=torch.float32, device=device),
        top_k=column("top_k", 0, torch.int64),
        top_p=column("top_p", 1.0, torch.float32),
        min_p=column("min_p", 0.0, torch.float32),
        forbidden_rows=None if pairs is None else pairs[:, 0],
        forbidden_ids=None if pairs is None else pairs[:, 1],
        largest_top_k=max((p.top_k for p in per_row if p.temperature > 0), default=0),
    )


Features = frozenset[str]
"""Which settings beyond the temperature any request of a step uses; empty for most."""


def features_of(params: Sequence[SamplingParams]) -> Features:
    """The settings that some of these requests use."""
    used = set()
    for p in params:
        if p.min_tokens:
            used.add("min_tokens")
        if p.temperature > 0:
            used.update(name for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)) if getattr(p, name) != off)
    return frozenset(used)


class SamplingTable:
    """The settings of running requests by row of the request table; the last row belongs to nobody and is greedy."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.temperature, self.top_p, self.min_p = (
            torch.full((num_rows,), value, dtype=torch.float32, device=device) for value in (0.0, 1.0, 0.0)
        )
        self.top_k, self.min_tokens = (torch.zeros(num_rows, dtype=torch.int64, device=device) for _ in range(2))
        self.end_ids = torch.zeros(num_rows, 1, dtype=torch.int64, device=device)

    def set(self, row: int, params: SamplingParams, end_ids: Sequence[int]) -> None:
        """Takes the settings of the request that moves into `row`."""
        sampled = params.temperature > 0
        self.temperature[row].fill_(params.temperature)
        self.top_p[row].fill_(params.top_p if sampled else 1.0)
        self.min_p[row].fill_(params.min_p if sampled else 0.0)
        self.top_k[row].fill_(params.top_k if sampled else 0)
        self.min_tokens[row].fill_(params.min_tokens if end_ids else 0)
        if len(end_ids) > self.end_ids.shape[1]:
            missing = len(end_ids) - self.end_ids.shape[1]
            self.end_ids = torch.cat([self.end_ids, self.end_ids[:, :1].expand(-1, missing)], dim=1)
        if end_ids:
            padded = [*end_ids, *[end_ids[0]] * (self.end_ids.shape[1] - len(end_ids))]
            self.end_ids[row] = torch.tensor(padded, device=self.end_ids.device)

    def of(self, slots: Tensor, positions: Tensor, prompt_lens: Tensor, features: Features) -> RowSettings:
        """The settings of logits rows: table rows [num_rows] int64, and the positions of their own tokens."""

        def column(name: str) -> Tensor | None:
            return getattr(self, name)[slots] if name in features else None

        forbidden_rows = forbidden_ids = None
        if "min_tokens" in features:
            early = positions + 1 - prompt_lens[slots] < self.min_tokens[slots]
            ends = self.end_ids[slots]
            # rows past their minimum point behind the vocabulary
            forbidden_ids = torch.where(early[:, None], ends, self.vocab_size).flatten()
            forbidden_rows = torch.arange(len(slots), device=slots.device).repeat_interleave(ends.shape[1])
        return RowSettings(
            temperature=self.temperature[slots],
            top_k=column("top_k"),
            top_p=column("top_p"),
            min_p=column("min_p"),
            forbidden_rows=forbidden_rows,
            forbidden_ids=forbidden_ids,
            largest_top_k=self.vocab_size,
        )


def process_logits(logits: Tensor, settings: RowSettings) -> Tensor:
    """The logits [num_rows, vocab] float32 of the law each row is sampled from; forbidden tokens are -inf.

    In order: forbidden ids, temperature, min_p, top_k, top_p. Ties at the k-th place are all kept; top_p keeps the
    fewest tokens (lowest ids on ties) whose mass reaches it. The input is not changed.
    """
    logits = logits.float()
    if settings.forbidden_rows is not None:
        wide = torch.nn.functional.pad(logits, (0, 1))
        wide = wide.index_put((settings.forbidden_rows, settings.forbidden_ids), logits.new_tensor(-torch.inf))
        logits = wide[:, :-1]
    temperature = settings.temperature
    logits = logits / torch.where(temperature > 0, temperature.clamp(min=SMALLEST_TEMPERATURE), 1)[:, None]
    if settings.min_p is not None:
        floor = logits.amax(dim=-1) + settings.min_p.log()
        logits = logits.masked_fill(logits < floor[:, None], -torch.inf)
    if settings.top_k is not None:
        logits = _top_k(logits, settings.top_k, settings.largest_top_k)
    if settings.top_p is not None:
        logits = _top_p(logits, settings.top_p)
    return logits


def _top_k(logits: Tensor, top_k: Tensor, largest: int) -> Tensor:
    best = logits.topk(min(largest, logits.shape[1]), dim=-1).values
    kth = best.gather(1, (top_k - 1).clamp(min=0, max=best.shape[1] - 1)[:, None])
    return logits.masked_fill((logits < kth) & (top_k > 0)[:, None], -torch.inf)


def _top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    probs = ordered.softmax(dim=-1)
    mass_before = probs.cumsum(dim=-1) - probs
    # Rounding can carry the mass past 1, so a row without top_p is exempt rather than compared with 1.
    beyond = (mass_before >= top_p[:, None]) & (top_p < 1)[:, None]
    beyond[:, 0] = False
    return ordered.masked_fill(beyond, -torch.inf).gather(1, order.argsort(dim=-1))
