"""Sampling settings: what is refused, and what each step does to a row's law."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spectrain.infer.sampling import RowSettings, SamplingParams, process_logits, row_settings


def settings_of(params: SamplingParams, num_rows: int = 1) -> RowSettings:
    return row_settings([params], [num_rows], [0], [()])


def law_of(logits: Tensor, **params: float) -> list[float]:
    return process_logits(logits[None], settings_of(SamplingParams(**params)))[0].softmax(-1).tolist()


def naive_law(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    largest = max(logits)
    weights = {i: math.exp((value - largest) / temperature) for i, value in enumerate(logits)}
    weights = {i: w for i, w in weights.items() if w >= min_p}
    ranked = sorted(weights, key=lambda i: (-weights[i], i))
    if top_k:
        ranked = [i for i in ranked if weights[i] >= weights[ranked[min(top_k, len(ranked)) - 1]]]
    total, kept, mass = sum(weights[i] for i in ranked), [], 0.0
    for i in ranked:
        if kept and top_p < 1 and mass >= top_p * total:
            break
        kept.append(i)
        mass += weights[i]
    return [weights[i] / mass if i in kept else 0.0 for i in range(len(logits))]


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 1.5},
        {"seed": 2**63},
        {"max_tokens": 0},
        {"min_tokens": 5, "max_tokens": 4},
        {"stop_token_ids": (3, -1)},
    ],
    ids=str,
)
def test_values_outside_their_range_are_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be .*found"):
        SamplingParams(**wrong)


def test_temperature_comes_before_top_p() -> None:
    """Top-p first would keep two tokens, 0.56/0.44."""
    law = law_of(torch.tensor([2.0, 1.5, 0.5, 0.0]), temperature=2.0, top_p=0.7)
    assert law == pytest.approx([0.4416, 0.3439, 0.2086, 0.0], abs=0.01)
    assert sum(p > 0 for p in law) == 3


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    for top_p, kept in ((1e-6, 1), (0.49, 1), (0.79, 2), (0.81, 3)):
        assert sum(p > 0 for p in law_of(logits, temperature=1.0, top_p=top_p)) == kept
    assert law_of(torch.zeros(4), temperature=1.0, top_p=0.26) == [0.5, 0.5, 0.0, 0.0]


def test_top_k_keeps_ties_and_may_exceed_the_vocabulary() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 0.0])
    assert [p > 0 for p in law_of(logits, temperature=1.0, top_k=2)] == [False, True, True, True, False]
    assert all(p > 0 for p in law_of(logits, temperature=1.0, top_k=50))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(-6, 6), min_size=1, max_size=8),
    st.sampled_from([0.3, 1.0, 2.0]),
    st.integers(0, 6),
    st.sampled_from([0.137, 0.613, 0.931, 1.0]),
    st.sampled_from([0.0, 0.0713, 1.0]),
)
def test_equals_the_naive_law(logits: list[int], temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    values = [value / 1.7 for value in logits]
    found = law_of(torch.tensor(values), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert found == pytest.approx(naive_law(values, temperature, top_k, top_p, min_p), abs=1e-5)


def test_every_row_gets_its_own_settings_and_greedy_rows_stay() -> None:
    logits = torch.randn(9, 40, generator=torch.Generator().manual_seed(0))
    params = [
        SamplingParams(top_k=2, top_p=0.3, min_p=0.5),  # greedy: asks for nothing
        SamplingParams(temperature=0.6, top_k=5),
        SamplingParams(temperature=1.3, top_p=0.5),
        SamplingParams(temperature=1.0, min_p=0.2),
    ]
    counts = [3, 2, 3, 1]
    before = logits.clone()
    together = process_logits(logits, row_settings(params, counts, [0] * 4, [()] * 4))
    assert torch.equal(logits, before) and torch.equal(together[:3], logits[:3])
    for found, rows, own in zip(together.split(counts), logits.split(counts), params, strict=True):
        assert torch.equal(found, process_logits(rows, settings_of(own, len(rows))))


def test_steps_that_no_row_asks_for_are_skipped() -> None:
    plain = row_settings([SamplingParams(temperature=1.0), SamplingParams(top_k=3)], [2, 2], [0, 0], [(1,), (1,)])
    assert plain[1:] == (None, None, None, None, None, 0)


def test_end_ids_are_forbidden_until_min_tokens() -> None:
    """Row j decides token number generated + j, so a block may cross the minimum in its middle."""
    params = [SamplingParams(min_tokens=5), SamplingParams(temperature=1.0, min_tokens=1), SamplingParams()]
    found = process_logits(torch.zeros(8, 6), row_settings(params, [4, 2, 2], [3, 1, 0], [(2, 5), (0,), (0,)]))
    forbidden = torch.zeros(8, 6, dtype=torch.bool)
    forbidden[:2, [2, 5]] = True
    assert torch.equal(torch.isneginf(found), forbidden)


@pytest.mark.parametrize("temperature", [1e-6, 1e-30])
def test_tiny_temperatures_give_the_argmax_and_no_nan(temperature: float) -> None:
    law = law_of(torch.tensor([1e4, -3e4, 9.9e3, -math.inf]), temperature=temperature)
    assert law == [1.0, 0.0, 0.0, 0.0]


def test_vocabulary_wide_top_p_off_keeps_every_token() -> None:
    """Cumulated float32 mass passes 1 before the end of a large vocabulary; a row without top-p must not notice."""
    logits = torch.randn(2, 50_000, generator=torch.Generator().manual_seed(1))
    params = [SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.9)]
    found = process_logits(logits, row_settings(params, [1, 1], [0, 0], [(), ()]))
    assert torch.isfinite(found[0]).all() and not torch.isfinite(found[1]).all()
