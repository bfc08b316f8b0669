"""Synthetic acceptance: rates from rates, a file or a mean length, and what verification keeps under them."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spectrain.infer.synthetic import survival_of_length, synthetic_rates
from spectrain.infer.verify import verify_drafts
from spectrain.kernels.records import RejectionOutputs, VerifyMode

STRONG = [0.947, 0.890, 0.832, 0.778, 0.728, 0.678, 0.628]
CHAT = [0.70, 0.45, 0.30, 0.20, 0.13, 0.09, 0.06]


def test_rates_become_conditional() -> None:
    assert synthetic_rates(3, rates=[0.8, 0.4, 0.1]).tolist() == pytest.approx([0.8, 0.5, 0.25])
    assert synthetic_rates(4, rates=[1.0, 0.5, 0.0, 0.0]).tolist() == [1.0, 0.5, 0.0, 0.0]
    assert synthetic_rates(2, rates=CHAT).tolist() == pytest.approx([0.7, 0.45 / 0.7])
    assert synthetic_rates(1, rates=[0.3]).dtype == torch.float32


@pytest.mark.parametrize(
    ("length", "k", "survival"),
    [
        (1, 3, [0, 0, 0]),
        (1.25, 3, [0.25, 0, 0]),
        (3.5, 5, [1, 1, 0.5, 0, 0]),
        (4, 3, [1, 1, 1]),
        (3, 3, [1, 1, 0]),
    ],
)
def test_a_length_becomes_its_survival(length: float, k: int, survival: list[float]) -> None:
    assert survival_of_length(length, k) == pytest.approx(survival)


@given(k=st.integers(1, 9), share=st.floats(0, 1), rates=st.lists(st.floats(0, 1), min_size=9, max_size=9))
def test_no_rates_of_that_mean_vary_less(k: int, share: float, rates: list[float]) -> None:
    """Variance of the kept count is sum (2i - 1) p_i - m^2; ours is (m - f)(1 - (m - f)), and any other's is above."""
    length = 1 + share * k
    survival = survival_of_length(length, k)
    assert sum(survival) == pytest.approx(length - 1)
    assert survival == sorted(survival, reverse=True)

    def variance(p: list[float]) -> float:
        return sum((2 * i + 1) * rate for i, rate in enumerate(p)) - sum(p) ** 2

    rest = (length - 1) % 1
    assert variance(survival) == pytest.approx(rest * (1 - rest), abs=1e-9)
    other = sorted(rates[:k], reverse=True)
    assert variance(other) >= variance(survival_of_length(1 + sum(other), k)) - 1e-9


@pytest.mark.parametrize("content", [[0.5, 0.25], {"acceptance_by_position": [0.5, 0.25], "speedup": 2}])
def test_rates_of_a_file(tmp_path: Path, content: object) -> None:
    path = tmp_path / "rates.json"
    path.write_text(json.dumps(content))
    assert synthetic_rates(2, rates=path).tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[0.5, ", "could not be read"),
        ('{"rates": [1]}', "must hold a list of numbers"),
        ('[0.5, "0.2"]', "must hold a list of numbers"),
        ("[true, true]", "must hold a list of numbers"),
        ("[0.5]", "2 drafts need as many acceptance rates, found 1"),
        ("[0.5, NaN]", r"lie in \[0, 1\], found nan at position 2"),
        ("[1.5, 0.5]", r"lie in \[0, 1\], found 1.5 at position 1"),
        ("[0.5, 0.6]", "must not rise.*0.5 then 0.6 at position 2"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "rates.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        synthetic_rates(2, rates=path)
    with pytest.raises(ValueError, match="could not be read"):
        synthetic_rates(2, rates=tmp_path / "absent.json")


def test_exactly_one_of_rates_and_length() -> None:
    for options, found in (({}, "neither"), ({"rates": [0.5], "length": 1.5}, "both")):
        with pytest.raises(ValueError, match=f"either rates or a mean length, found {found}"):
            synthetic_rates(1, **options)
    for length in (0.9, 4.1, math.nan):
        with pytest.raises(ValueError, match=f"lies between 1 and 4 .*found {length}"):
            synthetic_rates(3, length=length)


def keep_by_rates(
    rates: Tensor, n: int, *, temperature: float, with_law: bool = False, cut: int = 9
) -> RejectionOutputs:
    """n requests with drafts that a real verifier would never keep, placeholders from draft `cut` on."""
    k, vocab = len(rates), 5
    logits = torch.zeros(n * (k + 1), vocab)
    logits[:, 0] = -math.inf
    drafts = torch.zeros(n, k, dtype=torch.int64)
    drafts[:, cut:] = -1
    return verify_drafts(
        logits,
        drafts,
        torch.arange(n + 1, dtype=torch.int32) * (k + 1),
        torch.full((n,), 3),
        torch.full((n,), temperature),
        torch.arange(n),
        draft_log_probs=torch.full((n, k, vocab), 0.2).log() if with_law else None,
        mode=VerifyMode.SYNTHETIC,
        rates=rates,
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("with_law", [False, True], ids=["point", "law"])
@pytest.mark.parametrize("survival", [STRONG, CHAT], ids=["strong", "chat"])
def test_rates_are_reached_at_every_position(survival: list[float], with_law: bool, temperature: float) -> None:
    n = 20_000
    out = keep_by_rates(synthetic_rates(7, rates=survival), n, temperature=temperature, with_law=with_law)
    for i, rate in enumerate(survival):
        found = float((out.num_emitted > i + 1).double().mean())
        assert found == pytest.approx(rate, abs=4 * math.sqrt(rate * (1 - rate) / n))
    assert float(out.num_emitted.double().mean()) == pytest.approx(1 + sum(survival), abs=0.08)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_length_is_reached_with_the_least_spread(temperature: float) -> None:
    out = keep_by_rates(synthetic_rates(5, length=3.5), 20_000, temperature=temperature)
    assert set(out.num_emitted.tolist()) == {3, 4}
    assert float(out.num_emitted.double().mean()) == pytest.approx(3.5, abs=4 * 0.5 / math.sqrt(20_000))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_kept_drafts_come_out_and_the_target_adds_its_own_token(temperature: float) -> None:
    out = keep_by_rates(synthetic_rates(4, rates=[1, 1, 0, 0]), 50, temperature=temperature)
    assert (out.num_emitted == 3).all() and not out.failed.any()
    assert (out.token_ids[:, :2] == 0).all() and (out.token_ids[:, 2] > 0).all() and (out.token_ids[:, 3:] == -1).all()
    assert (out.token_ids[:, 2] == 1).all() or temperature == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("with_law", [False, True], ids=["point", "law"])
def test_placeholders_are_rejected_at_any_rate(temperature: float, with_law: bool) -> None:
    out = keep_by_rates(torch.ones(4), 50, temperature=temperature, with_law=with_law, cut=2)
    assert (out.num_emitted == 3).all()
