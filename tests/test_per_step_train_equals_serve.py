"""Medusa and the MLP speculator: what the trainer computes is what the engine serves, on the folder `fit` wrote.

As for EAGLE-3: the draft loop is fed the text's own tokens while what is handed to verification is spoiled, and blocks
are too few for the batch, so that rejected drafts and preemptions lie in between.
"""

from pathlib import Path

import pytest
import torch

from spectrain.heads.folder import load_head
from spectrain.heads.per_step import PerStepHead
from spectrain.heads.resolve import resolve
from spectrain.infer.engine import Engine, EngineConfig
from spectrain.infer.proposers.none import NoneProposer
from spectrain.infer.proposers.per_step import PerStepProposer
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.target import Target
from spectrain.tests.loop import extract_and_fit
from spectrain.tests.models import rand_llama, succ_llama
from spectrain.tests.shard_folders import make_document, write_shards
from spectrain.tests.train.per_step import make_objective
from spectrain.tests.train.runs import run
from spectrain.train.batch import TrainBatch

HEADS, TOLERANCE = 3, 2e-4
SHORT = (
    "optimizer.lr=3e-3",
    "optimizer.warmup_steps=2",
    "data.sequence_length=64",
    "data.batch_size=4",
    "data.micro_batch_size=4",
    "data.validation_share=0.2",
    "stopping.epochs=2",
    "stopping.eval_every=50",
    "stopping.save_every=50",
    f"head.num_heads={HEADS}",
)
RECIPES = {
    "medusa": ("medusa", ()),
    "medusa, shared and reduced": ("medusa", ("head.lm_head=shared", "head.draft_vocab_size=64")),
    "mlp": ("mlp_speculator", ()),
    "mlp, tied and scaled": ("mlp_speculator", ("head.tie_weights=true", "head.scale_input=true", "objective.loss=kl")),
}


class Steered:
    """Wraps a proposer: feeds its loop known continuations, records its logits, and spoils what it hands over."""

    def __init__(self, proposer: PerStepProposer, texts: list[list[int]], spoil: float) -> None:
        self.texts, self.spoil = texts, spoil
        self.generator = torch.Generator().manual_seed(0)
        self.logits: dict[tuple[int, int, int], torch.Tensor] = {}  # (request, row, step)
        self.inner = proposer.propose
        proposer._draw, proposer.propose = self.draw, self.propose

    def draw(self, logits, step, k):
        tokens = []
        for i, (request, length) in enumerate(zip(step.request_ids, step.seq_lens.tolist(), strict=True)):
            if k < step.room[i]:  # beyond its room a request's row is padding
                self.logits[request, length - 2, k] = logits[i].clone()
            text = self.texts[request]
            tokens.append(text[length + k] if length + k < len(text) else 0)
        return torch.tensor(tokens), logits

    def propose(self, step):
        drafts = self.inner(step)
        wrong = torch.rand(drafts.token_ids.shape, generator=self.generator) < self.spoil
        return drafts._replace(token_ids=torch.where(wrong, (drafts.token_ids + 1) % 97, drafts.token_ids))


@pytest.fixture(scope="module")
def world():
    """A target, a fresh copy of it, and greedy texts."""
    target = Target.from_model(rand_llama(max_position_embeddings=128))
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 97, (n,), generator=generator).tolist() for n in (1, 2, 9, 17, 30)]
    engine = Engine(target, NoneProposer(), EngineConfig(num_blocks=200, block_size=4))
    outputs = engine.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True))
    return target, prompts, [p + o.token_ids for p, o in zip(prompts, outputs, strict=True)]


@pytest.fixture(scope="module", params=RECIPES)
def head(request, tmp_path_factory) -> PerStepHead:
    recipe, changes = RECIPES[request.param]
    folder = tmp_path_factory.mktemp("loop")
    model = rand_llama(max_position_embeddings=128)
    written = extract_and_fit(model, folder, *changes, recipe=recipe, settings=SHORT)
    loaded = load_head(Path(written), dtype=torch.float32).head
    assert isinstance(loaded, PerStepHead)
    return loaded


def trainer_logits(head: PerStepHead, target: Target, text: list[int]) -> torch.Tensor:
    """[steps, row, draft_vocab]: the objective's own unrolling of one document, states from transformers itself."""
    ids, raw = torch.tensor([text]), []
    model = rand_llama(max_position_embeddings=128)
    model.get_decoder().layers[-1].register_forward_hook(
        lambda _m, _a, output: raw.append(output if isinstance(output, torch.Tensor) else output[0])
    )
    model(input_ids=ids, use_cache=False)
    batch = TrainBatch(
        token_ids=ids,
        positions=torch.arange(len(text))[None],
        document_ids=torch.zeros(1, len(text), dtype=torch.int32),
        loss_mask=torch.ones(1, len(text), dtype=torch.bool),
        target_argmax=torch.zeros(1, len(text), dtype=torch.int64),
        aux_states=torch.zeros(1, len(text), 0, 32),
        final_states=raw[0],
        denominators=torch.ones(HEADS),
    )
    with torch.no_grad():
        states = make_objective(head.config).unroll(head, target.tensors(), batch, torch.arange(len(text)))
        return torch.stack([head.logits(x, target.tensors(), k) for k, x in enumerate(states)])


@pytest.mark.parametrize(("spoil", "num_blocks"), [(0.0, 200), (0.3, 20), (1.0, 200)])
def test_every_draft_logit_of_the_engine_is_the_trainers(world, head, spoil: float, num_blocks: int):
    target, prompts, texts = world
    proposer = resolve(head.config.proposer)(head, target.tensors(), HEADS)
    steered = Steered(proposer, texts, spoil)
    config = EngineConfig(num_draft_tokens=HEADS, num_blocks=num_blocks, block_size=4, max_batch_tokens=13)
    engine = Engine(target, proposer, config)
    outputs = engine.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True))
    assert [o.prompt_token_ids + o.token_ids for o in outputs] == texts
    assert (engine.statistics.accepted_tokens < engine.statistics.draft_tokens) == (spoil > 0)
    assert (engine.statistics.num_preemptions > 0) == (num_blocks == 20)
    expected = [trainer_logits(head, target, text) for text in texts]
    for (request, row, step), logits in steered.logits.items():
        torch.testing.assert_close(logits, expected[request][step, row], atol=TOLERANCE, rtol=1e-4)
    least = 5 * HEADS * (24 - HEADS - 1) if spoil == 1.0 else 60
    assert len(steered.logits) >= least
    apart = (expected[0][:, 1:] - expected[0][:, :-1]).abs().amax(-1).min()
    assert apart > 100 * TOLERANCE, "a head off by one row would not be seen"


@pytest.mark.parametrize("recipe", ["medusa", "mlp_speculator"])
def test_a_head_fitted_to_a_target_that_counts_drafts_every_token_in_the_engine(recipe: str, tmp_path: Path):
    """Head i's token on token t is t + 2 + i; an offset written in two ways anywhere would accept nothing."""
    model, layers = succ_llama(), (2,)
    documents = [
        make_document(model, (torch.arange(12) + 5 * row) % 41, torch.arange(12) >= 2, row, layers) for row in range(41)
    ]
    shards = write_shards(tmp_path / "shards", model=model, documents=documents, layers=layers)
    changes = ("stopping.epochs=12", "optimizer.lr=1e-2", "stopping.eval_every=500")
    run(shards, tmp_path / "head", *changes, base=SHORT, recipe=recipe)
    target = Target.from_model(succ_llama())
    head = load_head(tmp_path / "head", dtype=torch.float32).head
    proposer = resolve(head.config.proposer)(head, target.tensors(), HEADS)
    engine = Engine(target, proposer, EngineConfig(num_draft_tokens=HEADS, num_blocks=200, block_size=4))
    prompts = [[start, (start + 1) % 41] for start in (0, 7, 23, 39)]
    outputs = engine.generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == [(prompt[-1] + 1 + i) % 41 for i in range(40)]
    assert engine.statistics.accepted_tokens == engine.statistics.draft_tokens > 0
