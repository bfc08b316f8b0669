"""A packed scenario over paged planes, and each request alone as its oracle.

Five steps and four-token blocks: prompts cut in pieces; prompt, decode and verification rows in one batch; rejected
rows overwritten later; requests changing places; block tables in no order.
"""

import copy
import random
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from spectrain.infer.batch import PackedBatch
from spectrain.infer.parity import packed_batch
from spectrain.infer.planes import Planes
from spectrain.infer.recurrent import States
from spectrain.infer.target import Target
from spectrain.tests.models import lone_forward

BLOCK_SIZE = 4
NUM_BLOCKS = 40
NUM_DRAFT_TOKENS = 3
# Each step: (request, first position, number of rows, rows that are kept); those beyond are rejected drafts.
STEPS = (
    (("a", 0, 6, 6), ("b", 0, 9, 9)),
    (("a", 6, 7, 7), ("b", 9, 1, 1), ("c", 0, 4, 4)),
    (("c", 4, 2, 2), ("a", 13, 4, 2), ("b", 10, 1, 1), ("d", 0, 3, 3)),
    (("d", 3, 1, 1), ("b", 11, 4, 1), ("a", 15, 4, 4)),
    (("b", 12, 1, 1), ("a", 19, 1, 1), ("c", 6, 3, 3), ("d", 4, 5, 5)),
)


class Errors(NamedTuple):
    """Largest differences from the lone forwards."""

    logits: float
    states: float
    scale: float  # the largest lone logit


def run_scenario(model: PreTrainedModel, *, oracle: PreTrainedModel | None = None, capture: bool = True) -> Errors:
    """Runs the scenario through a Target over `model` and every request alone through `oracle` (a copy of it)."""
    oracle = copy.deepcopy(model) if oracle is None else oracle
    target = Target.from_model(model)
    if capture:
        target.capture(range(target.num_layers + 1))
    return compare(target, oracle)


def compare(target: Target, oracle: PreTrainedModel) -> Errors:
    """The scenario on a target that has captured all layers or none."""
    states = States(target.state_specs, 5, NUM_DRAFT_TOKENS, target.device)
    target.bind(Planes(target.plane_specs, NUM_BLOCKS, BLOCK_SIZE, target.device), states)
    rng = random.Random(0)
    blocks = list(range(1, NUM_BLOCKS))
    rng.shuffle(blocks)
    tables = {name: [blocks.pop() for _ in range(8)] for name in "abcd"}
    known: dict[str, list[int]] = {name: [] for name in "abcd"}
    logits_error = states_error = scale = 0.0
    for step in STEPS:
        pieces = [[rng.randrange(3, target.vocab_size) for _ in range(rows)] for _, _, rows, _ in step]
        starts = [start for _, start, _, _ in step]
        names = [name for name, *_ in step]
        batch = packed_batch(
            pieces,
            starts,
            [tables[name] for name in names],
            BLOCK_SIZE,
            target.device,
            state_rows=["abcd".index(name) for name in names],
        )
        output = target.forward(batch)
        for (name, start, _, kept), piece, where in zip(step, pieces, _rows(batch), strict=True):
            assert len(known[name]) == start, "the scenario skips a row"
            logits, states = lone_forward(oracle, known[name] + piece)
            logits_error = max(logits_error, _far(output.logits[where], logits[start:]))
            scale = max(scale, logits.abs().max().item())
            if output.states is not None:
                expected = torch.stack(states, dim=1)[start:]
                states_error = max(states_error, _far(output.states[where], expected))
            known[name] += piece[:kept]
    return Errors(logits_error, states_error, scale)


def _rows(batch: PackedBatch) -> list[slice]:
    ends = batch.cu_seqlens.tolist()
    return [slice(a, b) for a, b in zip(ends[:-1], ends[1:], strict=True)]


def _far(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return (a.float() - b.float()).abs().max().item()
