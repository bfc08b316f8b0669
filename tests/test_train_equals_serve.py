"""What the trainer computes is what the engine serves, for every row and step, on the folder `fit` wrote.

Extraction, training and `Engine.step` run for real on a tiny target in float32. The engine's drafts are then steered:
the draft loop is fed the text's own tokens (as the trainer feeds it) while what is handed to verification is right,
wrong at some position, or wrong at once, and blocks are too few for the batch, so that rejected drafts and preemptions
lie in between. Every draft logit the engine produced must equal the trainer's at the same row and step.
"""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from spectrain.heads.decoder import DecoderHead
from spectrain.heads.folder import load_head
from spectrain.heads.peagle import PEagleConfig
from spectrain.infer.engine import Engine, EngineConfig
from spectrain.infer.proposers.base import Drafts, DraftStep
from spectrain.infer.proposers.eagle import EagleProposer
from spectrain.infer.proposers.eagle3 import Eagle3Proposer
from spectrain.infer.proposers.feature import FeatureProposer
from spectrain.infer.proposers.none import NoneProposer
from spectrain.infer.proposers.peagle import PEagleProposer
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.target import Target
from spectrain.tests.loop import extract_and_fit
from spectrain.tests.models import lone_forward, rand_llama
from spectrain.train.attention import UnrolledAttend
from spectrain.train.batch import TrainBatch
from spectrain.train.objectives.peagle import PEagleObjective, PEagleSettings
from spectrain.train.objectives.rollout import unroll

# the logits of this target lie within 40 of zero, where float32 resolves 4e-6
STEPS, TOLERANCE = 4, 2e-4


class Steered(FeatureProposer):
    """Feeds the draft loop known continuations, records its logits, and spoils what it hands over."""

    def __init__(self, head, target, texts: dict[int, list[int]], spoil: float) -> None:
        super().__init__(head, target, STEPS)
        self.texts, self.spoil = texts, spoil
        self.generator = torch.Generator().manual_seed(0)
        self.logits: dict[tuple[int, int, int], torch.Tensor] = {}  # (request, row, step)

    def _draw(self, logits: torch.Tensor, step: DraftStep, k: int):
        tokens = []
        for i, (request, length) in enumerate(zip(step.request_ids, step.seq_lens.tolist(), strict=True)):
            text = self.texts[request]
            if k < step.room[i]:  # beyond its room a request's row is padding
                self.logits[request, length - 2, k] = logits[i].clone()
            tokens.append(text[length + k] if length + k < len(text) else 0)
        return torch.tensor(tokens), logits

    def propose(self, step: DraftStep) -> Drafts:
        drafts = super().propose(step)
        wrong = torch.rand(drafts.token_ids.shape, generator=self.generator) < self.spoil
        spoiled = torch.where(wrong, (drafts.token_ids + 1) % self.head.config.vocab_size, drafts.token_ids)
        return drafts._replace(token_ids=spoiled)


class SteeredEagle(Steered, EagleProposer):
    pass


class SteeredEagle3(Steered, Eagle3Proposer):
    pass


class SteeredPEagle(Steered, PEagleProposer):
    pass


METHODS = {"eagle": SteeredEagle, "eagle3": SteeredEagle3, "peagle": SteeredPEagle}


class World(NamedTuple):
    """A target, greedy texts, and the head folder that was fitted to the target by one recipe."""

    target: Target
    prompts: list[list[int]]
    texts: list[list[int]]
    method: str
    head_folder: Path


@pytest.fixture(scope="module")
def decoded() -> tuple[Target, list[list[int]], list[list[int]]]:
    target = Target.from_model(rand_llama(max_position_embeddings=128))
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 97, (n,), generator=generator).tolist() for n in (1, 2, 9, 17, 30)]
    engine = Engine(target, NoneProposer(), EngineConfig(num_blocks=200, block_size=4))
    outputs = engine.generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True))
    return target, prompts, [p + o.token_ids for p, o in zip(prompts, outputs, strict=True)]


@pytest.fixture(scope="module", params=list(METHODS))
def world(request, decoded, tmp_path_factory) -> World:
    folder = tmp_path_factory.mktemp("loop")
    head_folder = extract_and_fit(rand_llama(max_position_embeddings=128), folder, recipe=request.param)
    return World(*decoded, request.param, head_folder)


def trainer_logits(model, head: DecoderHead, target: Target, text: list[int]) -> torch.Tensor:
    """[steps, row, draft_vocab]: the trainer's own forward over one document, states from transformers itself."""
    ids = torch.tensor([text])
    states = lone_forward(model, text)[1]
    tensors = target.tensors()
    batch = TrainBatch(
        token_ids=ids,
        positions=torch.arange(len(text))[None],
        document_ids=torch.zeros(1, len(text), dtype=torch.int32),
        loss_mask=torch.ones(1, len(text), dtype=torch.bool),
        target_argmax=torch.zeros(1, len(text), dtype=torch.int64),
        aux_states=torch.stack([states[i] for i in head.config.layer_ids], dim=1)[None],
        final_states=None,
        denominators=torch.ones(STEPS),
    )
    rows = tuple(torch.arange(len(text)) for _ in range(STEPS))
    with torch.no_grad():
        if isinstance(head.config, PEagleConfig):
            objective = PEagleObjective(head.config, PEagleSettings(steps=STEPS))
            found = objective.unroll(head, tensors, batch, rows)
        else:
            attend = UnrolledAttend(batch.document_ids, "dense")
            found = unroll(head, tensors, batch, head.combine(batch.aux_states, tensors), attend, rows)
        return head.logits(found, tensors).unflatten(0, (STEPS, len(text)))


@pytest.mark.parametrize(("spoil", "num_blocks"), [(0.0, 200), (0.3, 24), (1.0, 200)])
def test_every_draft_logit_of_the_engine_is_the_trainers(world, spoil, num_blocks):
    target, prompts, texts, method, head_folder = world
    head = load_head(head_folder, dtype=torch.float32).head
    assert isinstance(head, DecoderHead)
    proposer = METHODS[method](head, target.tensors(), dict(enumerate(texts)), spoil)
    config = EngineConfig(num_draft_tokens=STEPS, num_blocks=num_blocks, block_size=4, max_batch_tokens=13)
    engine = Engine(target, proposer, config)
    outputs = engine.generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True))
    assert [o.prompt_token_ids + o.token_ids for o in outputs] == texts
    statistics = engine.statistics
    if spoil:
        assert statistics.accepted_tokens < statistics.draft_tokens
    if num_blocks == 24:
        assert statistics.num_preemptions > 0
    model = rand_llama(max_position_embeddings=128)
    compared = 0
    for request, text in enumerate(texts):
        expected = trainer_logits(model, head, target, text)
        for (owner, row, step), logits in proposer.logits.items():
            if owner == request:
                torch.testing.assert_close(logits, expected[step, row], atol=TOLERANCE, rtol=1e-4)
                compared += 1
    if spoil == 1.0 and num_blocks == 200:
        # nothing was ever accepted and blocks never ran short, so drafting started from every row of every output
        assert compared >= sum(STEPS * (40 - STEPS - 1) for _ in texts)
    assert compared > 100


def test_a_head_off_by_one_row_would_be_seen(world):
    target, _, texts, _, head_folder = world
    head = load_head(head_folder, dtype=torch.float32).head
    assert isinstance(head, DecoderHead)
    logits = trainer_logits(rand_llama(max_position_embeddings=128), head, target, texts[0])
    for step, rows in enumerate(logits):
        known = rows[: len(texts[0]) - 1 - step]  # rows whose token exists
        assert known.diff(dim=0).abs().amax(-1).min() > 50 * TOLERANCE
