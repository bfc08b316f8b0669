"""Heads that `fit` trains for a random target, and what they draft here, for tests of other engines beside this one.

A head is trained on what its target says greedily, so that a part of its drafts is accepted: one token, layer or norm
off would change the counts.
"""

import copy
import json
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from spectrain.heads.folder import load_head
from spectrain.infer.config import EngineConfig
from spectrain.infer.engine import Engine
from spectrain.infer.proposers.none import NoneProposer
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.target import Target
from spectrain.tests.fresh import proposer_of
from spectrain.tests.models import rand_llama
from spectrain.tests.shard_folders import make_document, write_shards
from spectrain.tests.train.runs import run

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
    """A recipe's settings, and what the other engine is told beside the folder."""

    recipe: str
    settings: tuple[str, ...]
    speculative: dict[str, Any]
    needs_model: bool = False


class Texts(NamedTuple):
    """A target, what it says, and where each text ends."""

    model: PreTrainedModel
    folder: Path
    shards: Path
    prompts: list[list[int]]
    stops: list[int]

    def first(self, count: int) -> "Texts":
        """The same with fewer texts to decode."""
        return self._replace(prompts=self.prompts[:count], stops=self.stops[:count])


def make_texts(folder: Path) -> Texts:
    """A random target in `folder`, and shards of what it says."""
    model = rand_llama(
        4, hidden_size=128, intermediate_size=160, max_position_embeddings=128, eos_token_id=None, bos_token_id=None
    )
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


def trained(texts: Texts, case: Case, folder: Path) -> Path:
    """A case's head, as `fit` writes it into `folder`."""
    model = str(texts.folder) if case.needs_model else None
    run(texts.shards, folder / "head", *case.settings, base=COMMON, recipe=case.recipe, model=model)
    return folder / "head"


def drafted_here(texts: Texts, head: Path) -> dict[str, Any]:
    """Texts, and how much was drafted and accepted, by this engine."""
    target = Target.from_model(copy.deepcopy(texts.model))
    proposer = proposer_of(load_head(head, dtype=torch.float32).head, target, K)
    engine = Engine(target, proposer, EngineConfig(num_draft_tokens=K, num_blocks=400, block_size=4))
    params = [SamplingParams(max_tokens=LENGTH + 20, stop_token_ids=(stop,)) for stop in texts.stops]
    outputs = engine.generate(texts.prompts, params)
    counts = engine.statistics
    return {
        "texts": [o.token_ids for o in outputs],
        "drafts": counts.num_drafts,
        "draft_tokens": counts.draft_tokens,
        "accepted": list(counts.accepted_per_position),
    }


def decode_by(
    python: str, script: Path, texts: Texts, speculative: dict[str, Any], folder: Path
) -> subprocess.CompletedProcess[str]:
    """Runs `script` on the texts with the interpreter of an environment that has the other engine."""
    work = {
        "target": str(texts.folder),
        "speculative": speculative,
        "prompts": texts.prompts,
        "stops": texts.stops,
        "max_tokens": LENGTH + 20,
        "max_length": 128,
    }
    asked = folder / "work.json"
    asked.write_text(json.dumps(work))
    return subprocess.run([python, str(script), str(asked)], capture_output=True, text=True, timeout=600)


def drafted_there(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """As `drafted_here`, of what a script printed."""
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    assert line is not None, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(line.removeprefix("RESULT "))
