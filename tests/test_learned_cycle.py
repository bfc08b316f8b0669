"""A head trained by `fit` on a target that counts drafts perfectly in the engine, far beyond its training length.

SUCC continues every token t with t + 1, so a right loop ends in acceptance of every draft. A label that is off by one
between shards, trainer and engine would end in none: the drafts are then the neighbours of the right ones.
"""

from pathlib import Path

import pytest
import torch

from spectrain.heads.eagle3 import Eagle3Head
from spectrain.heads.folder import load_head
from spectrain.infer.engine import Engine, EngineConfig
from spectrain.infer.proposers.eagle3 import Eagle3Proposer
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.target import Target
from spectrain.tests.models import succ_llama
from spectrain.tests.shard_folders import make_document, write_shards
from spectrain.tests.train.runs import run

TRAINED_LENGTH, K = 20, 3


@pytest.fixture(scope="module")
def head_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cycle")
    model, layers = succ_llama(4), (1, 2, 3, 4)
    documents = [
        make_document(
            model,
            (torch.arange(TRAINED_LENGTH) + 5 * row) % 41,
            torch.arange(TRAINED_LENGTH) >= 2,
            row,
            layers,
        )
        for row in range(41)
    ]
    shards = write_shards(folder / "shards", model=model, documents=documents, layers=layers)
    changes = ("head.draft_vocab_size=null", "stopping.epochs=30", "optimizer.lr=1e-2", "stopping.eval_every=500")
    run(shards, folder / "head", *changes, "data.batch_size=4", "data.micro_batch_size=4", "stopping.save_every=500")
    return folder / "head"


def decode(head_folder: Path, length: int) -> Engine:
    target = Target.from_model(succ_llama(4))
    head = load_head(head_folder, dtype=torch.float32).head
    assert isinstance(head, Eagle3Head)
    proposer = Eagle3Proposer(head, target.tensors(), K)
    engine = Engine(target, proposer, EngineConfig(num_draft_tokens=K, num_blocks=200, block_size=4))
    prompts = [[start, (start + 1) % 41] for start in (0, 7, 23, 39)]
    outputs = engine.generate(prompts, SamplingParams(max_tokens=length, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == [(prompt[-1] + 1 + i) % 41 for i in range(length)]
    return engine


def test_every_draft_is_accepted_within_the_trained_length(head_folder):
    statistics = decode(head_folder, TRAINED_LENGTH - 2).statistics
    assert statistics.accepted_tokens == statistics.draft_tokens > 0


def test_four_times_the_trained_length_is_decoded_with_most_drafts_accepted(head_folder):
    """Angles this tiny head never saw cost it some drafts; misplaced positions would cost it nearly all."""
    statistics = decode(head_folder, 4 * TRAINED_LENGTH).statistics
    assert statistics.accepted_tokens > 0.7 * statistics.draft_tokens
