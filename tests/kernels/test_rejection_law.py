"""What the pipeline emits follows the target's law: closed forms, enumeration and chi-square, on CPU.

Noise is a function of (seed, position), so n draws are one batch of n requests with seeds 0..n-1.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from spectrain.kernels import reference
from spectrain.kernels.records import RejectionInputs, RejectionOutputs, Stream, VerifyMode, law_columns

P, Q = torch.tensor([0.6, 0.2, 0.1, 0.1]), torch.tensor([0.7, 0.2, 0.05, 0.05])
MARKOV = torch.tensor([[0.80, 0.15, 0.05], [0.10, 0.70, 0.20], [0.25, 0.25, 0.50]])
MARKOV_DRAFT = torch.tensor([[0.50, 0.20, 0.30], [0.25, 0.50, 0.25], [0.10, 0.60, 0.30]])
NUM_DRAWS = 22_500

Law = Callable[[Tensor], Tensor]  # previous token [n] -> probabilities [n, vocab]
Block = tuple[int, ...]
NextLaw = Callable[[Block], Sequence[float]]  # tokens so far -> probabilities


@pytest.fixture(params=[2, 4096], ids=["several vocabulary blocks", "one"])
def vocab_block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token is drawn in two levels; both must follow the law."""
    monkeypatch.setattr(reference.sampling, "VOCAB_BLOCK", request.param)


def p_value(counts: Tensor, law: Tensor) -> float:
    """Chi-square of counts against probabilities; cells of probability 0 must be empty."""
    assert counts[law == 0].sum() == 0
    counts, law = counts[law > 0].double(), law[law > 0].double()
    expected = law / law.sum() * counts.sum()
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(law) - 1) / 2).double(), statistic / 2))


def draw_chain(
    target: Law, draft: Law, first: Tensor, k: int, mode: str, seed: int = 0, temperature: float = 1.0
) -> RejectionOutputs:
    """One step of n requests.

    Drafts are drawn from their law (`law`, `block`), drawn but verified as point masses (`drawn_point`), or the draft's
    argmax, as a point mass (`point`) or under a law it was not drawn from (`wrong`).
    """
    n = first.shape[0]
    seeds, positions, ones = torch.arange(n) + seed, torch.full((n,), 11), torch.ones(n)
    tokens, laws, drafts = first, [], []
    for step in range(k):
        q = draft(tokens)
        laws.append(q)
        if mode in ("law", "drawn_point", "block"):
            tokens = reference.sampling.sample(q.log(), ones, seeds, positions + step, Stream.DRAFT)
        else:
            tokens = q.argmax(dim=-1)
        drafts.append(tokens)
    previous = [first, *drafts]
    rows = torch.stack([target(tokens) for tokens in previous], dim=1)
    return reference.rejection.verify(
        RejectionInputs(
            target_logits=rows.log().flatten(0, 1),
            draft_token_ids=torch.stack(drafts, dim=1),
            cu_rows=torch.arange(n + 1, dtype=torch.int32) * (k + 1),
            positions=positions,
            temperature=torch.full((n,), temperature),
            seeds=seeds,
            draft_log_probs=torch.stack(laws, dim=1).log() if mode in ("law", "wrong", "block") else None,
            mode=VerifyMode.BLOCK if mode == "block" else VerifyMode.STANDARD,
        )
    )


def emitted_law(
    target: NextLaw,
    draft: NextLaw,
    num_drafts: int,
    point_mass: bool,
) -> dict[Block, float]:
    """The probability of every block that one step can emit, by enumerating drafts and accept decisions."""
    law: dict[Block, float] = {}

    def add(block: Block, probability: float) -> None:
        if probability > 0:
            law[block] = law.get(block, 0.0) + probability

    def walk(prefix: Block, probability: float) -> None:
        p = target(prefix)
        if len(prefix) == num_drafts:
            for token, mass in enumerate(p):
                add((*prefix, token), probability * mass)
            return
        q = draft(prefix)
        for drafted, chance in enumerate(q):
            if chance == 0:
                continue
            believed = [float(token == drafted) for token in range(len(p))] if point_mass else q
            accept = min(1.0, p[drafted] / believed[drafted])
            walk((*prefix, drafted), probability * chance * accept)
            left = [max(a - b, 0.0) for a, b in zip(p, believed, strict=True)]
            for token, mass in enumerate(left):
                if mass > 0:
                    add((*prefix, token), probability * chance * (1 - accept) * mass / sum(left))

    walk((), 1.0)
    return law


def count_blocks(out: RejectionOutputs, law: dict[Block, float]) -> tuple[Tensor, Tensor]:
    """How often each block of the law was emitted, and its probability."""
    rows = zip(out.token_ids.tolist(), out.num_emitted.tolist(), strict=True)
    emitted = Counter(tuple(row[:count]) for row, count in rows)
    return torch.tensor([emitted[block] for block in law]), torch.tensor(list(law.values()))


def constant(law: Tensor) -> Law:
    return lambda tokens: law.expand(tokens.shape[0], -1)


def first_token_counts(mode: str, p: Tensor = P, q: Tensor = Q, n: int = NUM_DRAWS) -> Tensor:
    out = draw_chain(constant(p), constant(q), torch.zeros(n, dtype=torch.int64), 1, mode)
    return torch.bincount(out.token_ids[:, 0], minlength=len(p))


def total_variation(counts: Tensor, law: Tensor) -> float:
    return float((counts / counts.sum() - law).abs().sum() / 2)


@pytest.mark.usefixtures("vocab_block")
@pytest.mark.parametrize("mode", ["law", "point", "drawn_point", "block"])
def test_first_token_follows_the_target(mode: str) -> None:
    counts = first_token_counts(mode)
    p = p_value(counts, P)
    print(f"n={NUM_DRAWS} p={p:.4f}")
    assert p > 1e-4 and total_variation(counts, P) < 0.02


def test_argmax_draft_scored_with_its_softmax_would_show() -> None:
    """The harness sees the fault it guards against: TV 0.257, and tokens never drafted starve."""
    counts = first_token_counts("wrong")
    assert counts[1] == 0 and total_variation(counts, P) == pytest.approx(0.257, abs=0.01)


def test_rejected_point_mass_cannot_come_back() -> None:
    out = draw_chain(constant(P), constant(Q), torch.zeros(NUM_DRAWS, dtype=torch.int64), 1, "point")
    rejected = out.num_emitted == 1
    assert rejected.float().mean() == pytest.approx(0.4, abs=0.015)
    assert (out.token_ids[rejected, 0] != 0).all()


@pytest.mark.parametrize("mode", ["law", "block"])
def test_draft_accept_and_recover_noise_are_uncoupled(mode: str) -> None:
    """With one stream for all three, a 10/60/30 % target comes out as about 10.16/63.04/26.80 %."""
    n, target, draft = 131_072, torch.tensor([0.1, 0.6, 0.3]), torch.tensor([0.5, 0.3, 0.2])
    out = draw_chain(constant(target), constant(draft), torch.zeros(n, dtype=torch.int64), 3, mode)
    for depth in range(3):
        tokens = out.token_ids[out.num_emitted > depth, depth]
        counts = torch.bincount(tokens, minlength=3)
        p = p_value(counts, target)
        print(f"depth={depth} n={len(tokens)} p={p:.4f} {(counts / counts.sum()).tolist()}")
        # a block is kept or cut as a whole, so that only its first token has a law of its own
        assert p > 1e-4 or (mode == "block" and depth > 0)


def test_coupled_draft_and_recover_noise_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = reference.rejection.noise_keys
    monkeypatch.setattr(
        reference.rejection, "noise_keys", lambda seeds, positions, stream: keys(seeds, positions, Stream.DRAFT)
    )
    target, draft = torch.tensor([0.1, 0.6, 0.3]), torch.tensor([0.5, 0.3, 0.2])
    assert p_value(first_token_counts("law", target, draft, n=131_072), target) < 1e-12


@pytest.mark.usefixtures("vocab_block")
@pytest.mark.parametrize("mode", ["law", "point", "drawn_point", "block"])
def test_three_tokens_of_a_markov_chain_follow_it_jointly(mode: str) -> None:
    """Blocks of one step, continued by further steps until three tokens are out: 27 cells, 100,000 chains."""
    n, length = 100_000, 3
    chains = torch.zeros(n, length, dtype=torch.int64)
    filled = torch.zeros(n, dtype=torch.int64)
    start = torch.arange(n) % 3
    for step in range(length):
        previous = torch.where(filled > 0, chains.gather(1, (filled - 1).clamp(min=0)[:, None])[:, 0], start)
        out = draw_chain(MARKOV.__getitem__, MARKOV_DRAFT.__getitem__, previous, 2, mode, seed=step * n)
        for column in range(3):
            takes = (column < out.num_emitted) & (filled < length)
            chains[takes, filled[takes]] = out.token_ids[takes, column]
            filled += takes.long()
    assert (filled == length).all()
    for first in range(3):
        rows = chains[start == first]
        joint = (MARKOV[first][:, None, None] * MARKOV[:, :, None] * MARKOV[None]).flatten()
        counts = torch.bincount(rows @ torch.tensor([9, 3, 1]), minlength=27)
        p = p_value(counts, joint)
        print(f"{mode} start={first} n={len(rows)} p={p:.4f}")
        assert p > 1e-4


@pytest.mark.parametrize("mode", ["law", "point", "drawn_point"])
def test_blocks_have_the_enumerated_law(mode: str) -> None:
    """Tokens and acceptance lengths at once: a rule that is lossless but accepts too little fails here."""
    n, start = 60_000, 1
    out = draw_chain(MARKOV.__getitem__, MARKOV_DRAFT.__getitem__, torch.full((n,), start), 2, mode)

    def draft(prefix: Block) -> list[float]:
        q = MARKOV_DRAFT[prefix[-1] if prefix else start]
        return q.tolist() if mode != "point" else [float(token == q.argmax()) for token in range(3)]

    law = emitted_law(lambda prefix: MARKOV[prefix[-1] if prefix else start].tolist(), draft, 2, mode != "law")
    assert sum(law.values()) == pytest.approx(1)
    counts, shares = count_blocks(out, law)
    p = p_value(counts, shares)
    print(f"n={n} blocks={len(law)} p={p:.4f}")
    assert counts.sum() == n and p > 1e-4


def test_last_position_of_a_deep_block_follows_the_target() -> None:
    """Depth 4: among requests that accepted three drafts the fourth token, and then the bonus, still follow p."""
    out = draw_chain(constant(P), constant(Q), torch.zeros(60_000, dtype=torch.int64), 4, "law")
    for position in (3, 4):
        tokens = out.token_ids[out.num_emitted > position, position]
        p = p_value(torch.bincount(tokens, minlength=4), P)
        print(f"position={position} n={len(tokens)} p={p:.4f}")
        assert len(tokens) > 10_000 and p > 1e-4


def test_leviathan_closed_form() -> None:
    """E[tokens] = (1 - a^(g+1)) / (1 - a) = 3.3616 for acceptance a = .8 and g = 4 drafts."""
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.3, 0.5, 0.2])
    assert torch.minimum(p, q).sum() == pytest.approx(0.8)
    n = 60_000
    lengths = draw_chain(constant(p), constant(q), torch.zeros(n, dtype=torch.int64), 4, "law").num_emitted.double()
    assert lengths.mean() == pytest.approx(3.3616, abs=4 * float(lengths.std()) / math.sqrt(n))


@pytest.mark.parametrize("mode", ["law", "block"])
def test_draft_equal_to_target_is_always_accepted(mode: str) -> None:
    out = draw_chain(constant(P), constant(P), torch.zeros(2_000, dtype=torch.int64), 3, mode)
    assert (out.num_emitted == 4).double().mean() >= 0.999 and not out.failed.any()


@pytest.mark.parametrize("spare_column", [False, True], ids=["inside", "outside"])
def test_reduced_draft_vocabulary(spare_column: bool) -> None:
    """The draft knows target ids 1, 3 and 4 of 6 only; ids it cannot draw come out of the residual."""
    n, token_map = 40_000, torch.tensor([1, 3, 4])
    p = (
        torch.tensor([0.25, 0.2, 0.15, 0.1, 0.3, 0.0])
        if not spare_column
        else torch.tensor([0.4, 0.0, 0.3, 0.0, 0.0, 0.3])
    )
    q = torch.tensor([0.5, 0.3, 0.2])
    seeds, positions, ones = torch.arange(n), torch.full((n,), 5), torch.ones(n)
    drafts = token_map[reference.sampling.sample(q.log().expand(n, 3), ones, seeds, positions, Stream.DRAFT)]
    out = reference.rejection.verify(
        RejectionInputs(
            target_logits=p.log().expand(2 * n, 6),
            draft_token_ids=drafts[:, None],
            cu_rows=torch.arange(n + 1, dtype=torch.int32) * 2,
            positions=positions,
            temperature=ones,
            seeds=seeds,
            draft_log_probs=q.log().expand(n, 1, 3),
            law_columns=law_columns(token_map, 6),
        )
    )
    value = p_value(torch.bincount(out.token_ids[:, 0], minlength=6), p)
    accepted = float((out.num_emitted == 2).double().mean())
    print(f"n={n} p={value:.4f}")
    assert value > 1e-4
    assert accepted == pytest.approx(float(torch.minimum(p[token_map], q).sum()), abs=0.012)


def test_a_rejected_placeholder_leaves_the_whole_target_law() -> None:
    n = NUM_DRAWS
    inputs = RejectionInputs(
        target_logits=P.log().expand(2 * n, 4),
        draft_token_ids=torch.full((n, 1), -1),
        cu_rows=torch.arange(n + 1, dtype=torch.int32) * 2,
        positions=torch.zeros(n, dtype=torch.int64),
        temperature=torch.ones(n),
        seeds=torch.arange(n),
    )
    for law in (None, Q.log().expand(n, 1, 4)):
        out = reference.rejection.verify(inputs._replace(draft_log_probs=law))
        assert (out.num_emitted == 1).all()
        assert p_value(torch.bincount(out.token_ids[:, 0], minlength=4), P) > 1e-4
