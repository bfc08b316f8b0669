"""The real loop on a tiny target: `from spectrain.tests.loop import extract_and_fit`."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from spectrain.commands.extract import extract
from spectrain.commands.fit import fit
from spectrain.tests.chats import PLAIN, word_tokenizer

RECIPES = {
    "medusa": ("head.num_heads=4", "optimizer.warmup_steps=2"),
    "mlp_speculator": ("head.num_heads=4", "optimizer.warmup_steps=2"),
    "dspark": ("head.num_layers=1", "head.block_size=4", "head.markov_rank=8"),
    "dflash": ("head.num_layers=2", "head.block_size=6"),
    "eagle": ("objective.noise=0.001",),
    "eagle3": ("head.draft_vocab_size=64", "objective.steps=3"),
    "draft_model": ("head.num_layers=2",),
    "pard": ("head.num_layers=2", "objective.steps=3"),
    "peagle": ("head.draft_vocab_size=64", "head.num_layers=2", "objective.steps=4"),
}
SETTINGS = (
    "optimizer.lr=3e-3",
    "data.sequence_length=64",
    "data.batch_size=4",
    "data.micro_batch_size=4",
    "stopping.epochs=2",
    "stopping.eval_every=50",
    "stopping.save_every=50",
)


def write_chats(path: Path, rows: int = 40, seed: int = 0) -> Path:
    """Random conversations in the letters of the word tokenizer."""
    generator = torch.Generator().manual_seed(seed)

    def text(longest: int) -> str:
        length = int(torch.randint(1, longest, (), generator=generator))
        return " ".join("abcdefghijklmnopqrstuvwxyz"[i] for i in torch.randint(26, (length,), generator=generator))

    with open(path, "w") as file:
        for _ in range(rows):
            messages = [{"role": "user", "content": text(9)}, {"role": "assistant", "content": text(20)}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def save_target(model: PreTrainedModel, folder: Path) -> Path:
    """The model beside the word tokenizer, as a folder the commands load."""
    model.save_pretrained(folder)
    word_tokenizer(PLAIN, end="<e>").save_pretrained(folder)
    return folder


def extract_and_fit(
    model: PreTrainedModel, folder: Path, *changes: str, recipe: str = "eagle3", settings: Sequence[str] = SETTINGS
) -> Path:
    """Runs `extract` and `fit` on random conversations in float32; returns the head folder."""
    target = save_target(model, folder / "target")
    extract(
        model=str(target),
        data=[write_chats(folder / "chats.jsonl")],
        out=folder / "shards",
        recipe=recipe,
        device="cpu",
        dtype="float32",
    )
    fit(
        recipe=recipe,
        shards=[folder / "shards"],
        out=folder / "head",
        overrides=[*settings, *RECIPES.get(recipe, ()), *changes],
        model=str(target) if recipe in ("draft_model", "pard") else None,
        device="cpu",
    )
    return folder / "head"
