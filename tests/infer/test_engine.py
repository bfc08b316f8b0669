"""The engine against the target's own forward: same tokens whatever is drafted, batched, chunked or preempted."""

import dataclasses
import time
from types import SimpleNamespace

import pytest
import torch

from spectrain.infer import flight
from spectrain.infer.config import EngineConfig
from spectrain.infer.engine import Engine, EngineError
from spectrain.infer.proposers.extract_hidden_states import ExtractHiddenStatesProposer
from spectrain.infer.proposers.none import NoneProposer
from spectrain.infer.request import FinishReason
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.target import Target
from spectrain.tests.infer.proposers import NoisyOracle, RecordingProposer, ScriptedProposer
from spectrain.tests.models import gpt2_tiny, rand_llama, succ_llama

CONFIG = EngineConfig(num_blocks=200, block_size=4, max_batch_tokens=64, max_batch_size=16)
GREEDY = SamplingParams(max_tokens=64, ignore_eos=True)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.from_model(rand_llama(max_position_embeddings=256))


def prompts(count: int, longest: int = 23, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(3, 97, (n,), generator=generator).tolist() for n in lengths]


def by_hand(target: Target, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy decoding by full forwards through transformers' own attention, no cache, one token at a time."""
    model = rand_llama(max_position_embeddings=256)
    ids = list(prompt)
    for _ in range(num_tokens):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def run(target: Target, proposer, some: list[list[int]], params=GREEDY, **changes) -> tuple[Engine, list]:
    engine = Engine(target, proposer, dataclasses.replace(CONFIG, **changes))
    outputs = engine.generate(some, params)
    assert engine.pool.num_free == engine.pool.num_blocks - 1, "a block leaked"
    return engine, outputs


@pytest.fixture(scope="module")
def plain(target: Target) -> list[list[int]]:
    return [by_hand(target, prompt, 64) for prompt in prompts(7)]


def test_plain_decoding_equals_full_forwards(target, plain):
    _, outputs = run(target, NoneProposer(), prompts(7))
    assert [o.token_ids for o in outputs] == plain
    # on a target that repeats itself a wrong cache could pass unseen
    assert min(len(set(tokens)) for tokens in plain) >= 20


@pytest.mark.parametrize("batch", [1, 7])
@pytest.mark.parametrize("error", [0.15, 0.4])
def test_drafts_never_change_greedy_output(target, plain, batch, error):
    k = 5
    oracle = NoisyOracle([p + o for p, o in zip(prompts(7), plain, strict=True)], k, error, target.vocab_size)
    engine, outputs = run(target, oracle, prompts(7), max_batch_size=batch, num_draft_tokens=k)
    assert [o.token_ids for o in outputs] == plain
    mean_accepted = engine.statistics.accepted_tokens / engine.statistics.num_drafts
    assert 0.2 * k < mean_accepted < 0.8 * k


def test_an_adversary_changes_nothing(target, plain):
    adversary = NoisyOracle([], 5, 1.0, target.vocab_size)
    engine, outputs = run(target, adversary, prompts(7), num_draft_tokens=5)
    assert [o.token_ids for o in outputs] == plain
    assert engine.statistics.draft_tokens > 1000


def test_too_few_blocks_finish_through_preemption_with_the_same_tokens(target, plain):
    oracle = NoisyOracle([p + o for p, o in zip(prompts(7), plain, strict=True)], 4, 0.3, target.vocab_size)
    engine, outputs = run(target, oracle, prompts(7), num_draft_tokens=4, num_blocks=50)
    assert [o.token_ids for o in outputs] == plain
    assert engine.statistics.num_preemptions > 0


@pytest.mark.parametrize("budget", [1, 3, 7])
def test_prompts_longer_than_the_step_budget_are_computed_in_chunks(target, plain, budget):
    _, outputs = run(target, NoneProposer(), prompts(7), max_batch_tokens=budget, max_batch_size=3)
    assert [o.token_ids for o in outputs] == plain


def test_every_row_is_observed_once_in_order_and_rejected_rows_never(target, plain):
    oracle = NoisyOracle([p + o for p, o in zip(prompts(7), plain, strict=True)], 4, 0.3, target.vocab_size)
    engine, outputs = run(target, oracle, prompts(7), num_draft_tokens=4, max_batch_tokens=9)
    for output in outputs:
        known = output.prompt_token_ids + output.token_ids
        rows = oracle.rows[output.request_id]
        assert [position for position, *_ in rows] == list(range(len(known) - 1))
        assert [token for _, token, _, _ in rows] == known[:-1]
        assert [following for _, _, following, _ in rows] == known[1:]


@pytest.mark.parametrize("changes", [{}, {"max_batch_tokens": 5}, {"max_batch_size": 1}, {"num_blocks": 24}])
def test_extracted_states_are_the_targets_own(target, changes):
    some, layer_ids = prompts(9), (0, 2, 3, 6)
    states: dict[int, torch.Tensor] = {}
    proposer = ExtractHiddenStatesProposer(target, layer_ids, lambda i, s: states.__setitem__(i, s.clone()))
    _, outputs = run(target, proposer, some, SamplingParams(max_tokens=1, ignore_eos=True), **changes)
    model = rand_llama(max_position_embeddings=256)
    last: list[torch.Tensor] = []
    model.get_decoder().layers[-1].register_forward_hook(
        lambda module, args, out: last.append(out[0] if isinstance(out, tuple) else out)
    )
    for output, prompt in zip(outputs, some, strict=True):
        with torch.no_grad():
            hidden = model(input_ids=torch.tensor([prompt]), output_hidden_states=True, use_cache=False).hidden_states
        expected = torch.stack([hidden[0], hidden[2], hidden[3], last[-1].reshape(hidden[0].shape)], dim=2)[0]
        torch.testing.assert_close(states[output.request_id], expected, atol=2e-5, rtol=1e-4)


@pytest.fixture(scope="module")
def successor() -> Target:
    return Target.from_model(succ_llama())


class TestStops:
    """Stops inside an accepted block."""

    def perfect(self, k: int = 4) -> ScriptedProposer:
        return ScriptedProposer({n: [(10 + n - 1 + j) % 41 for j in range(1, k + 1)] for n in range(1, 200)}, k)

    def decode(self, target, params, k=4, **changes):
        # the prompt 10 has length 1, so the known token at index i is 10 + i
        return run(target, self.perfect(k), [[10]], params, num_draft_tokens=k, **changes)

    @pytest.mark.parametrize("k", [1, 2, 4, 7])
    @pytest.mark.parametrize("stop", [11, 12, 13, 14, 15, 19])
    def test_nothing_is_emitted_after_a_stop_token_accepted_in_mid_block(self, successor, k, stop):
        _, outputs = self.decode(successor, SamplingParams(max_tokens=30, stop_token_ids=(stop,)), k)
        assert outputs[0].token_ids == list(range(11, stop + 1))
        assert outputs[0].finish_reason is FinishReason.STOP
        assert sum(outputs[0].block_lengths) == len(outputs[0].token_ids)

    @pytest.mark.parametrize("max_tokens", range(12))
    def test_never_more_tokens_than_asked_for(self, successor, max_tokens):
        _, outputs = self.decode(successor, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        assert len(outputs[0].token_ids) == max_tokens
        assert outputs[0].finish_reason is FinishReason.LENGTH

    def test_an_earlier_stop_wins_over_the_length_limit_of_the_same_block(self, successor):
        _, outputs = self.decode(successor, SamplingParams(max_tokens=5, stop_token_ids=(13,)))
        assert outputs[0].token_ids == [11, 12, 13]
        assert outputs[0].finish_reason is FinishReason.STOP

    def test_a_stop_before_the_minimum_is_an_ordinary_token(self, successor):
        params = SamplingParams(max_tokens=9, stop_token_ids=(13, 18), min_tokens=5)
        _, outputs = self.decode(successor, params)
        assert 13 not in outputs[0].token_ids[4:5]
        assert len(outputs[0].token_ids) >= 5

    def test_without_any_end_token_the_length_limit_ends_it(self, successor):
        assert not successor.eos_token_ids
        _, outputs = self.decode(successor, SamplingParams(max_tokens=50))
        assert len(outputs[0].token_ids) == 50

    @pytest.mark.parametrize("max_length", [5, 6, 7, 8, 9, 10])
    def test_the_context_is_filled_and_never_passed(self, successor, max_length):
        engine, outputs = self.decode(successor, SamplingParams(max_tokens=99, ignore_eos=True), max_length=max_length)
        assert len(outputs[0].token_ids) == max_length - 1
        assert outputs[0].token_ids == list(range(11, 10 + max_length))

    def test_acceptance_counts_come_before_the_stop(self, successor):
        engine, _ = self.decode(successor, SamplingParams(max_tokens=99, stop_token_ids=(13,)))
        statistics = engine.statistics
        # first step emits 11; the second verifies 12 13 14 15, all right, and the stop keeps two
        assert (statistics.num_drafts, statistics.accepted_tokens, statistics.accepted_kept) == (1, 4, 2)


def test_drafts_never_run_past_learned_positions():
    """GPT-2 has no embedding for position 64: one drafted row too many is an index error, not a wrong number."""
    target = Target.from_model(gpt2_tiny(eos_token_id=None))
    prompt, params = list(range(3, 50)), SamplingParams(max_tokens=99)
    _, (plain,) = run(target, NoneProposer(), [prompt], params)
    assert len(prompt) + len(plain.token_ids) == 64
    for k in (2, 4, 5, 6):  # none divides what is left into whole blocks
        oracle = NoisyOracle([prompt + plain.token_ids + [0] * 8], k, 0.0, target.vocab_size)
        _, (output,) = run(target, oracle, [prompt], params, num_draft_tokens=k)
        assert output.token_ids == plain.token_ids


class Reaching(NoisyOracle):
    """Writes further than it drafts: `propose` needs slots of the request's own up to its look-ahead."""

    lookahead = 9

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.requirements = dataclasses.replace(self.requirements, lookahead=self.lookahead)
        self.whole = 0

    def propose(self, step):
        drafts = super().propose(step)
        for known, room, blocks in zip(step.seq_lens.tolist(), step.room.tolist(), step.block_tables, strict=True):
            if room == self.k:
                last = known - 1 + self.lookahead
                assert bool((blocks[: last // CONFIG.block_size + 1] > 0).all()), "slots of nobody would be written"
                self.whole += 1
        return drafts


@pytest.mark.parametrize("launch_ahead", [False, True])
@pytest.mark.parametrize("num_blocks", [200, 50])
def test_a_proposer_that_looks_ahead_has_slots_of_its_own(target, plain, num_blocks, launch_ahead):
    proposer = Reaching([p + o for p, o in zip(prompts(7), plain, strict=True)], 4, 0.3, target.vocab_size)
    proposer.requirements = dataclasses.replace(proposer.requirements, on_host=False)
    engine, outputs = run(
        target, proposer, prompts(7), num_draft_tokens=4, num_blocks=num_blocks, launch_ahead=launch_ahead
    )
    assert [o.token_ids for o in outputs] == plain
    if num_blocks == 200:
        assert proposer.whole > 0.8 * engine.statistics.num_drafts, "drafts were cut for want of slots"


def test_invalid_draft_ids_are_never_embedded(target, plain):
    prompt = prompts(7)[0]
    for bad in ([-1, 5, 5], [5, target.vocab_size, 5], [10**9], [-7]):
        proposer = ScriptedProposer({n: bad for n in range(200)}, 3)
        _, outputs = run(target, proposer, [prompt], num_draft_tokens=3)
        assert outputs[0].token_ids == plain[0]


def test_logits_that_are_not_finite_fail_their_own_request_only():
    some = [[token if token != 5 else 7 for token in prompt] for prompt in prompts(7)]
    healthy = Target.from_model(rand_llama(max_position_embeddings=256))
    _, expected = run(healthy, NoneProposer(), some)
    broken = Target.from_model(rand_llama(max_position_embeddings=256))
    with torch.no_grad():
        broken.model.get_input_embeddings().weight[5] = torch.nan
    _, outputs = run(broken, NoneProposer(), [*some[:3], [9, 5, 11], *some[3:]])
    failed = outputs.pop(3)
    assert failed.finish_reason is FinishReason.ERROR and failed.token_ids == []
    assert failed.error is not None and "not finite" in failed.error
    for output, right in zip(outputs, expected, strict=True):
        # a request that itself emits token 5 ends there
        cut = right.token_ids.index(5) + 1 if 5 in right.token_ids[:-1] else len(right.token_ids)
        assert output.token_ids == right.token_ids[:cut]


def test_a_cancelled_request_frees_its_blocks_and_leaves_the_others_alone(target, plain):
    engine = Engine(target, RecordingProposer(), CONFIG)
    ids = [engine.add_request(prompt, GREEDY) for prompt in prompts(7)]
    outputs = {}
    for _ in range(10):
        outputs |= {o.request_id: o for o in engine.step()}
    cancelled = engine.cancel(ids[3])
    assert cancelled is not None and cancelled.finish_reason is FinishReason.CANCELLED
    while engine.has_unfinished():
        outputs |= {o.request_id: o for o in engine.step()}
    assert [outputs[i].token_ids for i in ids if i != ids[3]] == [p for i, p in enumerate(plain) if i != 3]
    assert engine.pool.num_free == engine.pool.num_blocks - 1


@pytest.mark.parametrize(
    ("prompt", "params", "changes", "words"),
    [
        ([], GREEDY, {}, "at least one token"),
        ([97], GREEDY, {}, "must lie in 0..96"),
        ([1] * 300, GREEDY, {}, "context of 256"),
        ([1] * 20, GREEDY, {"num_blocks": 5}, "raise --num-blocks"),
    ],
)
def test_a_request_that_can_never_run_is_refused_by_reason(target, prompt, params, changes, words):
    engine = Engine(target, NoneProposer(), dataclasses.replace(CONFIG, **changes))
    with pytest.raises(EngineError, match=words):
        engine.add_request(prompt, params)


def test_a_prompt_that_can_never_run_leaves_none_of_its_batch_behind(target, plain):
    engine = Engine(target, NoneProposer(), CONFIG)
    for wrong in ([999], [1] * 300, [], [3.7], ["a"]):
        with pytest.raises(EngineError):
            engine.generate([prompts(7)[0], wrong, prompts(7)[1]], GREEDY)
        assert not engine.has_unfinished()
    finished: list[int] = []
    outputs = engine.generate(prompts(7), GREEDY, lambda output: finished.append(output.request_id))
    assert [o.token_ids for o in outputs] == plain
    assert len(finished) == 7, "requests of a refused batch were run"


@pytest.mark.parametrize("launch_ahead", [False, True])
def test_a_callback_may_cancel_other_requests_of_its_batch(target, plain, launch_ahead):
    engine = Engine(target, NoneProposer(), dataclasses.replace(CONFIG, launch_ahead=launch_ahead))
    each = [dataclasses.replace(GREEDY, max_tokens=9 if i == 2 else 64) for i in range(7)]
    outputs = engine.generate(prompts(7), each, lambda output: [engine.cancel(i) for i in (1, 4)])
    for i, output in enumerate(outputs):
        if i in (1, 4):
            assert output.finish_reason is FinishReason.CANCELLED
            assert 0 < len(output.token_ids) < 64 and output.token_ids == plain[i][: len(output.token_ids)]
        else:
            assert output.token_ids == plain[i][: each[i].max_tokens]
    assert engine.pool.num_free == engine.pool.num_blocks - 1


@pytest.mark.parametrize("launch_ahead", [False, True])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_requests_for_no_token_end_as_they_come_and_touch_nothing(target, plain, launch_ahead, prefix_cache):
    some = prompts(7)
    oracle = NoisyOracle([p + o for p, o in zip(some, plain, strict=True)], 4, 0.3, target.vocab_size)
    changes = {"num_draft_tokens": 4, "launch_ahead": launch_ahead, "prefix_cache": prefix_cache}
    engine = Engine(target, oracle, dataclasses.replace(CONFIG, max_batch_size=3, **changes))
    none = dataclasses.replace(GREEDY, max_tokens=0, logprobs=2)
    each = [none if i in (0, 3, 6) else GREEDY for i in range(7)]
    # a batch that mixes them, with more requests than rows of the table
    finished: list[int] = []
    outputs = engine.generate(some, each, lambda output: finished.append(output.request_id))
    assert [o.token_ids for o in outputs] == [[] if i in (0, 3, 6) else plain[i] for i in range(7)]
    assert finished[:3] == [0, 3, 6] and sorted(finished) == list(range(7))
    for i in (0, 3, 6):
        assert outputs[i].finish_reason is FinishReason.LENGTH and outputs[i].error is None
        assert outputs[i].block_lengths == [] and outputs[i].logprobs == []
    assert oracle.rows.keys() == {request for request, _ in oracle.released} == {1, 2, 4, 5}, "nothing was drafted"
    assert engine.statistics.prompt_tokens == sum(map(len, some))
    # one that comes while a step is in flight, and is all there is left once the other is cancelled
    steps = engine.statistics.num_steps
    running = engine.add_request(some[1], GREEDY)
    assert engine.step() == []
    late = engine.add_request(some[2], none)
    assert engine.has_unfinished() and engine.cancel(late) is None, "it has ended already"
    assert engine.cancel(running) is not None and engine.has_unfinished()
    assert [o.request_id for o in engine.step()] == [late] and not engine.has_unfinished()
    assert engine.statistics.num_steps == steps + 1 and engine.step() == []
    assert engine.generate([some[1]], none)[0].token_ids == [] and engine.statistics.num_steps == steps + 1
    assert engine.generate([some[1]], GREEDY)[0].token_ids == plain[1]
    assert engine.pool.num_free == engine.pool.num_blocks - 1


def test_a_prompt_may_fill_the_context_where_no_token_is_asked_for(successor):
    engine = Engine(successor, NoneProposer(), dataclasses.replace(CONFIG, max_length=8))
    assert engine.generate([[3] * 8], SamplingParams(max_tokens=0))[0].token_ids == []
    for length, max_tokens in ((8, 1), (9, 0)):
        with pytest.raises(EngineError, match="context of 8"):
            engine.add_request([3] * length, SamplingParams(max_tokens=max_tokens))


@pytest.mark.parametrize("launch_ahead", [False, True])
def test_time_in_which_nothing_ran_is_no_steps(successor, launch_ahead, monkeypatch):
    engine = Engine(successor, NoneProposer(), dataclasses.replace(CONFIG, launch_ahead=launch_ahead))
    lost = engine.add_request([3], SamplingParams(max_tokens=20))
    engine.step()
    engine.step()
    assert engine.cancel(lost) is not None
    # an hour later
    monkeypatch.setattr(flight, "time", SimpleNamespace(perf_counter=lambda: time.perf_counter() + 3600))
    engine.generate([[3]], SamplingParams(max_tokens=3))
    statistics = engine.statistics
    assert statistics.num_steps > 3
    assert statistics.decode_seconds + statistics.prefill_seconds + statistics.verify_seconds < 1800


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"draft_policy": "adaptiv"}, "draft_policy must be one of fixed, adaptive"),
        ({"verify_mode": "block"}, "verify_mode must be"),
        ({"num_blocks": 0}, "num_blocks must be"),
        ({"num_blocks": 1}, "num_blocks must be"),
        ({"num_blocks": 10**12}, "lower --num-blocks"),
        ({"max_length": 0}, "max_length must be"),
        ({"memory_share": 1.5}, "memory_share must be"),
    ],
    ids=str,
)
def test_settings_that_mean_nothing_are_refused(successor, changes, words):
    with pytest.raises(EngineError, match=words):
        Engine(successor, NoneProposer(), dataclasses.replace(CONFIG, **changes))


def test_drafts_longer_than_the_context_are_refused(target):
    with pytest.raises(EngineError, match="shorter than the context"):
        Engine(target, NoneProposer(), dataclasses.replace(CONFIG, num_draft_tokens=16, max_length=16))
