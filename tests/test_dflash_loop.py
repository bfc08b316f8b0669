"""The whole loop of block heads: extract, fit, load, serve. Trainer and engine agree; a cycle is drafted to its end."""

import json
from pathlib import Path

import pytest
import torch

from spectrain.heads.dflash import DFlashHead
from spectrain.heads.dspark import DSparkHead
from spectrain.heads.folder import load_head
from spectrain.infer.engine import Engine, EngineConfig
from spectrain.infer.proposers.base import DraftStep
from spectrain.infer.proposers.dflash import DFlashProposer
from spectrain.infer.proposers.dspark import DSparkProposer
from spectrain.infer.proposers.none import NoneProposer
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.target import Target
from spectrain.tests.loop import extract_and_fit
from spectrain.tests.models import rand_llama, succ_llama
from spectrain.tests.shard_folders import make_document, write_shards
from spectrain.tests.train.runs import run
from spectrain.train.batch import TrainBatch
from spectrain.train.objectives.dflash import DFlashObjective, DFlashSettings

VARIANTS = {
    "as published": (),
    "every flag": ("head.sample_from_anchor=true", "head.causal=true", "head.sliding_window=7"),
}


class Recording(DFlashProposer):
    """Keeps draft logits by (request, known tokens)."""

    def _draw(self, logits: torch.Tensor, step: DraftStep) -> tuple[torch.Tensor, torch.Tensor]:
        self.logits = getattr(self, "logits", {})
        for i, (request, length) in enumerate(zip(step.request_ids, step.seq_lens.tolist(), strict=True)):
            if step.room[i]:
                self.logits[request, length] = logits[i].clone()
        return super()._draw(logits, step)


def trainer_logits(head: DFlashHead, target: Target, text: list[int]) -> torch.Tensor:
    """[rows, drafts, vocab] of the objective's own forward over one document, states from transformers itself."""
    ids = torch.tensor([text])
    with torch.no_grad():
        hidden = rand_llama(max_position_embeddings=128)(input_ids=ids, output_hidden_states=True).hidden_states
    batch = TrainBatch(
        token_ids=ids,
        positions=torch.arange(len(text))[None],
        document_ids=torch.zeros(1, len(text), dtype=torch.int32),
        loss_mask=torch.ones(1, len(text), dtype=torch.bool),
        target_argmax=torch.zeros(1, len(text), dtype=torch.int64),
        aux_states=torch.stack([hidden[i] for i in head.config.layer_ids], dim=2),
        final_states=None,
        denominators=torch.ones(1),
    )
    objective = DFlashObjective(head.config, DFlashSettings())
    with torch.no_grad():
        states = objective.draft(head, target.tensors(), batch, torch.arange(len(text) - 1))
        return head.logits(states[:, head.config.first_draft_slot :], target.tensors())


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_draft_logit_of_the_engine_is_the_trainers(variant: str, tmp_path: Path) -> None:
    model = rand_llama(max_position_embeddings=128)
    folder = extract_and_fit(model, tmp_path, *VARIANTS[variant], recipe="dflash")
    head = load_head(folder, dtype=torch.float32).head
    assert isinstance(head, DFlashHead)
    # the tokenizer ends before the target's 97 rows do, and the first row beyond it stands for unknown tokens
    assert head.mask_token_id == json.loads((folder / "config.json").read_text())["dflash_config"]["mask_token_id"]
    assert 26 < head.mask_token_id < 97
    target, k = Target.from_model(model), head.config.num_drafts
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 97, (n,), generator=generator).tolist() for n in (1, 9, 17, 30)]
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    plain = Engine(target, NoneProposer(), EngineConfig(num_blocks=200, block_size=4)).generate(prompts, params)
    for changes in ({"num_blocks": 200}, {"num_blocks": 26, "max_batch_tokens": 13}):
        proposer = Recording(head, target.tensors(), k)
        engine = Engine(target, proposer, EngineConfig(num_draft_tokens=k, block_size=4, **changes))
        outputs = engine.generate(prompts, params)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
        assert engine.statistics.accepted_tokens < engine.statistics.draft_tokens
        assert (engine.statistics.num_preemptions > 0) == (changes["num_blocks"] == 26)
        assert len(proposer.logits) > 60
        for request, output in enumerate(outputs):
            expected = trainer_logits(head, target, output.prompt_token_ids + output.token_ids)
            for (owner, length), logits in proposer.logits.items():
                if owner == request:
                    # known tokens 0..length-1: the anchor is the last of them, the row before it the block's
                    torch.testing.assert_close(logits, expected[length - 2], atol=2e-4, rtol=1e-4)
    assert (expected[1:] - expected[:-1]).abs().amax((-1, -2)).min() > 100 * 2e-4


def test_dspark_trains_and_serves(tmp_path: Path) -> None:
    model = rand_llama(max_position_embeddings=128)
    folder = extract_and_fit(model, tmp_path, recipe="dspark")
    head, target = load_head(folder, dtype=torch.float32).head, Target.from_model(model)
    assert isinstance(head, DSparkHead)
    assert head.markov_head.markov_w2.weight.any()  # zero where training began
    prompts = [[5, 9, 20], [7], [30, 31, 32, 33, 34, 35, 36]]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    plain = Engine(target, NoneProposer(), EngineConfig(num_blocks=60, block_size=4)).generate(prompts, params)
    proposer = DSparkProposer(head, target.tensors(), 4)
    engine = Engine(target, proposer, EngineConfig(num_draft_tokens=4, num_blocks=60, block_size=4))
    assert [o.token_ids for o in engine.generate(prompts, params)] == [o.token_ids for o in plain]


@pytest.fixture(scope="module")
def cycle_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, model, layers = tmp_path_factory.mktemp("cycle"), succ_llama(4, vocab_size=43), (1, 2, 3, 4)
    documents = [
        make_document(model, (torch.arange(20) + 5 * row) % 43, torch.arange(20) >= 2, row, layers) for row in range(43)
    ]
    shards = write_shards(folder / "shards", model=model, documents=documents, layers=layers)
    settings = (
        "head.layer_ids=[1,2,3]",
        "head.num_layers=1",
        "head.block_size=4",
        "head.sliding_window=6",
        "head.mask_token_id=42",
        "optimizer.lr=1e-2",
        "data.sequence_length=32",
        "data.batch_size=4",
        "data.micro_batch_size=4",
        "stopping.epochs=12",
        "stopping.eval_every=500",
        "stopping.save_every=500",
    )
    run(shards, folder / "head", base=settings, recipe="dflash")
    return folder / "head"


@pytest.mark.parametrize("length", [16, 80])
def test_a_cycle_is_drafted_to_its_end_within_the_trained_length_and_beyond(cycle_head: Path, length: int) -> None:
    """A window shows the head the same picture at every length, so not one draft may be lost."""
    target = Target.from_model(succ_llama(4, vocab_size=43))
    head = load_head(cycle_head, dtype=torch.float32).head
    assert isinstance(head, DFlashHead) and head.mask_token_id == 42  # what the recipe says wins
    engine = Engine(target, DFlashProposer(head, target.tensors(), 3), EngineConfig(num_draft_tokens=3, num_blocks=200))
    prompts = [[start, (start + 1) % 43] for start in (0, 7, 23, 39)]
    outputs = engine.generate(prompts, SamplingParams(max_tokens=length, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == [(prompt[-1] + 1 + i) % 43 for i in range(length)]
    assert engine.statistics.accepted_tokens == engine.statistics.draft_tokens > 0
