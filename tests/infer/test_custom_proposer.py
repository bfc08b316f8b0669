"""A user's own class: the worked example of the docs, what it is given, and one line for whatever can be wrong."""

import dataclasses
import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from spectrain.infer.config import EngineConfig
from spectrain.infer.engine import Engine
from spectrain.infer.proposers.base import ProposerError
from spectrain.infer.proposers.custom import CustomProposer
from spectrain.infer.proposers.none import NoneProposer
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.target import Target
from spectrain.tests.models import lone_forward, rand_llama

PAGE = Path(__file__).parents[2] / "docs" / "custom-proposers.md"
CONFIG = EngineConfig(num_draft_tokens=3, num_blocks=100, block_size=4, max_batch_tokens=32, max_batch_size=4)
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.from_model(rand_llama(2, max_position_embeddings=128))


@pytest.fixture
def module(monkeypatch) -> types.ModuleType:
    made = types.ModuleType("drafts_of_mine")
    monkeypatch.setitem(sys.modules, "drafts_of_mine", made)
    return made


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [[*torch.randint(3, 20, (n,), generator=generator).tolist(), 5, 6, 5, 6] for n in (1, 4, 9, 2, 13, 6)]


def custom(target: Target, kind: type, module: types.ModuleType, config: EngineConfig = CONFIG) -> CustomProposer:
    setattr(module, kind.__name__, kind)
    return CustomProposer(f"drafts_of_mine:{kind.__name__}", config, target.vocab_size)


class Base:
    def __init__(self, config) -> None:
        self.config = config


@pytest.mark.parametrize("ahead", [False, True])
def test_requests_go_on_behind_an_exception(target, module, ahead) -> None:
    class Fails(Base):
        calls = 0

        def propose(self, sampled_token_ids, num_tokens_no_spec, token_ids_cpu):
            Fails.calls += 1
            if Fails.calls % 4 == 0:
                raise ZeroDivisionError
            return [
                row[count - 2 : count].tolist() for row, count in zip(token_ids_cpu, num_tokens_no_spec, strict=True)
            ]

    params = [dataclasses.replace(GREEDY, max_tokens=3 + 5 * i) for i in range(6)]
    plain = Engine(target, NoneProposer(), CONFIG).generate(prompts(), params)
    config = dataclasses.replace(CONFIG, launch_ahead=ahead)
    engine, done, failed = Engine(target, custom(target, Fails, module, config), config), {}, 0
    ids = [engine.add_request(prompt, p) for prompt, p in zip(prompts(), params, strict=True)]
    while engine.has_unfinished():
        try:
            done |= {output.request_id: output.token_ids for output in engine.step()}
        except ProposerError:
            failed += 1
    assert failed > 2 and [done[i] for i in ids] == [output.token_ids for output in plain]


def test_the_worked_example_runs_and_is_lossless(target, module) -> None:
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(source, module.__dict__)
    plain = Engine(target, NoneProposer(), CONFIG).generate(prompts(), GREEDY)
    proposer = CustomProposer("drafts_of_mine:LastFollower", CONFIG, target.vocab_size)
    engine = Engine(target, proposer, CONFIG)
    outputs = engine.generate(prompts(), GREEDY)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert engine.statistics.draft_tokens > 50 and engine.statistics.accepted_tokens > 0
    assert not proposer._inner.followers, "a request that left was not released"


@pytest.mark.parametrize("num_blocks", [100, 20])
def test_what_propose_is_given(target, module, num_blocks) -> None:
    seen: dict[int, list[int]] = {}

    class Watcher(Base):
        def propose(self, sampled_token_ids, num_tokens_no_spec, token_ids_cpu, *, slot_mappings, request_ids):
            assert slot_mappings is None and self.config is config
            assert token_ids_cpu.dtype == np.int32 and num_tokens_no_spec.shape == (len(request_ids),)
            for i, request_id in enumerate(request_ids):
                text = token_ids_cpu[i, : num_tokens_no_spec[i]].tolist()
                new = sampled_token_ids[i]
                assert new and text[-len(new) :] == new
                before = seen.get(request_id, prompts()[request_id])  # one that was preempted is told all again
                assert text == before + new
                seen[request_id] = text
            return [[(7 * length + j) % 90 + 3 for j in range(3)] for length in num_tokens_no_spec.tolist()]

        def release(self, request_id) -> None:
            released.append(request_id)
            if request_id in seen:
                whole[request_id] = seen.pop(request_id)

    whole: dict[int, list[int]] = {}
    released: list[int] = []
    config = CONFIG if num_blocks == 100 else dataclasses.replace(CONFIG, num_blocks=num_blocks)
    engine = Engine(target, custom(target, Watcher, module, config), config)
    for output in engine.generate(prompts(), GREEDY):
        known = output.prompt_token_ids + output.token_ids
        assert whole[output.request_id][: len(known)] == known
    assert len(released) == 6 + engine.statistics.num_preemptions
    assert (engine.statistics.num_preemptions > 0) == (num_blocks < 100)


def test_a_class_written_for_vllm_runs(target, module) -> None:
    class ForVllm:
        def __init__(self, vllm_config) -> None:
            pass

        def load_model(self, *arguments) -> None:
            raise AssertionError("there is nothing to load")

        def propose(self, sampled_token_ids, num_tokens_no_spec, token_ids_cpu, slot_mappings=None):
            return [[5] for _ in sampled_token_ids]

    engine = Engine(target, custom(target, ForVllm, module), CONFIG)
    engine.generate(prompts(), GREEDY)
    assert engine.statistics.draft_tokens > 0


@pytest.mark.parametrize("budget", [32, 5])
def test_hidden_states_are_the_targets_own(target, module, budget) -> None:
    states: dict[int, list[torch.Tensor]] = {}

    class Reader(Base):
        layer_ids = (0, 2)

        def propose(self, sampled_token_ids, num_tokens_no_spec, token_ids_cpu, *, request_ids, hidden_states):
            for request_id, rows in zip(request_ids, hidden_states, strict=True):
                states.setdefault(request_id, []).append(rows)
            counts = [sum(map(len, states[request_id])) for request_id in request_ids]
            assert counts == (num_tokens_no_spec - 1).tolist(), "the last row is that before the newest token"
            return [[5, 6] for _ in request_ids]

    config = EngineConfig(num_draft_tokens=3, num_blocks=100, block_size=4, max_batch_tokens=budget, max_batch_size=3)
    outputs = Engine(target, custom(target, Reader, module, config), config).generate(prompts(), GREEDY)
    model = rand_llama(2, max_position_embeddings=128)
    for output in outputs:
        known = output.prompt_token_ids + output.token_ids[:-1]
        _, expected = lone_forward(model, known)
        found = torch.cat(states[output.request_id])[: len(known)]
        torch.testing.assert_close(found, torch.stack([expected[0], expected[2]], dim=1), atol=2e-5, rtol=1e-4)


def fails(target: Target, module: types.ModuleType, answer, expected: str) -> None:
    class Wrong(Base):
        def propose(self, sampled_token_ids, num_tokens_no_spec, token_ids_cpu, request_ids=None):
            return answer(request_ids)

    engine = Engine(target, custom(target, Wrong, module), CONFIG)
    with pytest.raises(ProposerError, match=expected) as raised:
        engine.generate(prompts()[:2], GREEDY)
    assert "drafts_of_mine:Wrong" in str(raised.value) and "\n" not in str(raised.value)


def test_faults_name_the_class_and_the_request(target, module) -> None:
    fails(target, module, lambda ids: 1 / 0, r"requests 0, 1: ZeroDivisionError: .*test_custom_proposer.py:\d+")
    fails(target, module, lambda ids: [[] for _ in ids] + [[]], "a list for each of 2 requests, found 3")
    fails(target, module, lambda ids: None, "a list for each of 2 requests, found NoneType")
    fails(target, module, lambda ids: [[], [1, 2, 3, 4]], "may draft 3 tokens, found 4 for request 1")
    fails(target, module, lambda ids: [[97], []], r"ids in 0..96, found 97 for request 0")
    fails(target, module, lambda ids: [[], [-1]], r"found -1 for request 1")
    fails(target, module, lambda ids: [[], [0.5]], r"token ids for request 1, found \[0.5\]")
    fails(target, module, lambda ids: [[], 3], "token ids for request 1, found 3")


def test_a_fault_of_one_request_alone_names_it(target, module) -> None:
    class Late(Base):
        def propose(self, sampled_token_ids, num_tokens_no_spec, token_ids_cpu, request_ids):
            if 3 in request_ids:
                raise KeyError("mine")
            return [[] for _ in request_ids]

    config = EngineConfig(num_draft_tokens=3, num_blocks=100, block_size=4, max_batch_size=1)
    with pytest.raises(ProposerError, match="drafting for request 3: KeyError: 'mine'"):
        Engine(target, custom(target, Late, module, config), config).generate(prompts(), GREEDY)


def test_classes_that_are_not_there_or_do_not_fit(target, module) -> None:
    class Silent(Base):
        pass

    class Broken:
        def __init__(self, config) -> None:
            raise RuntimeError("no luck")

    class Blind(Base):
        layer_ids = (1,)

        def propose(self, sampled_token_ids, num_tokens_no_spec, token_ids_cpu):
            return []

    class Greedy(Base):
        def propose(self, sampled_token_ids, num_tokens_no_spec, token_ids_cpu, hidden_states):
            return []

    def asking(found: object) -> type:
        return type("Asking", (Greedy,), {"layer_ids": found})

    for kind, expected in (
        (asking(1), "ascending numbers of layers, found 1;"),
        (asking(("1",)), r"ascending numbers of layers, found \('1',\)"),
        (asking((2, 0)), r"ascending numbers of layers, found \(2, 0\)"),
        (asking((1, 1)), r"ascending numbers of layers, found \(1, 1\)"),
        (Silent, "needs a method `propose`"),
        (Broken, "while it was constructed: RuntimeError: no luck"),
        (Blind, "one without the other"),
        (Greedy, "one without the other"),
    ):
        with pytest.raises(ProposerError, match=expected):
            custom(target, kind, module)
    for path, expected in (
        ("nowhere.at.all:X", "cannot be imported.*PYTHONPATH"),
        ("drafts_of_mine:Absent", "names no class of drafts_of_mine"),
        ("drafts_of_mine", "custom:module:Class"),
        (":X", "custom:module:Class"),
    ):
        with pytest.raises(ProposerError, match=expected):
            CustomProposer(path, CONFIG, target.vocab_size)
