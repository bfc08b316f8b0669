"""Steps launched before the last one was read give what steps read one by one give."""

import dataclasses

import pytest
import torch
from torch.utils._pytree import tree_leaves

from spectrain.infer import stages
from spectrain.infer.config import EngineConfig
from spectrain.infer.engine import Engine
from spectrain.infer.graphs import RecordingError
from spectrain.infer.proposers.none import NoneProposer
from spectrain.infer.request import FinishReason
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.target import Target
from spectrain.tests.fresh import fresh_proposer

CONFIG = EngineConfig(num_blocks=200, block_size=4, max_batch_tokens=64, max_batch_size=8)


def texts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 30, (count,), generator=generator).tolist()
    return [torch.randint(3, 97, (n,), generator=generator).tolist() for n in lengths]


def settings(count: int, temperature: float) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=temperature, seed=i, max_tokens=5 + 7 * (i % 5), stop_token_ids=(11, 42))
        for i in range(count)
    ]


def engine_of(target: Target, k: int, sampling: str = "greedy", **changes) -> Engine:
    proposer = fresh_proposer("eagle3", target, k, sampling) if k else NoneProposer()
    return Engine(target, proposer, dataclasses.replace(CONFIG, num_draft_tokens=k, **changes))


@pytest.mark.parametrize("num_blocks", [200, 40])
@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_outputs_and_counts_do_not_change(target, temperature, k, num_blocks):
    sampling = "probabilistic" if temperature else "greedy"
    runs = []
    for ahead in (False, True):
        engine = engine_of(target, k, sampling, launch_ahead=ahead, num_blocks=num_blocks)
        outputs = engine.generate(texts(14), settings(14, temperature))
        assert engine.pool.num_free == engine.pool.num_blocks - 1
        runs.append(outputs)
    assert [o.token_ids for o in runs[0]] == [o.token_ids for o in runs[1]]
    assert [o.finish_reason for o in runs[0]] == [o.finish_reason for o in runs[1]]
    assert {o.finish_reason for o in runs[0]} == {FinishReason.STOP, FinishReason.LENGTH}


def test_what_requests_ask_for_holds_in_steps_launched_ahead(target):
    params = [
        dataclasses.replace(given, repetition_penalty=1.5, logprobs=i % 3, ignore_eos=True)
        for i, given in enumerate(settings(6, 0.0))
    ]
    plain, ahead = (engine_of(target, k, launch_ahead=k > 0).generate(texts(6), params) for k in (0, 4))
    assert [o.token_ids for o in ahead] == [o.token_ids for o in plain]
    assert [list(map(list, o.logprobs)) for o in ahead] == [list(map(list, o.logprobs)) for o in plain]


def test_the_next_step_really_is_in_flight(target):
    engine = engine_of(target, 4, launch_ahead=True)
    engine.add_request([5, 6, 7], SamplingParams(max_tokens=40, ignore_eos=True))
    engine.step()
    assert engine._flight is not None
    serial = engine_of(target, 4, launch_ahead=False)
    serial.add_request([5, 6, 7], SamplingParams(max_tokens=40, ignore_eos=True))
    serial.step()
    assert serial._flight is None


def test_a_request_cancelled_in_flight_leaves_the_others_alone(target):
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    expected = [o.token_ids for o in engine_of(target, 0).generate(texts(6), params)]
    engine = engine_of(target, 4, launch_ahead=True, num_blocks=90)
    ids = [engine.add_request(text, params) for text in texts(6)]
    outputs = {}
    for _ in range(6):
        outputs |= {o.request_id: o for o in engine.step()}
    cancelled = engine.cancel(ids[2])
    assert cancelled is not None and cancelled.finish_reason is FinishReason.CANCELLED
    late = engine.add_request(texts(6)[2], params)  # moves into the blocks and the table row just freed
    while engine.has_unfinished():
        outputs |= {o.request_id: o for o in engine.step()}
    assert [outputs[i].token_ids for i in ids if i != ids[2]] == [t for i, t in enumerate(expected) if i != 2]
    assert outputs[late].token_ids == expected[2]
    assert engine.pool.num_free == engine.pool.num_blocks - 1


class Replays:
    """Stands where CUDA graphs stand: a call sees what it was first given, and its results stay where they were."""

    def __init__(self) -> None:
        self.keys: set[tuple] = set()
        self._recorded: dict[tuple, tuple] = {}

    def run(self, key, function, *arguments):
        self.keys.add(key)
        function, arguments, results = self._recorded.setdefault(key, (function, arguments, None))
        new = function(*arguments)
        pairs = list(zip(tensors(results), tensors(new), strict=False))
        # a head on a CPU drafts no more than there is room for, so that shapes may differ as they never do on a GPU
        if not pairs or any(kept.shape != made.shape for kept, made in pairs):
            self._recorded[key] = function, arguments, new
            return new
        for kept, made in pairs:
            kept.copy_(made)
        return results


def tensors(results: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("k", [0, 4])
def test_padding_to_a_bucket_changes_nothing(target, temperature, k):
    sampling = "probabilistic" if temperature else "greedy"
    expected = engine_of(target, k, sampling).generate(texts(14), settings(14, temperature))
    engine = engine_of(target, k, sampling, launch_ahead=True, max_batch_size=7)
    replays = Replays()
    engine.runner.graphs = replays
    with torch.inference_mode():
        engine.runner.capture(7)
    captured, replays.keys = replays.keys, set()
    engine.runner.layout.exact = lambda scheduled: pytest.fail("a step ran call by call")
    outputs = engine.generate(texts(14), settings(14, temperature))
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert {key[1] for key in replays.keys if key[0] == "target"} >= {"mixed", 8, 4}
    assert replays.keys <= captured, "a step would have been recorded in the middle of a run"
    assert int(engine.table.num_known[engine.table.nobody]) == 1, "padding appended tokens to nobody's row"


@pytest.mark.parametrize("sampling", ["greedy", "probabilistic"])
def test_what_is_recorded_ran_in_the_same_way_before(target, sampling, monkeypatch):
    """A kernel that is compiled while a graph is recorded ends the recording."""
    plainly: set[tuple] = set()
    recorded: set[tuple] = set()
    seen = plainly

    class Watched(Replays):
        def run(self, key, function, *arguments):
            nonlocal seen
            seen = recorded
            try:
                return super().run(key, function, *arguments)
            finally:
                seen = plainly

    verify = stages.verify_drafts

    def watched(logits, drafts, *arguments, draft_log_probs, law_columns, **more):
        kind = draft_log_probs is None, law_columns is None, tuple(drafts.shape), logits.shape[0]
        assert seen is plainly or kind in plainly, f"recorded before it ran: {kind}"
        seen.add(kind)
        return verify(logits, drafts, *arguments, draft_log_probs=draft_log_probs, law_columns=law_columns, **more)

    monkeypatch.setattr(stages, "verify_drafts", watched)
    engine = engine_of(target, 4, sampling, max_batch_size=7)
    engine.runner.graphs = Watched()
    table = engine.table
    # a CPU drafts nothing where nobody has room, a GPU all the same
    table.limits[table.nobody] = table.capacities[table.nobody] = table.max_length
    with torch.inference_mode():
        engine.runner.capture(7)
    assert recorded and (sampling == "greedy") == any(kind[0] for kind in recorded)


class Unrecordable(Replays):
    """As for a target that reads something on the host: one stage plays along, the other does not."""

    def run(self, key, function, *arguments):
        if key[0] == "verify":
            raise RecordingError("its verify stage cannot be recorded as a CUDA graph: it waits for the device")
        return super().run(key, function, *arguments)


def test_what_cannot_be_recorded_runs_call_by_call_and_says_so(target):
    expected = engine_of(target, 4).generate(texts(14), settings(14, 0.0))
    engine = engine_of(target, 4, launch_ahead=True, max_batch_size=7)
    assert engine.not_recorded is None
    engine.runner.graphs = Unrecordable()
    with torch.inference_mode():
        engine._record()
    assert engine.not_recorded is not None and "waits for the device" in engine.not_recorded
    assert engine.runner.graphs is None
    outputs = engine.generate(texts(14), settings(14, 0.0))
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert engine._flight is None


@pytest.mark.parametrize("max_length", [5, 6, 7, 8, 9, 10])
@pytest.mark.parametrize("k", [0, 1, 3])
def test_the_context_is_filled_and_never_passed(target, max_length, k):
    params = SamplingParams(max_tokens=99, ignore_eos=True)
    (expected,) = engine_of(target, 0, launch_ahead=False).generate([[10]], params)
    (output,) = engine_of(target, k, launch_ahead=True, max_length=max_length).generate([[10]], params)
    assert output.token_ids == expected.token_ids[: max_length - 1]
    assert output.finish_reason is FinishReason.LENGTH
