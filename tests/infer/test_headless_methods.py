"""N-gram, suffix, custom and hybrid drafts through the engine: the target's own output, whatever the batch."""

import dataclasses

import pytest
import torch

from spectrain.infer.config import EngineConfig
from spectrain.infer.costs import StepCosts
from spectrain.infer.engine import Engine
from spectrain.infer.proposers import hybrid
from spectrain.infer.proposers.custom import CustomProposer
from spectrain.infer.proposers.hybrid import HybridProposer
from spectrain.infer.proposers.ngram import NgramProposer
from spectrain.infer.proposers.ngram_gpu import NgramGpuProposer
from spectrain.infer.proposers.ngram_rule import NgramRule
from spectrain.infer.proposers.none import NoneProposer
from spectrain.infer.proposers.suffix import SuffixProposer, SuffixSettings
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.target import Target
from spectrain.tests.fresh import fresh_proposer
from spectrain.tests.infer.test_launch_ahead import Replays
from spectrain.tests.models import rand_llama, succ_llama
from spectrain.tests.suffix_package import NEEDS_SUFFIX, by_name

K = 4
CONFIG = EngineConfig(num_draft_tokens=K, num_blocks=300, block_size=4, max_batch_tokens=64, max_batch_size=8)
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
RULE = NgramRule(min_n=1, max_n=3)


class RepeatsText:
    """A custom class: drafts the text's own beginning."""

    def __init__(self, config: EngineConfig) -> None:
        self.k = config.num_draft_tokens

    def propose(self, sampled_token_ids, num_tokens_no_spec, token_ids_cpu):
        return [
            row[: min(self.k, count)].tolist() for row, count in zip(token_ids_cpu, num_tokens_no_spec, strict=True)
        ]


METHODS = {
    "ngram": lambda target, k: NgramProposer(k, RULE),
    "ngram, latest": lambda target, k: NgramProposer(k, dataclasses.replace(RULE, occurrence="latest")),
    "ngram_gpu": lambda target, k: NgramGpuProposer(k, RULE),
    "suffix": lambda target, k: SuffixProposer(k, SuffixSettings(max_factor=2.0)),
    "custom": lambda target, k: CustomProposer(
        f"{__name__}:RepeatsText", dataclasses.replace(CONFIG, num_draft_tokens=k), target.vocab_size
    ),
    "suffix+eagle3": lambda target, k: HybridProposer(SuffixProposer(k), fresh_proposer("eagle3", target, k)),
    "suffix+eagle3, two of the head": lambda target, k: HybridProposer(
        SuffixProposer(k), fresh_proposer("eagle3", target, min(k, 2))
    ),
}


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.from_model(rand_llama(max_position_embeddings=256))


def prompts() -> list[list[int]]:
    """Texts that repeat themselves and each other; some share whole blocks, so that the prefix cache holds them."""
    generator = torch.Generator().manual_seed(2)
    piece = torch.randint(3, 97, (9,), generator=generator).tolist()
    return [piece * 2, piece * 2 + [5], [7] * 6, [11], piece[:4] * 3, [*piece, 9, *piece], piece * 2 + [5, 6]]


@pytest.fixture(scope="module")
def plain(target: Target) -> list[list[int]]:
    outputs = Engine(target, NoneProposer(), dataclasses.replace(CONFIG, num_draft_tokens=0)).generate(
        prompts(), GREEDY
    )
    return [o.token_ids for o in outputs]


FREE = StepCosts(batches=(1,), widths=(1, K + 1), verify_ms=((1.0, 1.0),), draft_ms=(0.0,), rest_ms=(0.0,))
"""Drafts cost nothing, so that adaptive drafting goes on whatever else this machine does."""


def run(target: Target, name: str, *, k: int = K, rounds: int = 2, **changes) -> tuple[Engine, list[list[int]]]:
    """The prompts several times over, so that later requests repeat earlier ones."""
    config = dataclasses.replace(CONFIG, num_draft_tokens=k, **changes)
    engine = Engine(target, METHODS[name](target, k), config, FREE)
    outputs = [engine.generate(prompts(), GREEDY) for _ in range(rounds)]
    assert engine.pool.num_free == engine.pool.num_blocks - 1, "a block leaked"
    return engine, [output.token_ids for some in outputs for output in some]


CASES = [
    *((name, changes) for name in METHODS for changes in ({"num_blocks": 26}, {"k": 1, "max_batch_tokens": 9})),
    *((name, {"draft_policy": "adaptive"}) for name in ("ngram_gpu", "suffix", "suffix+eagle3")),
    *((name, {"draft_policy": "adaptive", "launch_ahead": True}) for name in ("suffix", "suffix+eagle3")),
    *((name, {"max_batch_size": 1}) for name in ("ngram", "suffix+eagle3, two of the head")),
]


@pytest.mark.parametrize("name,changes", by_name(CASES), ids=str)
def test_greedy_output_is_the_targets_own(target, plain, name, changes) -> None:
    engine, tokens = run(target, name, rounds=1, **changes)
    assert tokens == plain
    statistics = engine.statistics
    assert statistics.draft_tokens > 20 and (statistics.num_preemptions > 0) == ("num_blocks" in changes)
    if name != "custom":
        assert statistics.accepted_tokens > 0


@pytest.mark.parametrize("changes", [{}, {"num_blocks": 26}], ids=str)
def test_host_and_device_ngrams_are_one_method(target, changes) -> None:
    """The same drafts are counted, offered and kept: nothing that stands for no token is one of them."""
    host, device = (run(target, name, rounds=1, **changes)[0].statistics for name in ("ngram", "ngram_gpu"))
    assert host.accepted_tokens > 5
    for field in ("num_drafts", "draft_tokens", "drafted_per_position", "accepted_per_position", "request_forwards"):
        assert getattr(host, field) == getattr(device, field), field


@pytest.mark.parametrize("ahead", [False, True])
def test_ngrams_on_the_device_run_launched_ahead_and_padded_as_when_recorded(target, plain, ahead) -> None:
    engine = Engine(target, METHODS["ngram_gpu"](target, K), dataclasses.replace(CONFIG, launch_ahead=ahead))
    engine.runner.graphs = Replays()
    with torch.inference_mode():
        engine.runner.capture(8)
    assert [o.token_ids for o in engine.generate(prompts(), GREEDY)] == plain
    assert engine.statistics.accepted_tokens > 0


ENDING = [
    SamplingParams(max_tokens=5 + 7 * (i % 4), temperature=float(i % 3 == 2), seed=i, stop_token_ids=(11, 31))
    for i in range(14)
]


OWN_TEXT = SuffixSettings(max_factor=2.0, max_cached_requests=0)
AHEAD = METHODS | {
    "suffix, own text": lambda target, k: SuffixProposer(k, OWN_TEXT),
    "suffix+eagle3, own text": lambda target, k: HybridProposer(
        SuffixProposer(k, OWN_TEXT), fresh_proposer("eagle3", target, k)
    ),
}


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("name", by_name(AHEAD))
def test_a_host_that_reads_a_step_while_the_next_one_runs_says_the_same(target, name, recorded, monkeypatch) -> None:
    """Requests end within accepted drafts and at limits while their next step is on its way; others take their rows."""
    monkeypatch.setattr(hybrid, "PRIOR", 1e9)  # what a source is worth would depend on who drafted beside a request
    said, engines = [], []
    for ahead in (False, True):
        config = dataclasses.replace(CONFIG, launch_ahead=ahead, max_batch_size=3)
        engine = Engine(target, AHEAD[name](target, K), config)
        if recorded:
            engine.runner.graphs = Replays()
            with torch.inference_mode():
                engine.runner.capture(3)
        launched = watch(engine)
        outputs = engine.generate(prompts() * 2, ENDING)
        assert bool(launched) == ahead and engine.pool.num_free == engine.pool.num_blocks - 1
        if ahead and engine.proposer.requirements.on_host:
            assert any(rows < full for rows, full in launched), "it is known how many drafts wait, yet all rows ran"
        trees = getattr(engine.proposer, "suffix", engine.proposer)
        assert not (isinstance(trees, SuffixProposer) and trees.cache.active_requests), "a request was drafted for late"
        said.append([(o.token_ids, o.finish_reason) for o in outputs])
        engines.append(engine.statistics)
    assert said[0] == said[1]
    if "suffix" not in name or "own text" in name:  # other trees learn a response when its step is read
        for field in ("num_drafts", "draft_tokens", "accepted_per_position", "request_forwards"):
            assert getattr(engines[0], field) == getattr(engines[1], field), field


def watch(engine: Engine) -> list[tuple[int, int]]:
    """Rows of the steps that are launched ahead from now on, and rows if all drafts that could wait did."""
    rows: list[tuple[int, int]] = []
    ahead, run_target = engine.runner.launch_ahead, engine.runner._run_target

    def launch_ahead(requests, before):
        engine.runner._run_target = lambda slots, num_rows, *rest: (
            rows.append((num_rows, len(slots.rows) * (K + 1))),
            run_target(slots, num_rows, *rest),
        )[1]
        try:
            return ahead(requests, before)
        finally:
            engine.runner._run_target = run_target

    engine.runner.launch_ahead = launch_ahead
    return rows


@pytest.mark.parametrize("name", by_name(["ngram", "suffix", "custom", "suffix+eagle3"]))
def test_only_what_is_on_the_device_is_recorded(target, plain, name) -> None:
    """Of a hybrid that is its head. Steps have as many rows as the drafts that wait need, not as there could be."""
    engine = Engine(target, METHODS[name](target, K), dataclasses.replace(CONFIG, max_batch_size=7))
    replays = engine.runner.graphs = Replays()
    with torch.inference_mode():
        engine.runner.capture(7)
    captured, replays.keys = replays.keys, set()
    assert [o.token_ids for o in engine.generate(prompts(), GREEDY)] == plain
    of_head = {"observe"} if name == "suffix+eagle3" else set()
    stages = {"target", "verify", "brief", "take"} | of_head
    assert {key[0] for key in replays.keys} == stages and replays.keys <= captured
    for stage in stages:
        assert {key[1] for key in replays.keys if key[0] == stage} >= {"mixed", 8}
    widths = {key[2] // key[1] for key in replays.keys if key[0] == "target" and key[1] == 8}
    assert widths <= set(engine.runner.widths) == {1, 2, 3, 4, 5}
    if name == "ngram":
        assert min(widths - {1}) < K + 1


@pytest.mark.parametrize("name", by_name(["ngram", "ngram_gpu", "suffix"]))
@pytest.mark.parametrize("k", [1, 3])
def test_the_first_drafted_token_is_verified_too(target, name, k) -> None:
    """A prompt of one repeated id drafts that id, which the target never says."""
    prompt = [7] * 6
    (expected,) = Engine(target, NoneProposer(), CONFIG).generate([prompt], GREEDY)
    engine = Engine(target, METHODS[name](target, k), dataclasses.replace(CONFIG, num_draft_tokens=k))
    (output,) = engine.generate([prompt], GREEDY)
    assert output.token_ids == expected.token_ids and output.token_ids[0] != 7


@pytest.mark.parametrize("name", by_name(["ngram", "ngram, latest", "ngram_gpu", "suffix"]))
def test_nothing_to_repeat_is_plain_decoding(name) -> None:
    """Every token is new on the successor toy: no match, no draft, and figures that say so."""
    successor = Target.from_model(succ_llama())
    for prompt in ([10], [10, 11], [10, 11, 12]):
        engine = Engine(successor, METHODS[name](successor, K), CONFIG)
        (output,) = engine.generate([prompt], SamplingParams(max_tokens=20, ignore_eos=True))
        assert output.token_ids == [(prompt[-1] + 1 + i) % 41 for i in range(20)]
        assert engine.statistics.num_drafts == 0 and engine.statistics.acceptance_length is None
        assert engine.statistics.draft_acceptance_rate is None


@pytest.mark.parametrize("name", by_name(["ngram", "ngram_gpu", "suffix"]))
@pytest.mark.parametrize("end", [5, 9, 14])
def test_an_end_inside_accepted_drafts_ends_the_text(name, end) -> None:
    """The cycle stands in the prompt, so that drafts run past the end token."""
    successor = Target.from_model(succ_llama())
    prompt = [*range(3, 16), 30, 3]
    params = SamplingParams(max_tokens=30, stop_token_ids=(end,))
    for k in (1, 4, 7):
        engine = Engine(successor, METHODS[name](successor, k), dataclasses.replace(CONFIG, num_draft_tokens=k))
        (output,) = engine.generate([prompt], params)
        assert output.token_ids == list(range(4, end + 1))
        assert k == 1 or engine.statistics.accepted_tokens > 0


@pytest.mark.parametrize("name", by_name(["ngram", "ngram_gpu", "suffix"]))
@pytest.mark.parametrize("max_length", [8, 9, 10, 13])
def test_the_context_is_filled_and_never_passed(target, name, max_length) -> None:
    prompt = [7, 8, 7, 8, 7]
    long = SamplingParams(max_tokens=99, ignore_eos=True)
    plain = Engine(target, NoneProposer(), dataclasses.replace(CONFIG, num_draft_tokens=0)).generate([prompt], long)
    engine = Engine(target, METHODS[name](target, K), dataclasses.replace(CONFIG, max_length=max_length))
    (output,) = engine.generate([prompt], long)
    assert output.token_ids == plain[0].token_ids[: max_length - len(prompt)]


@NEEDS_SUFFIX
def test_suffix_acceptance_grows_with_what_was_served(target) -> None:
    lengths = []
    engine = Engine(target, SuffixProposer(8), dataclasses.replace(CONFIG, num_draft_tokens=8))
    for _ in range(3):
        before = dataclasses.replace(engine.statistics)
        engine.generate(prompts(), GREEDY)
        forwards = engine.statistics.request_forwards - before.request_forwards
        lengths.append((engine.statistics.output_tokens - before.output_tokens) / forwards)
    assert lengths[0] < 2 < 4 < min(lengths[1:])
    engine.proposer.forget()
    engine.statistics = type(engine.statistics)()
    engine.generate(prompts(), GREEDY)
    assert engine.statistics.tokens_per_step == pytest.approx(lengths[0]), "what was served was not forgotten"


@NEEDS_SUFFIX
def test_a_hybrid_drafts_at_least_as_well_as_either(target) -> None:
    suffix, hybrid = (run(target, name)[0].statistics for name in ("suffix", "suffix+eagle3"))
    engine = Engine(target, fresh_proposer("eagle3", target, K), CONFIG)
    engine.generate(prompts(), GREEDY)
    assert hybrid.tokens_per_step > max(suffix.tokens_per_step, engine.statistics.tokens_per_step) - 0.1
    assert hybrid.num_drafts > suffix.num_drafts
