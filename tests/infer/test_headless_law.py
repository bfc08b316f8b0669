"""Sampled output follows the target's law under drafts without a head, and where point masses and laws are mixed."""

import pytest
import torch

from spectrain.infer.engine import Engine
from spectrain.infer.proposers import hybrid
from spectrain.infer.proposers.custom import CustomProposer
from spectrain.infer.proposers.hybrid import HybridProposer
from spectrain.infer.proposers.ngram import NgramProposer
from spectrain.infer.proposers.ngram_gpu import NgramGpuProposer
from spectrain.infer.proposers.ngram_rule import NgramRule
from spectrain.infer.proposers.suffix import SuffixProposer, SuffixSettings
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.target import Target
from spectrain.tests.infer.proposers import LawProposer
from spectrain.tests.infer.test_engine_law import (
    CONFIG,
    DEPTH,
    PROMPT,
    VOCAB,
    bigram_law,
    chi_square_p,
    eagle3,
    exact_law,
    model,
)
from spectrain.tests.suffix_package import NEEDS_SUFFIX, by_name

SAMPLES = 2000
RULE = NgramRule(min_n=1, max_n=2)
LONG = [*PROMPT, 2, 0, *PROMPT]  # something to repeat


class Likeliest:
    """Drafts what sampling often says, now and then two tokens further."""

    def __init__(self, config) -> None:
        pass

    def propose(self, sampled_token_ids, num_tokens_no_spec, token_ids_cpu):
        rows = zip(token_ids_cpu, num_tokens_no_spec, strict=True)
        return [[int(row[count - 1]), 2, 1][: 1 + count % 3] for row, count in rows]


def suffix(**changes) -> SuffixProposer:
    return SuffixProposer(3, SuffixSettings(**{"max_factor": 3.0, **changes}))


PROPOSERS = {
    "ngram": lambda target: NgramProposer(3, RULE),
    "ngram_gpu": lambda target: NgramGpuProposer(3, RULE),
    "suffix": lambda target: suffix(),
    "custom": lambda target: CustomProposer(f"{__name__}:Likeliest", CONFIG, VOCAB),
    "suffix and a law": lambda target: HybridProposer(suffix(), LawProposer(bigram_law(), 3)),
    "suffix and sampled point masses": lambda target: HybridProposer(
        suffix(), LawProposer(bigram_law(), 3, point_mass=True)
    ),
    "suffix+eagle3": lambda target: HybridProposer(suffix(), eagle3(target, VOCAB)),
    "suffix+eagle3, reduced vocabulary": lambda target: HybridProposer(suffix(), eagle3(target, 3)),
}


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.from_model(model())


def law_p(target: Target, proposer, prompt: list[int], samples: int = SAMPLES, **params) -> tuple[float, Engine]:
    engine = Engine(target, proposer, CONFIG)
    each = [SamplingParams(max_tokens=DEPTH + 2, seed=i, **params) for i in range(samples)]
    counts: dict[tuple[int, ...], int] = {}
    for output in engine.generate([prompt] * samples, each):
        key = tuple(output.token_ids[:DEPTH])
        counts[key] = counts.get(key, 0) + 1
    return chi_square_p(counts, exact_law(SamplingParams(**params), prompt), samples), engine


QUICK = ("ngram_gpu", "suffix", "custom", "suffix and a law", "suffix+eagle3, reduced vocabulary")


@pytest.mark.parametrize("name", by_name(QUICK))
def test_joint_law_of_three_tokens(target, name, monkeypatch) -> None:
    check_joint_law(target, name, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", by_name(name for name in PROPOSERS if name not in QUICK))
def test_joint_law_of_three_tokens_of_the_others(target, name, monkeypatch) -> None:
    check_joint_law(target, name, monkeypatch)


def check_joint_law(target: Target, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrid, "PRIOR", 1e9)  # promises are believed, or the better source would soon be the only one
    proposer = PROPOSERS[name](target)
    chosen: list[int] = []
    if isinstance(proposer, HybridProposer):
        choose = proposer._choose
        proposer._choose = lambda *given: (made := choose(*given), chosen.extend(made.tolist()))[0]
    p, engine = law_p(target, proposer, LONG, temperature=1.0)
    print(f"{name}: p = {p:.3g}, accepted {engine.statistics.acceptance_by_position}")
    assert p > 1e-4
    assert engine.statistics.accepted_tokens > 0.03 * engine.statistics.draft_tokens > 100
    if chosen:
        assert 0.05 < sum(chosen) / len(chosen) < 0.95, "both kinds of drafts must meet in one batch"


@NEEDS_SUFFIX
@pytest.mark.slow
def test_a_choice_that_looks_at_drawn_tokens_is_seen(target, monkeypatch) -> None:
    """Weighing all of a sampled chain, as is right for a greedy one, keeps the chains that drew certain tokens."""
    monkeypatch.setattr(hybrid, "PRIOR", 1e9)
    law = torch.full((VOCAB, VOCAB), 0.2)
    law[:2] = torch.tensor([0.96, 0.01, 0.01, 0.01, 0.01])  # after 0 and 1 it is sure of 0, else it knows nothing

    def p(samples: int) -> float:
        own_text = suffix(max_factor=1.0, max_cached_requests=0)
        return law_p(target, HybridProposer(own_text, LawProposer(law, 3)), LONG, samples, temperature=1.0)[0]

    assert p(SAMPLES) > 1e-4
    of_head = hybrid._of_head
    monkeypatch.setattr(hybrid, "_of_head", lambda drafts, *rest: of_head(drafts._replace(drawn=False), *rest))
    assert p(2 * SAMPLES) < 1e-5
