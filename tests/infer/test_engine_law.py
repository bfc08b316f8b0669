"""Sampled output follows the target's law beyond the first token, whatever drafted it and whatever is in the batch."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from spectrain.infer.config import EngineConfig
from spectrain.infer.engine import Engine
from spectrain.infer.proposers.base import Proposer
from spectrain.infer.proposers.none import NoneProposer
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.target import Target
from spectrain.tests.fresh import fresh_proposer
from spectrain.tests.infer.proposers import LawProposer
from spectrain.tests.models import COMMON, build

VOCAB, DEPTH, SAMPLES, PROMPT = 5, 3, 2500, [3, 1, 4]
CONFIG = EngineConfig(num_draft_tokens=3, num_blocks=2000, block_size=4, max_batch_tokens=4096, max_batch_size=512)


def model():
    return build("Llama", head=0.25, **{**COMMON, "num_hidden_layers": 3, "vocab_size": VOCAB, "eos_token_id": None})


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.from_model(model())


def exact_law(
    params: SamplingParams, prompt: list[int] = PROMPT, build_model: Callable[[], PreTrainedModel] = model
) -> dict[tuple[int, ...], float]:
    """Joint law of the first DEPTH tokens, by full forwards; top-k by hand."""
    lone, law = build_model(), {(): 1.0}
    for _ in range(DEPTH):
        longer = {}
        for known, p in law.items():
            with torch.no_grad():
                logits = lone(input_ids=torch.tensor([prompt + list(known)]), use_cache=False).logits[0, -1]
            logits = logits.double() / params.temperature
            if params.top_k:
                logits[logits < logits.topk(params.top_k).values[-1]] = -math.inf
            for token, q in enumerate(logits.softmax(-1).tolist()):
                longer[(*known, token)] = p * q
        law = longer
    return law


def chi_square_p(counts: dict[tuple[int, ...], int], law: dict[tuple[int, ...], float], total: int) -> float:
    """Upper tail of Pearson's statistic, cells expected below 8 pooled; Wilson-Hilferty."""
    statistic, cells, rare_seen, rare_expected = 0.0, 0, 0, 0.0
    for cell in itertools.product(range(VOCAB), repeat=DEPTH):
        expected, seen = law[cell] * total, counts.get(cell, 0)
        if expected == 0:
            assert seen == 0, f"{cell} has probability 0 and was emitted {seen} times"
        elif expected < 8:
            rare_seen, rare_expected = rare_seen + seen, rare_expected + expected
        else:
            statistic, cells = statistic + (seen - expected) ** 2 / expected, cells + 1
    if rare_expected > 8:
        statistic, cells = statistic + (rare_seen - rare_expected) ** 2 / rare_expected, cells + 1
    degrees = cells - 1
    z = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    return 0.5 * math.erfc(z / math.sqrt(2))


def bigram_law(seed: int = 0) -> torch.Tensor:
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)).softmax(-1)


PROPOSERS = {
    "law": lambda target: LawProposer(bigram_law(), 3),
    "sampled drafts as point masses": lambda target: LawProposer(bigram_law(), 3, point_mass=True),
    "a head": lambda target: eagle3(target),
    "none": lambda target: NoneProposer(),
}


def eagle3(target: Target, draft_vocab_size: int = VOCAB) -> Proposer:
    return fresh_proposer("eagle3", target, 3, "probabilistic", draft_vocab_size=draft_vocab_size)


@pytest.mark.parametrize("name", PROPOSERS)
@pytest.mark.parametrize("params", [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 3}], ids=["t1", "top3"])
def test_joint_law_of_three_tokens(target, name, params):
    settings = SamplingParams(max_tokens=DEPTH + 2, **params)
    engine = Engine(target, PROPOSERS[name](target), CONFIG)
    each = [SamplingParams(max_tokens=DEPTH + 2, seed=i, **params) for i in range(SAMPLES)]
    outputs = engine.generate([PROMPT] * SAMPLES, each)
    counts: dict[tuple[int, ...], int] = {}
    for output in outputs:
        key = tuple(output.token_ids[:DEPTH])
        counts[key] = counts.get(key, 0) + 1
    p = chi_square_p(counts, exact_law(settings), SAMPLES)
    print(f"{name}: p = {p:.3g}, n = {SAMPLES}, accepted {engine.statistics.acceptance_by_position}")
    assert p > 1e-4
    if name != "none":
        assert engine.statistics.accepted_tokens > 0.03 * engine.statistics.draft_tokens


def test_the_law_test_sees_a_wrong_law(target):
    """The same statistic rejects drafts taken as they come: the draft law is not the target's."""
    generator, law = torch.Generator().manual_seed(0), bigram_law()
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(SAMPLES):
        tokens = [PROMPT[-1]]
        for _ in range(DEPTH):
            tokens.append(int(torch.multinomial(law[tokens[-1]], 1, generator=generator)))
        key = tuple(tokens[1:])
        counts[key] = counts.get(key, 0) + 1
    assert chi_square_p(counts, exact_law(SamplingParams(temperature=1.0)), SAMPLES) < 1e-6


@pytest.mark.parametrize("batch", [1, 3, 7])
def test_a_seed_decides_a_requests_tokens_whatever_its_neighbours(target, batch):
    prompts = [PROMPT, [1, 2], [4], [0, 3, 2, 1], [2, 2], [1], [3, 3, 3]]
    params = [SamplingParams(max_tokens=12, temperature=1.0, seed=100 + i) for i in range(7)]
    proposer = eagle3(target)
    together = Engine(target, proposer, CONFIG).generate(prompts, params)
    config = EngineConfig(num_draft_tokens=3, num_blocks=40, block_size=4, max_batch_size=batch)
    alone = Engine(target, eagle3(target), config).generate(prompts, params)
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]
    other = Engine(target, eagle3(target), config).generate(
        prompts, [SamplingParams(max_tokens=12, temperature=1.0, seed=200 + i) for i in range(7)]
    )
    assert [o.token_ids for o in other] != [o.token_ids for o in alone]


def test_laws_of_different_lengths_meet_in_one_batch(target):
    """A step budget below the batch leaves some drafts waiting, and output limits shorten others."""
    prompts = [PROMPT, [1, 2], [4], [0, 3, 2, 1], [2, 2]]
    params = [SamplingParams(max_tokens=n, temperature=1.0, seed=n) for n in (3, 12, 5, 9, 4)]
    config = EngineConfig(num_draft_tokens=3, num_blocks=60, block_size=4, max_batch_tokens=6)
    outputs = Engine(target, eagle3(target, 3), config).generate(prompts, params)
    assert [len(o.token_ids) for o in outputs] == [3, 12, 5, 9, 4]
