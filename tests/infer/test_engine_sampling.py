"""Sampling settings in the engine: what they do when decoding plainly they do under drafts, row by row of a block."""

import dataclasses

import pytest
import torch

from spectrain.infer.config import EngineConfig
from spectrain.infer.engine import Engine, EngineError
from spectrain.infer.losslessness import Generation, check_sampled
from spectrain.infer.proposers.none import NoneProposer
from spectrain.infer.request import FinishReason, RequestOutput
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.scoring import score_probs
from spectrain.infer.target import Target
from spectrain.tests.chats import PLAIN, word_tokenizer
from spectrain.tests.infer.proposers import LawProposer, NoisyOracle, ScriptedProposer
from spectrain.tests.infer.test_sampling import Row, naive_logits
from spectrain.tests.models import lone_forward, rand_llama, succ_llama

CONFIG = EngineConfig(num_blocks=200, block_size=4, max_batch_tokens=64, max_batch_size=8)
K = 4


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.from_model(rand_llama(2, max_position_embeddings=128))


@pytest.fixture(scope="module")
def flat() -> Target:
    """A target that leaves much to chance, so that settings show in what is drawn."""
    model = rand_llama(2, max_position_embeddings=128)
    model.get_output_embeddings().weight.data.mul_(0.2)
    return Target.from_model(model)


@pytest.fixture(scope="module")
def successor() -> Target:
    return Target.from_model(succ_llama())


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 20, (n,), generator=generator).tolist() for n in range(2, 2 + count)]


def run(target: Target, proposer, some: list[list[int]], params, **changes) -> list[RequestOutput]:
    engine = Engine(target, proposer, dataclasses.replace(CONFIG, **changes))
    outputs = engine.generate(some, params)
    assert engine.pool.num_free == engine.pool.num_blocks - 1, "a block leaked"
    return outputs


def drafted(target: Target, some: list[list[int]], plain: list[RequestOutput], params, **changes):
    """The same requests with drafts of which about two in three are right."""
    known = [prompt + output.token_ids for prompt, output in zip(some, plain, strict=True)]
    oracle = NoisyOracle(known, K, 0.3, target.vocab_size)
    return run(target, oracle, some, params, num_draft_tokens=K, **changes)


def by_hand(prompt: list[int], params: SamplingParams) -> list[int]:
    """Greedy decoding by full forwards and the rule written out in Python."""
    model, ids = rand_llama(2, max_position_embeddings=128), list(prompt)
    for _ in range(params.max_tokens):
        values = naive_logits(Row(params, ids, len(prompt), lone_forward(model, ids)[0][-1]))
        ids.append(max(range(len(values)), key=lambda token: values[token]))
    return ids[len(prompt) :]


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.6},
        {"repetition_penalty": 0.8, "frequency_penalty": 1.0},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 1.5},
        {"logit_bias": {7: 6.0, 11: 4.0, 90: -100.0}},
        {"allowed_token_ids": tuple(range(5, 40, 3)), "presence_penalty": 1.0},
        {"allowed_token_ids": (7, 8, 9), "bad_words": ((7, 7), (9,), (8, 8, 8), (7, 8, 7))},
    ],
    ids=lambda settings: "+".join(settings),
)
def test_greedy_output_follows_the_settings_with_and_without_drafts(target, settings):
    some, params = prompts(3), SamplingParams(max_tokens=20, ignore_eos=True, **settings)
    plain = run(target, NoneProposer(), some, params)
    assert [o.token_ids for o in plain] == [by_hand(prompt, params) for prompt in some]
    assert [o.token_ids for o in plain] != [o.token_ids for o in run(target, NoneProposer(), some, neutral(params))]
    found = drafted(target, some, plain, params)
    assert [o.token_ids for o in found] == [o.token_ids for o in plain]
    assert max(max(o.block_lengths) for o in found) > 1


def neutral(params: SamplingParams) -> SamplingParams:
    return SamplingParams(max_tokens=params.max_tokens, ignore_eos=True)


def test_requests_of_all_kinds_in_one_batch_keep_to_their_own_settings(target):
    some = prompts(6)
    each = [
        SamplingParams(max_tokens=18),
        SamplingParams(max_tokens=24, repetition_penalty=1.5),
        SamplingParams(max_tokens=9, temperature=1.0, min_p=0.1, seed=3, logit_bias={5: 3.0}),
        SamplingParams(max_tokens=21, bad_words=((7,), (8,)), min_tokens=15, stop_token_ids=(9, 10, 11, 12)),
        SamplingParams(max_tokens=15, temperature=0.9, top_k=9, top_p=0.8, presence_penalty=1.0, seed=4, logprobs=1),
        SamplingParams(max_tokens=12, allowed_token_ids=(5, 6, 7, 8), temperature=1.3, seed=5),
    ]
    alone = [run(target, NoneProposer(), [prompt], p)[0].token_ids for prompt, p in zip(some, each, strict=True)]
    # two rows only: every request takes the place of an earlier one in the table
    for size, ahead in ((2, False), (2, True), (8, True)):
        together = run(target, NoneProposer(), some, each, max_batch_size=size, launch_ahead=ahead)
        assert [o.token_ids for o in together] == alone
    greedy = [i for i, p in enumerate(each) if p.temperature == 0]
    outputs = drafted(target, some, together, each, max_batch_size=3)
    assert [outputs[i].token_ids for i in greedy] == [alone[i] for i in greedy]


@pytest.mark.parametrize("ahead", [False, True])
def test_repetition_penalty_counts_the_drafts_before_each_row(ahead):
    """Token t + 2 scores 0.9 times token t + 1, so a penalty of 1.5 skips what was said already."""
    model = succ_llama()
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        head.add_(0.9 * head.roll(1, dims=0))
    target = Target.from_model(model)
    for penalty, expected in ((1.0, [6, 7, 8, 9, 10, 11]), (1.5, [6, 8, 9, 10, 11, 12])):
        params = SamplingParams(max_tokens=6, repetition_penalty=penalty)
        assert run(target, NoneProposer(), [[5, 6, 7, 5]], params, launch_ahead=ahead)[0].token_ids == expected
        for script in ([6, 7, 8, 9], [6, 8, 9, 10], [8, 9, 10, 11]):
            scripts = {length: script[max(0, length - 4) :] or script for length in range(4, 12)}
            proposer = ScriptedProposer(scripts, K)
            assert run(target, proposer, [[5, 6, 7, 5]], params, num_draft_tokens=K)[0].token_ids == expected


def repeats(found: list[RequestOutput], probs) -> float:
    """How many tokens repeat the output so far, less what the laws expect, in standard deviations."""
    excess = variance = 0.0
    for output in found:
        prompt, tokens = output.prompt_token_ids, output.token_ids
        start = len(prompt) - 1
        laws = probs([*prompt, *tokens][:-1], range(start, start + len(tokens)), len(prompt))
        for i, (token, law) in enumerate(zip(tokens, laws, strict=True)):
            mass = float(law[list(set(tokens[:i]))].sum())
            excess += (token in tokens[:i]) - mass
            variance += mass * (1 - mass)
    return excess / variance**0.5


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.8, "presence_penalty": 0.7},
        {"frequency_penalty": 0.9, "min_p": 0.02},
        {"presence_penalty": -1.2, "top_p": 0.95},
        {"logit_bias": {5: 3.0, 6: 2.0}, "bad_words": ((5, 6),), "top_k": 9},
        {"min_tokens": 20, "stop_token_ids": (4, 5, 6), "bad_words": ((7,),)},
    ],
    ids=lambda settings: "+".join(settings),
)
def test_sampled_output_follows_the_settings_under_drafts(flat, settings):
    shared = {"temperature": 1.0, "max_tokens": 25, "allowed_token_ids": tuple(range(3, 15))}
    each = [SamplingParams(**shared, **settings, seed=i) for i in range(60)]
    law = torch.zeros(97, 97)
    law[:, 3:15] = 1 / 12
    found = run(flat, LawProposer(law, K), prompts(4) * 15, each, num_draft_tokens=K)
    assert sum(n > 2 for o in found for n in o.block_lengths) > 50
    engine = Engine(flat, NoneProposer(), CONFIG)
    generations = [Generation(o.prompt_token_ids, o.token_ids, o.block_lengths) for o in found]

    def judged(params: SamplingParams) -> tuple[bool, float]:
        def probs(*text):
            return score_probs(engine, params, *text)

        return check_sampled(generations, probs, torch.Generator()).passed, repeats(found, probs)

    passed, excess = judged(each[0])
    assert passed and abs(excess) < 4
    passed, excess = judged(SamplingParams(**shared))
    assert not passed or abs(excess) > 6, "the test would not have noticed"


def test_logprobs_are_the_targets_own_and_end_with_the_output(target):
    some = prompts(3)
    each = [
        SamplingParams(max_tokens=15, logprobs=3, repetition_penalty=1.5),
        SamplingParams(max_tokens=12, logprobs=0, temperature=1.0, seed=1),
        SamplingParams(max_tokens=9),
    ]
    plain = run(target, NoneProposer(), some, each)
    stop = dataclasses.replace(each[0], stop_token_ids=(plain[0].token_ids[6],))
    for outputs in (plain, drafted(target, some, plain, each), drafted(target, some, plain, [stop, *each[1:]])):
        assert outputs[2].logprobs is None
        for output, p in zip(outputs[:2], each[:2], strict=True):
            known = output.prompt_token_ids + output.token_ids
            law = lone_forward(rand_llama(2, max_position_embeddings=128), known)[0].log_softmax(-1)
            assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids)
            for i, (token, row) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
                expected = law[len(output.prompt_token_ids) - 1 + i]
                best = expected.topk(p.logprobs).indices.tolist()
                assert list(row) == list(dict.fromkeys([token, *best]))
                assert list(row.values()) == pytest.approx(expected[list(row)].tolist(), abs=1e-4)
    assert outputs[0].token_ids == plain[0].token_ids[: len(outputs[0].token_ids)]
    assert outputs[0].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("k", [0, 1, 4, 7])
def test_stop_strings_end_text_ids_and_counts_together(k):
    """Ids 7 to 32 are letters and follow each other, so the text is the alphabet."""
    words = word_tokenizer(PLAIN)
    target = Target.from_model(succ_llama(), words)
    scripts = {n: [(6 + n + j) % 41 for j in range(1, k + 1)] for n in range(1, 60)}
    proposer = ScriptedProposer(scripts, k) if k else NoneProposer()
    cases = (
        (("d e",), {}, 4, "b c"),
        (("d e",), {"include_stop_str": True}, 4, "b c d e"),
        (("z", "c d"), {}, 3, "b"),
        (("b",), {"min_tokens": 3}, 25, None),
        (("h",), {"max_tokens": 3}, 3, "b c d"),
        (("d",), {"max_tokens": 3}, 3, "b c"),
        (("h",), {"stop_token_ids": (10,)}, 3, "b c"),
    )
    for stop, more, count, text in cases:
        params = SamplingParams(**{"max_tokens": 25, "stop": stop, **more})
        (output,) = run(target, proposer, [[7]], params, num_draft_tokens=k)
        assert output.token_ids == list(range(8, 8 + count)), (stop, more)
        assert sum(output.block_lengths) == count
        reached_limit = count == params.max_tokens and stop != ("d",)
        assert output.finish_reason is (FinishReason.LENGTH if reached_limit else FinishReason.STOP)
        assert text is None or (output.text is not None and output.text.split() == text.split())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"logit_bias": {41: 1.0}}, "logit_bias must hold token ids in 0..40, found 41"),
        ({"stop_token_ids": (99,)}, "stop_token_ids must hold"),
        ({"logprobs": 42}, "logprobs must be at most"),
        ({"allowed_token_ids": (3,), "bad_words": ((3,),)}, "leave at least one token"),
        ({"stop": ("x",)}, "stop strings need a tokenizer"),
    ],
    ids=str,
)
def test_an_impossible_request_is_refused_and_the_others_go_on(successor, wrong, message):
    engine = Engine(successor, NoneProposer(), CONFIG)
    engine.add_request([3], SamplingParams(max_tokens=4))
    with pytest.raises(EngineError, match=message):
        engine.add_request([3], SamplingParams(**wrong))
    finished = []
    while engine.has_unfinished():
        finished += engine.step()
    assert [output.token_ids for output in finished] == [[4, 5, 6, 7]]


def test_numbers_beyond_every_context_trouble_nobody(successor):
    """They are refused or they work; they do not end the engine when the request's turn comes."""
    huge = 10**25
    each = [
        SamplingParams(max_tokens=4),
        SamplingParams(max_tokens=huge, min_tokens=huge - 1, stop_token_ids=(9,), temperature=1.0, top_k=huge, seed=1),
    ]
    outputs = run(successor, NoneProposer(), [[3], [3]], each, max_length=32)
    assert outputs[0].token_ids == [4, 5, 6, 7]
    assert len(outputs[1].token_ids) == 31 and 9 not in outputs[1].token_ids


def test_a_request_left_without_a_token_fails_alone(successor):
    stuck = SamplingParams(allowed_token_ids=(7, 8), bad_words=((7, 7), (7, 8), (8, 7), (8, 8)), max_tokens=9)
    outputs = run(successor, NoneProposer(), [[3], [3]], [stuck, SamplingParams(max_tokens=4)])
    assert outputs[0].finish_reason is FinishReason.ERROR and len(outputs[0].token_ids) == 1
    assert outputs[0].error is not None and "forbade every token" in outputs[0].error
    assert outputs[1].token_ids == [4, 5, 6, 7]


def test_end_tokens_wait_for_the_minimum_inside_a_block(successor):
    params = SamplingParams(max_tokens=20, min_tokens=5, stop_token_ids=(13, 18, 23))
    plain = run(successor, NoneProposer(), [[10]], params)
    oracle = NoisyOracle([[10, *plain[0].token_ids]], K, 0.2, 41)
    found = run(successor, oracle, [[10]], params, num_draft_tokens=K)
    assert found[0].token_ids == plain[0].token_ids
    assert not {13, 18, 23} & set(plain[0].token_ids[:5])
