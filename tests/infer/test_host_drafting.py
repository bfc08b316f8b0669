"""What the host keeps of texts and drafts is what the device has, through everything that happens to a request."""

import dataclasses
import random

import numpy as np
import pytest
import torch

from spectrain.infer import flight as flights
from spectrain.infer.config import EngineConfig
from spectrain.infer.engine import Engine
from spectrain.infer.proposers.base import (
    Drafts,
    DraftStep,
    Proposer,
    ProposerError,
    Released,
    Requirements,
)
from spectrain.infer.proposers.host import HostDrafts, HostProposer, HostStep
from spectrain.infer.proposers.ngram import NgramProposer
from spectrain.infer.proposers.ngram_rule import NgramRule
from spectrain.infer.proposers.none import NoneProposer
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.survival import log_odds_of
from spectrain.infer.target import Target
from spectrain.infer.texts import HostTexts
from spectrain.tests.infer.proposers import LawProposer
from spectrain.tests.infer.test_launch_ahead import Replays
from spectrain.tests.models import rand_llama

K = 4
CONFIG = EngineConfig(num_draft_tokens=K, num_blocks=26, block_size=4, max_batch_tokens=32, max_batch_size=3)


class Careless(HostProposer):
    """Copies some of the text, but also ids that are none, the target's or not, and more of them than there is room."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
        self.told: dict[int, list[int]] = {}
        self.cut = self.whole = self.sure = 0
        self.said: dict[int, np.ndarray] = {}  # how sure it was of the last drafts of each request

    def propose(self, step: HostStep) -> HostDrafts:
        ids = np.stack(
            [
                self.random.choice(step.tokens[row, :known], K)
                for row, known in zip(step.rows, step.num_known, strict=True)
            ]
        ).astype(np.int64)
        wrong = self.random.random(ids.shape) < 0.1
        ids[wrong] = self.random.choice([-1, 97, 2**40, -7], wrong.sum())
        for i, (request, row) in enumerate(zip(step.request_ids, step.rows, strict=True)):
            text = step.tokens[row, : step.num_known[i]].tolist()
            before = self.told.get(request, [])
            assert step.num_before[i] == len(before) and text[: len(before)] == before, "a text was told otherwise"
            self.told[request] = text
        lengths = self.random.integers(0, K + 1, len(ids))
        told = step.wants_confidence and self.random.random() < 0.7
        self.cut += int((lengths > step.room).sum())
        self.whole += int((lengths == K).sum())
        self.sure += told
        confidence = self.random.random(ids.shape).astype(np.float32) if told else None
        self.said = dict(
            zip(step.request_ids, np.full(ids.shape, np.nan) if confidence is None else confidence, strict=True)
        )
        return HostDrafts(ids, lengths, confidence)

    def release(self, request: Released) -> None:
        self.told.pop(request.request_id, None)


def checked(engine: Engine) -> list[int]:
    """Compares the host's and the device's word after each draft from now on; how many drafts waited each time."""
    host, table, waited = engine.runner.host, engine.table, []
    assert host is not None
    draft = host.draft

    def compared(flight, step):
        promised = draft(flight, step)
        alive = [request for request in flight.samplers if not request.finish_reason]
        for request in alive:
            known = int(table.num_known[request.slot])
            assert host.texts.num_known[request.slot] == known
            assert host.texts.tokens[request.slot, :known].tolist() == table.tokens[request.slot, :known].tolist()
            assert int(table.num_drafts[request.slot]) == flight.waiting.get(request.request_id, 0)
            if promised is not None and isinstance(host.proposer, Careless):
                said = torch.tensor(host.proposer.said[request.request_id], dtype=torch.float32)
                torch.testing.assert_close(table.draft_log_odds[request.slot], log_odds_of(said))
        waited.extend(flight.waiting.values())
        return promised

    host.draft = compared
    return waited


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.from_model(rand_llama(max_position_embeddings=64))


@pytest.mark.parametrize("policy", ["fixed", "adaptive"])
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
def test_host_and_device_know_the_same(target, ahead, recorded, policy) -> None:
    generator = random.Random(3)
    config = dataclasses.replace(CONFIG, launch_ahead=ahead, draft_policy=policy)
    engine = Engine(target, Careless(), config)
    if recorded:
        engine.runner.graphs = Replays()
        with torch.inference_mode():
            engine.runner.capture(3)
    waited = checked(engine)
    wanted, outputs, cancelled = {}, {}, set()
    while len(wanted) < 40 or engine.has_unfinished():
        if len(wanted) < 40 and generator.random() < 0.4:
            prompt = [generator.randrange(3, 97) for _ in range(generator.randint(1, 30))]
            params = SamplingParams(
                max_tokens=generator.randint(1, 40), temperature=generator.choice([0.0, 1.0]), seed=len(wanted)
            )
            wanted[engine.add_request(prompt, params)] = prompt, params
        if engine.scheduler.running and generator.random() < 0.03:
            cancelled.add(engine.cancel(generator.choice(engine.scheduler.running).request_id).request_id)
        outputs |= {output.request_id: output for output in engine.step()}
    assert engine.statistics.num_preemptions > 3 and engine.pool.num_free == engine.pool.num_blocks - 1
    assert (engine.proposer.sure > 5) == (policy == "adaptive")
    assert 0 in waited and max(waited) == K and engine.proposer.cut > 5 and not engine.proposer.told
    plain = Engine(target, NoneProposer(), dataclasses.replace(CONFIG, num_draft_tokens=0, num_blocks=200))
    asked = {i: given for i, given in wanted.items() if i not in cancelled and given[1].temperature == 0}
    expected = plain.generate([prompt for prompt, _ in asked.values()], [params for _, params in asked.values()])
    for request_id, output in zip(asked, expected, strict=True):
        assert outputs[request_id].token_ids == output.token_ids


def test_costs_are_measured_while_a_step_waits_for_its_drafts(target) -> None:
    engine = Engine(target, Careless(), dataclasses.replace(CONFIG, launch_ahead=True))
    engine.runner.graphs = Replays()
    with torch.inference_mode():
        engine.runner.capture(3)
    checked(engine)
    for prompt in ([7, 8] * 4, [9, 9], [5, 6, 5]):
        engine.add_request(prompt, SamplingParams(max_tokens=16, ignore_eos=True))
    for _ in range(6):
        engine.step()
    assert engine._flight is not None and engine.best_num_draft_tokens(), "nothing was in flight, or measured"
    while engine.has_unfinished():
        engine.step()


class ReadsLaws(LawProposer):
    """A drafter on the host within another: it goes by the ids, and its laws lie elsewhere each time."""

    def propose(self, step: DraftStep) -> Drafts:
        assert not step.request_ids or len(step.request_ids) == len(step.slots), "others were shown than asked for"
        return super().propose(step)


class TakesInner(HostProposer):
    """Every other request drafts what the one within it drafted."""

    def __init__(self, inner: LawProposer) -> None:
        self.inner, self.requirements = inner, inner.requirements

    def bind(self, planes, num_rows) -> None:
        self.inner.bind(planes, num_rows)

    def propose(self, step: HostStep) -> HostDrafts:
        assert step.inner is not None and step.inner.drawn
        last = step.tokens[step.rows, step.num_known - 1]
        np.testing.assert_allclose(step.inner.confidence[:, 0], self.inner.law[last].amax(-1))
        own = step.tokens[step.rows][:, :K].astype(np.int64)
        of_inner = np.array(step.request_ids) % 2 == 0
        ids = np.where(of_inner[:, None], step.inner.token_ids, own)
        return HostDrafts(ids, np.where(of_inner, step.inner.lengths, np.minimum(step.num_known, K)), None, of_inner)

    def release(self, request: Released) -> None:
        self.inner.release(request)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_drafter_on_the_host_within_another_runs_beside_recorded_steps(target, ahead) -> None:
    law = torch.rand(97, 97, generator=torch.Generator().manual_seed(1)).softmax(-1)
    prompts = [[7, 8, 9] * n for n in (1, 9, 3, 6, 2)]
    params = [SamplingParams(max_tokens=8 + 4 * i, temperature=1.0, seed=i, ignore_eos=True) for i in range(5)]
    said = []
    for recorded in (False, True):
        inner = ReadsLaws(law, K)
        config = dataclasses.replace(CONFIG, launch_ahead=ahead, num_blocks=200)
        engine = Engine(target, TakesInner(inner), config)
        if recorded:
            engine.runner.graphs = Replays()
            with torch.inference_mode():
                engine.runner.capture(3)
        inner.generator.manual_seed(0)
        checked(engine)
        draft, kept = engine.runner.host.draft, []

        def watched(flight, step, draft=draft, kept=kept, engine=engine):
            draft(flight, step)
            laws = engine.table.draft_laws
            for request in flight.samplers:
                if request.request_id % 2 == 0 and flight.waiting.get(request.request_id):
                    last = engine.table.tokens[request.slot, engine.table.num_known[request.slot] - 1]
                    torch.testing.assert_close(laws[request.slot, 0], law[last].log())
                    kept.append(request)

        engine.runner.host.draft = watched
        said.append([output.token_ids for output in engine.generate(prompts, params)])
        assert len(kept) > 5
    assert said[0] == said[1]


@pytest.mark.parametrize("ahead", [False, True])
def test_requests_go_on_behind_what_a_drafter_on_the_host_raises_within_another(target, ahead) -> None:
    class Fails(LawProposer):
        calls = 0

        def propose(self, step: DraftStep) -> Drafts:
            self.calls += 1
            if self.calls % 3 == 0:
                raise ProposerError("not now")
            return super().propose(step)

    config = dataclasses.replace(CONFIG, launch_ahead=ahead, num_blocks=200)
    engine = Engine(target, TakesInner(Fails(torch.full((97, 97), 1 / 97), K)), config)
    checked(engine)
    prompts, params = [[7, 8, 9] * n for n in (1, 9, 3, 6, 2)], SamplingParams(max_tokens=14, ignore_eos=True)
    ids, done, failed = [engine.add_request(prompt, params) for prompt in prompts], {}, 0
    while engine.has_unfinished():
        try:
            done |= {output.request_id: output.token_ids for output in engine.step()}
        except ProposerError:
            failed += 1
            assert engine._flight is not None and engine._flight.waiting == {}, "drafts wait that were never made"
    plain = Engine(target, NoneProposer(), dataclasses.replace(config, num_draft_tokens=0))
    assert failed > 2 and [done[i] for i in ids] == [output.token_ids for output in plain.generate(prompts, params)]


def test_a_class_that_is_neither_kind_is_refused_by_name(target) -> None:
    class Neither(Proposer):
        requirements = Requirements(observes=False)

        def bind(self, planes, num_rows) -> None: ...

        def observe(self, rows) -> None: ...

        def propose(self, step) -> None: ...

        def release(self, request) -> None: ...

    with pytest.raises(ProposerError, match="found Neither, which is neither"):
        Engine(target, Neither(), CONFIG)


def test_no_text_is_ever_copied_from_the_device(target, monkeypatch) -> None:
    """A step brings what it emitted, whatever the contexts hold."""
    copied: list[int] = []
    real = flights._to_host
    monkeypatch.setattr(flights, "_to_host", lambda tensor: (copied.append(tensor.numel()), real(tensor))[1])
    moved = [getattr(torch.Tensor, name) for name in ("cpu", "tolist", "numpy")]
    for move in moved:
        monkeypatch.setattr(
            torch.Tensor, move.__name__, lambda self, *rest, of=move: (check_small(self), of(self, *rest))[1]
        )
    engine = Engine(target, NgramProposer(K, NgramRule(min_n=1, max_n=3)), CONFIG)
    outputs = engine.generate([[7, 8] * 20, [9], [5, 6, 5]], SamplingParams(max_tokens=20, ignore_eos=True))
    assert [len(output.token_ids) for output in outputs] == [20] * 3 and engine.statistics.accepted_tokens > 0
    assert max(copied) <= 3 * (K + 5) and len(copied) >= engine.statistics.num_steps - 3


def check_small(tensor: torch.Tensor) -> None:
    assert tensor.numel() <= 3 * (K + 5), "more than a step emits was read on the host"


def test_rows_of_texts_grow_by_what_counts_and_begin_anew() -> None:
    texts = HostTexts(3, 12)
    texts.admit(2, [5, 6, 7], 2)
    texts.admit(0, [9], 1)
    rows, room = np.array([2, 0]), np.array([4, 4])
    first = texts.step([11, 12], rows, room)
    assert first.num_known.tolist() == [3, 1] and first.num_before.tolist() == [0, 0]
    assert first.prompt_lens.tolist() == [2, 1]
    texts.append(rows, np.array([[1, 2, -1], [3, -1, -1]]), np.array([2, 1]))
    texts.append(rows[:1], np.array([[4, 8, 8]]), np.array([1]))
    second = texts.step([11, 12], rows, room)
    assert second.num_known.tolist() == [6, 2] and second.num_before.tolist() == [3, 1]
    assert second.tokens[2, :6].tolist() == [5, 6, 7, 1, 2, 4] and second.tokens[0, :2].tolist() == [9, 3]
    texts.admit(2, [8], 1)
    assert texts.step([13], rows[:1], room[:1]).num_before.tolist() == [0]
