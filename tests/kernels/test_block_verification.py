"""Block verification: its law by enumeration on a toy chain, its expected length, and what the pipeline emits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spectrain.kernels.records import VerifyMode
from spectrain.tests.kernels.test_rejection_law import (
    MARKOV,
    MARKOV_DRAFT,
    Block,
    NextLaw,
    constant,
    count_blocks,
    draw_chain,
    emitted_law,
    p_value,
)


def block_law(target: NextLaw, draft: NextLaw, num_drafts: int) -> dict[Block, float]:
    """The probability of every block that one step of block verification emits, by enumerating drafts and lengths."""
    law: dict[Block, float] = {}

    def verify(drafts: Block, drafted: float) -> None:
        weights = [1.0]
        for i, token in enumerate(drafts):
            weights.append(min(1.0, weights[-1] * target(drafts[:i])[token] / draft(drafts[:i])[token]))
        longer_fail = 1.0
        for i in range(num_drafts, -1, -1):
            p = target(drafts[:i])
            left = list(p)
            keep = weights[i]
            if i < num_drafts:
                left = [max(weights[i] * a - b, 0.0) for a, b in zip(p, draft(drafts[:i]), strict=True)]
                total = sum(left)
                keep = 1.0 if i == 0 or total + 1 - weights[i] == 0 else total / (total + 1 - weights[i])
            chance = drafted * longer_fail * keep
            for token, mass in enumerate(left):
                if chance * mass > 0:
                    block = (*drafts[:i], token)
                    law[block] = law.get(block, 0.0) + chance * mass / sum(left)
            longer_fail *= 1 - keep

    def walk(drafts: Block, probability: float) -> None:
        if len(drafts) == num_drafts:
            verify(drafts, probability)
            return
        for token, chance in enumerate(draft(drafts)):
            if chance > 0:
                walk((*drafts, token), probability * chance)

    walk((), 1.0)
    return law


def completed(law: dict[Block, float], target: NextLaw, length: int) -> dict[Block, float]:
    """The law of the first `length` tokens, when the target goes on alone behind each block."""
    out: dict[Block, float] = {}
    pending = list(law.items())
    while pending:
        block, probability = pending.pop()
        if len(block) == length:
            out[block] = out.get(block, 0.0) + probability
        else:
            pending += [((*block, token), probability * mass) for token, mass in enumerate(target(block)) if mass > 0]
    return out


def random_law(seed: int, vocab: int, sharpness: float) -> NextLaw:
    """A law that depends on the whole prefix."""

    def law(prefix: Block) -> list[float]:
        generator = torch.Generator().manual_seed(hash((seed, *prefix)) % 2**31)
        return (sharpness * torch.randn(vocab, generator=generator).double()).softmax(-1).tolist()

    return law


def expected_length(law: dict[Block, float]) -> float:
    return sum(probability * len(block) for block, probability in law.items())


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.integers(2, 3),
    num_drafts=st.integers(1, 4),
    sharpness=st.sampled_from([0.5, 2.0]),
)
def test_the_rule_is_exact_and_never_shorter_than_the_standard_one(
    seed: int, vocab: int, num_drafts: int, sharpness: float
) -> None:
    target, draft = random_law(seed, vocab, sharpness), random_law(seed + 1, vocab, sharpness)
    blocks = block_law(target, draft, num_drafts)
    standard = emitted_law(target, draft, num_drafts, point_mass=False)
    plain = completed({(): 1.0}, target, num_drafts + 1)
    for law in (blocks, standard):
        found = completed(law, target, num_drafts + 1)
        assert set(found) == set(plain)
        assert max(abs(found[block] - plain[block]) for block in plain) < 1e-12
    assert expected_length(blocks) >= expected_length(standard) - 1e-12


def test_point_masses_give_both_rules_the_same_law() -> None:
    """Why the pipeline runs the standard rule for drafts without a law."""
    target = random_law(5, 3, 1.0)

    def point(prefix: Block) -> list[float]:
        best = random_law(6, 3, 1.0)(prefix)
        return [float(mass == max(best)) for mass in best]

    blocks, standard = block_law(target, point, 3), emitted_law(target, point, 3, point_mass=True)
    assert set(blocks) == set(standard)
    assert max(abs(blocks[block] - standard[block]) for block in blocks) < 1e-12


def markov(table: Tensor, start: int) -> NextLaw:
    return lambda prefix: table[prefix[-1] if prefix else start].tolist()


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
def test_the_pipeline_emits_the_enumerated_blocks(num_drafts: int) -> None:
    """Tokens and lengths at once: a rule that is exact but keeps too little fails here."""
    n, start = 60_000, 1
    first = torch.full((n,), start)
    out = draw_chain(MARKOV.__getitem__, MARKOV_DRAFT.__getitem__, first, num_drafts, "block")
    law = block_law(markov(MARKOV, start), markov(MARKOV_DRAFT, start), num_drafts)
    counts, shares = count_blocks(out, law)
    p = p_value(counts, shares)
    print(f"n={n} blocks={len(law)} p={p:.4f}")
    assert counts.sum() == n and p > 1e-4
    lengths = out.num_emitted.double()
    expected, error = expected_length(law), float(lengths.std()) / math.sqrt(n)
    assert float(lengths.mean()) == pytest.approx(expected, abs=4 * error)


def test_the_pipeline_keeps_more_than_the_standard_rule_where_it_can() -> None:
    """The paper's example: p = 1/3, 2/3 and q = 2/3, 1/3 at both positions give 11/9 kept drafts instead of 10/9."""
    p, q = torch.tensor([1 / 3, 2 / 3]), torch.tensor([2 / 3, 1 / 3])
    n = 60_000
    for mode, kept in (("block", 11 / 9), ("law", 10 / 9)):
        out = draw_chain(constant(p), constant(q), torch.zeros(n, dtype=torch.int64), 2, mode)
        assert float(out.num_emitted.double().mean()) - 1 == pytest.approx(kept, abs=0.015)


def test_block_verification_at_temperature_0_is_the_argmax_match() -> None:
    first = torch.arange(300) % 3
    standard, blocks = (
        draw_chain(MARKOV.__getitem__, MARKOV_DRAFT.__getitem__, first, 3, mode, temperature=0.0)
        for mode in ("law", "block")
    )
    assert torch.equal(standard.token_ids, blocks.token_ids)
    assert VerifyMode.BLOCK.lossless
