"""Sampling settings and what they do to logits: the same steps for every verified row and for plain decoding.

Nothing here draws a token; `verify.py` does. Where a request stops is in `stopping.py`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import NamedTuple, cast

import torch
from torch import Tensor

from . import processors

CHUNK_ELEMENTS = 2**23
"""Elements one temporary of `process_logits` may hold; more rows are taken in turns."""

LARGEST = 1e30
"""Temperatures and biases beyond it would leave float32."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled and when it stops. Raises ValueError on a value outside its range."""

    temperature: float = 0.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0  # 1 = off
    min_p: float = 0.0  # 0 = off; keeps tokens at least this fraction as likely as the likeliest
    repetition_penalty: float = 1.0  # 1 = off; of tokens in prompt and output
    presence_penalty: float = 0.0  # 0 = off; of tokens in the output, once
    frequency_penalty: float = 0.0  # 0 = off; of tokens in the output, for each time
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)  # added to the logits of these ids
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences the output must not hold
    allowed_token_ids: tuple[int, ...] | None = None  # None: all
    seed: int | None = None  # None: the engine draws one
    max_tokens: int = 256  # 0: nothing is computed
    min_tokens: int = 0  # no end or stop token, and no end by a stop string, before this many
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()  # strings that end the output; need a tokenizer
    include_stop_str: bool = False  # whether the text keeps what ended it
    ignore_eos: bool = False
    logprobs: int | None = None  # this many best tokens and the emitted one, under the target's own law; None = none

    def __post_init__(self) -> None:
        allowed, finite = self.allowed_token_ids, f"finite, at most {LARGEST:g} in size"
        checks = (
            ("temperature", f"in [0, {LARGEST:g}] (0 is greedy)", _within(self.temperature, 0, LARGEST)),
            ("top_k", "an integer >= 0 (0 turns it off)", _whole(self.top_k, 0)),
            ("top_p", "in (0, 1] (1 turns it off)", _within(self.top_p, 0, 1) and self.top_p > 0),
            ("min_p", "in [0, 1] (0 turns it off)", _within(self.min_p, 0, 1)),
            ("repetition_penalty", "in [0.01, 100] (1 turns it off)", _within(self.repetition_penalty, 0.01, 100)),
            ("presence_penalty", "in [-2, 2] (0 turns it off)", _within(self.presence_penalty, -2, 2)),
            ("frequency_penalty", "in [-2, 2] (0 turns it off)", _within(self.frequency_penalty, -2, 2)),
            ("logit_bias", "by token ids >= 0", _ids(self.logit_bias)),
            ("logit_bias", finite, all(_within(value, -LARGEST, LARGEST) for value in self.logit_bias.values())),
            ("bad_words", "non-empty sequences of token ids >= 0", all(map(_word, self.bad_words))),
            (
                "allowed_token_ids",
                "None or token ids >= 0, at least one",
                allowed is None or (allowed and _ids(allowed)),
            ),
            ("seed", "None or an integer of 64 signed bits", self.seed is None or _whole(self.seed, -(2**63), 2**63)),
            ("max_tokens", "an integer >= 0", _whole(self.max_tokens, 0)),
            (
                "min_tokens",
                f"an integer between 0 and max_tokens = {self.max_tokens}",
                _whole(self.min_tokens, 0) and _whole(self.max_tokens, self.min_tokens),
            ),
            ("stop_token_ids", "token ids >= 0", _ids(self.stop_token_ids)),
            ("stop", "a tuple of non-empty strings", not isinstance(self.stop, str) and all(map(_text, self.stop))),
            ("logprobs", "None or an integer >= 0", self.logprobs is None or _whole(self.logprobs, 0)),
        )
        for name, expected, good in checks:
            if not good:
                raise ValueError(f"{name} must be {expected}, found {getattr(self, name)!r}")

    def end_token_ids(self, own: frozenset[int]) -> frozenset[int]:
        """The tokens that end such a request where `own` are the target's."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else own)

    def check_vocabulary(self, vocab_size: int, end_ids: Iterable[int]) -> None:
        """Raises ValueError where the settings name tokens the target has not, or leave it none to give."""
        named = {
            "logit_bias": self.logit_bias,
            "bad_words": [token for word in self.bad_words for token in word],
            "allowed_token_ids": self.allowed_token_ids or (),
            "stop_token_ids": self.stop_token_ids,
        }
        for name, tokens in named.items():
            wrong = next((token for token in tokens if token >= vocab_size), None)
            if wrong is not None:
                raise ValueError(f"{name} must hold token ids in 0..{vocab_size - 1}, found {wrong}; remove it")
        if self.logprobs is not None and self.logprobs > vocab_size:
            raise ValueError(f"logprobs must be at most the vocabulary of {vocab_size}, found {self.logprobs}")
        forbidden = {word[0] for word in self.bad_words if len(word) == 1}
        forbidden.update(end_ids if self.min_tokens else ())
        pool = range(vocab_size) if self.allowed_token_ids is None else self.allowed_token_ids
        if all(token in forbidden for token in pool):
            raise ValueError(
                "allowed_token_ids, bad_words and min_tokens must leave at least one token to give, found none; "
                "allow more tokens"
            )


def _within(value: object, low: float, high: float) -> bool:
    return isinstance(value, Real) and low <= cast(float, value) <= high


def _whole(value: object, low: int, beyond: float = math.inf) -> bool:
    return isinstance(value, Integral) and low <= cast(int, value) < beyond


def _ids(values: Iterable[object]) -> bool:
    return all(_whole(token, 0) for token in values)


def _word(value: object) -> bool:
    return isinstance(value, Sequence) and len(value) > 0 and _ids(value)


def _text(value: object) -> bool:
    return isinstance(value, str) and value != ""


class Features(NamedTuple):
    """Which steps a batch needs beyond the temperature: known to the host, so that no other step is launched."""

    logit_bias: bool = False
    allowed_token_ids: bool = False
    min_tokens: bool = False
    repetition_penalty: bool = False
    output_penalties: bool = False  # presence or frequency
    bad_words: bool = False
    min_p: bool = False
    largest_top_k: int = 0  # rounded up to a power of two
    top_p: bool = False
    top_p_within_top_k: bool = False  # every request with top_p has top_k too
    logprobs: int | None = None

    @property
    def edits(self) -> bool:
        """Whether logits change beyond the temperature."""
        return self._replace(logprobs=None) != NEUTRAL


NEUTRAL = Features()


def features_of(params: Sequence[SamplingParams]) -> Features:
    """The steps that any of these requests asks for."""
    sampled = [p for p in params if p.temperature > 0]
    nucleus = [p for p in sampled if p.top_p < 1]
    top_k = max((p.top_k for p in sampled), default=0)
    return Features(
        logit_bias=any(p.logit_bias for p in params),
        allowed_token_ids=any(p.allowed_token_ids is not None for p in params),
        min_tokens=any(p.min_tokens for p in params),
        repetition_penalty=any(p.repetition_penalty != 1 for p in params),
        output_penalties=any(p.presence_penalty or p.frequency_penalty for p in params),
        bad_words=any(p.bad_words for p in params),
        min_p=any(p.min_p for p in sampled),
        largest_top_k=1 << (top_k - 1).bit_length() if top_k else 0,
        top_p=bool(nucleus),
        top_p_within_top_k=bool(nucleus) and all(p.top_k for p in nucleus),
        logprobs=max((p.logprobs for p in params if p.logprobs is not None), default=None),
    )


class LogitsRows(NamedTuple):
    """Whose each logits row is; row r decides the token at positions[r] + 1."""

    slots: Tensor  # [rows] int64: row of the request table
    positions: Tensor  # [rows] int64: of the row's own token


class PaddedRows:
    """One list of values for each row of a table, padded on the right. Grows in `set`, so its tensor may move then."""

    def __init__(self, num_rows: int, num_dims: int, padding: float, dtype: torch.dtype, device: torch.device) -> None:
        self.values = torch.empty(num_rows, *[0] * num_dims, dtype=dtype, device=device)
        self._padding = padding
        self._filled: set[int] = set()

    def set(self, row: int, values: Tensor) -> None:
        """Replaces what `row` holds."""
        if not values.numel():
            if row in self._filled:
                self.values[row] = self._padding
                self._filled.remove(row)
            return
        sizes = [
            old if new <= old else 1 << (new - 1).bit_length()
            for old, new in zip(self.values.shape[1:], values.shape, strict=True)
        ]
        growth = [size - old for old, size in zip(self.values.shape[1:], sizes, strict=True)]
        if any(growth):
            pads = [n for added in reversed(growth) for n in (0, added)]
            self.values = torch.nn.functional.pad(self.values, pads, value=self._padding)
        pads = [n for size, own in zip(reversed(sizes), reversed(values.shape), strict=True) for n in (0, size - own)]
        self.values[row] = torch.nn.functional.pad(values, pads, value=self._padding).to(self.values.device)
        self._filled.add(row)


class SamplingTable:
    """The settings of running requests by row of the request table; the last row belongs to nobody and stays neutral.

    The columns never move, so a CUDA graph may read them; the lists and the mask may move whenever `set` is called.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device
        off = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0, 0.0], device=device)
        self._floats = off[:, None].repeat(1, num_rows)
        self._integers = torch.zeros(2, num_rows, dtype=torch.int64, device=device)
        self.temperature, self.top_p, self.min_p = self._floats[:3].unbind()  # [num_rows] float32 each
        self.repetition, self.presence, self.frequency = self._floats[3:].unbind()  # [num_rows] float32 each
        self.top_k, self.min_tokens = self._integers.unbind()  # [num_rows] int64 each
        self.end_ids = PaddedRows(num_rows, 1, -1, torch.int64, device)
        self.bias_ids = PaddedRows(num_rows, 1, -1, torch.int64, device)
        self.bias_values = PaddedRows(num_rows, 1, 0.0, torch.float32, device)
        self.bad_words = PaddedRows(num_rows, 2, -1, torch.int64, device)  # backwards
        self.allowed: Tensor | None = None  # [num_rows, vocab] bool, from the first request that restricts it on
        self._restricted: set[int] = set()

    def set(self, row: int, params: SamplingParams, end_ids: Sequence[int]) -> None:
        """Takes the settings of the request that moves into `row`; `end_ids` end it once it has its minimum."""
        assert 0 <= row < self._floats.shape[1] - 1, "the last row belongs to nobody"
        sampled = params.temperature > 0
        floats = (
            params.temperature,
            params.top_p if sampled else 1.0,
            params.min_p if sampled else 0.0,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        # a minimum beyond any context means the same as one no tensor can hold
        integers = (min(params.top_k, self.vocab_size) if sampled else 0, min(params.min_tokens, 2**31))
        self._floats[:, row] = torch.tensor(floats).to(self.device, non_blocking=True)
        self._integers[:, row] = torch.tensor(integers).to(self.device, non_blocking=True)
        ends = [token for token in end_ids if token < self.vocab_size] if params.min_tokens else []
        self.end_ids.set(row, torch.tensor(ends, dtype=torch.int64))
        self.bias_ids.set(row, torch.tensor(list(params.logit_bias), dtype=torch.int64))
        self.bias_values.set(row, torch.tensor(list(params.logit_bias.values()), dtype=torch.float32))
        longest = max(map(len, params.bad_words), default=0)
        words = [[*reversed(word), *[-1] * (longest - len(word))] for word in params.bad_words]
        self.bad_words.set(row, torch.tensor(words, dtype=torch.int64).view(len(words), longest))
        self._restrict(row, params.allowed_token_ids)

    def _restrict(self, row: int, allowed: Sequence[int] | None) -> None:
        if allowed is None:
            if self.allowed is not None and row in self._restricted:
                self.allowed[row] = True
                self._restricted.remove(row)
            return
        if self.allowed is None:
            self.allowed = torch.ones(self._floats.shape[1], self.vocab_size, dtype=torch.bool, device=self.device)
        mask = torch.zeros(self.vocab_size, dtype=torch.bool)
        mask[list(allowed)] = True
        self.allowed[row].copy_(mask)
        self._restricted.add(row)


def process_logits(
    logits: Tensor,
    rows: LogitsRows,
    settings: SamplingTable,
    tokens: Tensor,
    prompt_lens: Tensor,
    features: Features,
) -> Tensor:
    """The logits [rows, vocab] float32 of the law each row is sampled from; forbidden tokens are -inf.

    tokens [num_rows, width] int32: the known tokens of each row of the request table, then this step's drafts, so that
    a row of a block sees the drafts before it; prompt_lens [num_rows] int64. In order: logit bias, allowed ids, minimum
    length, penalties (repetition, then frequency and presence), bad words, temperature, min_p, top_k, top_p; those of
    `features` only. Ties at the k-th place are all kept; top_p keeps the fewest tokens (lowest ids on ties) whose mass
    reaches it. Bad words and the presence and frequency penalties look at the output alone. The input is not changed.
    """
    if not features.edits:
        return (logits / processors.temperature_divisor(settings.temperature[rows.slots])[:, None]).float()
    processed = logits.to(torch.float32, copy=True)
    size = max(1, CHUNK_ELEMENTS // (logits.shape[1] + 2 * tokens.shape[1]))
    for part, slots, positions in zip(*(t.split(size) for t in (processed, *rows)), strict=True):
        _edit(part, slots, positions, settings, tokens, prompt_lens[slots], features)
        part.div_(processors.temperature_divisor(settings.temperature[slots])[:, None])
        _truncate(part, slots, settings, features)
    return processed


def top_logprobs(logits: Tensor, rows: Tensor, token_ids: Tensor, num_best: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of one token and of the `num_best` best ones, under the target's own law.

    logits [num_rows, vocab], before processing; rows [n] int64 picks among them and token_ids [n] int64 names the token
    emitted there; ids below 0 are padding. Returns ids [n, 1 + num_best] int64, the emitted token first, and their
    log-probabilities float32.
    """
    emitted = token_ids.clamp(min=0)[:, None]
    ids, values = [emitted.new_empty(0, 1 + num_best)], [logits.new_empty(0, 1 + num_best, dtype=torch.float32)]
    size = max(1, CHUNK_ELEMENTS // logits.shape[1])
    for part, own in zip(rows.split(size), emitted.split(size), strict=True):
        law = logits[part].float().log_softmax(dim=-1)
        best = law.topk(num_best, dim=-1)
        ids.append(torch.cat([own, best.indices], dim=1))
        values.append(torch.cat([law.gather(1, own), best.values], dim=1))
    return torch.cat(ids), torch.cat(values)


def _edit(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    settings: SamplingTable,
    tokens: Tensor,
    prompt_lens: Tensor,
    features: Features,
) -> None:
    if features.logit_bias:
        processors.add_at(logits, settings.bias_ids.values[slots], settings.bias_values.values[slots])
    if features.allowed_token_ids and settings.allowed is not None:
        logits.masked_fill_(~settings.allowed[slots], -torch.inf)
    if features.min_tokens:
        ends = settings.end_ids.values[slots]
        early = positions + 1 - prompt_lens < settings.min_tokens[slots]
        processors.forbid(logits, ends, early[:, None].expand_as(ends))
    if features.repetition_penalty or features.output_penalties:
        counted = (settings.presence[slots], settings.frequency[slots]) if features.output_penalties else None
        processors.penalise(logits, tokens[slots], positions + 1, prompt_lens, settings.repetition[slots], counted)
    if features.bad_words:
        words = settings.bad_words.values[slots]
        index = positions[:, None] - torch.arange(words.shape[2] - 1, device=logits.device)
        previous = tokens[slots[:, None], index.clamp(min=0)].long()
        processors.forbid_bad_words(logits, words, torch.where(index >= prompt_lens[:, None], previous, -1))


def _truncate(logits: Tensor, slots: Tensor, settings: SamplingTable, features: Features) -> None:
    if features.min_p:
        processors.keep_min_p(logits, settings.min_p[slots])
    if features.largest_top_k:
        processors.keep_top_k(logits, settings.top_k[slots], features.largest_top_k)
    if features.top_p:
        candidates = features.largest_top_k if features.top_p_within_top_k else None
        processors.keep_top_p(logits, settings.top_p[slots], candidates)
