"""Steps padded for replay compute what steps laid out exactly compute, in buffers that never move."""

import dataclasses

import pytest

from spectrain.infer.config import EngineConfig
from spectrain.infer.engine import Engine
from spectrain.infer.layout import bucket
from spectrain.infer.proposers.none import NoneProposer
from spectrain.infer.sampling import SamplingParams
from spectrain.tests.fresh import fresh_proposer
from spectrain.tests.infer.test_launch_ahead import Replays

CONFIG = EngineConfig(num_blocks=200, block_size=4, max_batch_tokens=64, max_batch_size=6)


class Watched(Replays):
    """Sees to it besides that what a graph would read stays where it was."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[object, int] = {}

    def run(self, key, function, *arguments):
        if key[0] == "target":
            first = arguments[0]
            rows = first.slots.rows if key[1] == "mixed" else first.rows
            assert self.places.setdefault(key[1], rows.data_ptr()) == rows.data_ptr()
        return super().run(key, function, *arguments)


@pytest.mark.parametrize("launch_ahead", [False, True])
@pytest.mark.parametrize("k", [0, 3])
def test_padded_steps_say_what_exact_ones_say(target, prompts, k, launch_ahead):
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=4 + 6 * i, ignore_eos=True) for i in range(5)]
    said = []
    for padded in (False, True):
        proposer = fresh_proposer("eagle3", target, k, "probabilistic") if k else NoneProposer()
        config = dataclasses.replace(CONFIG, num_draft_tokens=k, launch_ahead=launch_ahead)
        engine = Engine(target, proposer, config)
        if padded:
            engine.runner.graphs = graphs = Watched()
            engine.runner.capture(CONFIG.max_batch_size)
        said.append([output.token_ids for output in engine.generate(prompts, params)])
        assert engine.pool.num_free == engine.pool.num_blocks - 1
    assert said[0] == said[1]
    assert {key[1] == "mixed" for key in graphs.keys if key[0] == "target"} == {True, False}


@pytest.mark.parametrize(("batch", "size"), [(1, 1), (3, 4), (17, 32), (256, 256), (257, 512), (513, 768)])
def test_buckets_hold_their_batches(batch, size):
    assert bucket(batch) == size
