"""Tiny models that know a few lines by heart, in their own tokens: `from spectrain.tests.reciters import reciter`."""

from functools import cache

import torch
from transformers import PreTrainedModel

from spectrain.tests.models import COMMON, build
from spectrain.tests.text_tokenizers import LINES, TOKENIZERS

POSITIONS = 160


@cache
def reciter(name: str, *, steps: int = 120) -> PreTrainedModel:
    """A Llama for a tokenizer of `TOKENIZERS` that goes on with any line from its first words."""
    tokenizer = TOKENIZERS[name]()
    ends = tokenizer.eos_token
    rows = [tokenizer(line + ends)["input_ids"] for line in LINES]
    width = max(map(len, rows))
    ids = torch.tensor([row + [tokenizer.eos_token_id] * (width - len(row)) for row in rows])
    labels = torch.tensor([row + [-100] * (width - len(row)) for row in rows])
    model = build(
        "Llama",
        std=0.05,
        **{
            **COMMON,
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "max_position_embeddings": POSITIONS,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
        },
    )
    model.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
    return model.eval().requires_grad_(False)
