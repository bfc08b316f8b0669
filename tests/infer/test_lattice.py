"""The walk over a block's candidates: its law is the one each token was drawn from, and pairs are scored in order."""

import itertools

import pytest
import torch
from torch import Tensor

from spectrain.infer.proposers.base import DraftStep
from spectrain.infer.proposers.lattice import Lattice, Previous, law_over_vocabulary, top_candidates, walk

VOCAB, SLOTS = 6, 3
LOGITS = torch.randn(1, SLOTS, VOCAB, generator=torch.Generator().manual_seed(0))
PAIRS = 1.5 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))


def step_of(batch: int, temperature: float, newest: int = 2) -> DraftStep:
    ones = torch.ones(batch, dtype=torch.int64)
    return DraftStep(
        list(range(batch)), ones, torch.zeros(batch, 1), 5 * ones, newest * ones, SLOTS * ones,
        torch.full((batch,), temperature), torch.arange(batch),
    )  # fmt: skip


def scorer(lattice: Lattice):
    def score(slot: int, previous: Previous) -> Tensor:
        rows = PAIRS[previous.token_ids]
        if slot and lattice.token_ids is not None:  # the index names the same token
            named = lattice.token_ids[:, slot - 1].gather(1, previous.candidate[:, None])[:, 0]
            assert torch.equal(named, previous.token_ids)
        assert slot or not previous.candidate.any()
        return rows if lattice.token_ids is None else rows.gather(1, lattice.token_ids[:, slot])

    return score


def expected_law(num_candidates: int | None, temperature: float) -> dict[tuple[int, ...], float]:
    """Probability of every path, by hand."""
    kept = [
        set(range(VOCAB)) if num_candidates is None else set(LOGITS[0, s].topk(num_candidates).indices.tolist())
        for s in range(SLOTS)
    ]
    law = {}
    for path in itertools.product(range(VOCAB), repeat=SLOTS):
        p, before = 1.0, 2
        for slot, token in enumerate(path):
            weights = torch.full((VOCAB,), -torch.inf)
            for v in kept[slot]:
                weights[v] = (LOGITS[0, slot, v] + PAIRS[before, v]) / temperature
            p *= float(weights.softmax(0)[token])
            before = token
        law[path] = p
    return law


@pytest.mark.parametrize("num_candidates", [None, 1, 3])
def test_greedy_takes_the_best_of_each_slot_behind_the_one_before(num_candidates: int | None) -> None:
    lattice = top_candidates(LOGITS, num_candidates)
    path = walk(lattice, scorer(lattice), step_of(1, 0.0), SLOTS, False)
    before, tokens = 2, []
    for slot in range(SLOTS):
        kept = LOGITS[0, slot].topk(num_candidates or VOCAB).indices.tolist()
        before = max(kept, key=lambda v, b=before, s=slot: float(LOGITS[0, s, v] + PAIRS[b, v]))
        tokens.append(before)
    assert path.token_ids[0].tolist() == tokens
    assert path.previous[0].tolist() == [2, *tokens[:-1]]


@pytest.mark.parametrize("num_candidates", [None, 3])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_paths_are_drawn_by_the_law_they_carry(num_candidates: int | None, temperature: float) -> None:
    batch = 20_000
    lattice = top_candidates(LOGITS.expand(batch, -1, -1), num_candidates)
    path = walk(lattice, scorer(lattice), step_of(batch, temperature), SLOTS, True)
    laws = law_over_vocabulary(lattice, path.laws, VOCAB)
    torch.testing.assert_close(laws.exp().sum(-1), torch.ones(batch, SLOTS))
    expected = expected_law(num_candidates, temperature)
    found = laws.gather(2, path.token_ids[..., None])[..., 0].sum(1).exp()
    for i in range(50):
        assert float(found[i]) == pytest.approx(expected[tuple(path.token_ids[i].tolist())], rel=1e-4)
    codes = path.token_ids @ torch.tensor([VOCAB**2, VOCAB, 1])
    counts = torch.bincount(codes, minlength=VOCAB**SLOTS) / batch
    for code, p in enumerate(expected.values()):
        assert abs(float(counts[code]) - p) < 5 * (p * (1 - p) / batch) ** 0.5 + 1e-4
        assert p > 0 or counts[code] == 0


def test_more_candidates_than_tokens_is_the_whole_vocabulary() -> None:
    assert top_candidates(LOGITS, VOCAB).token_ids is None and top_candidates(LOGITS, None).token_ids is None
    assert torch.equal(top_candidates(LOGITS, 2).token_ids[0, 0], LOGITS[0, 0].topk(2).indices)
