"""Shard folders made directly through transformers: `from spectrain.tests.shard_folders import write_shards`.

Independent of extraction: states come from `output_hidden_states`, the raw last state from a hook on the final norm.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from spectrain.extract.shards import (
    Document,
    Manifest,
    ShardWriter,
    TargetIdentity,
    write_manifest,
    write_token_counts,
)
from spectrain.heads.target_tensors import FinalNorm, TargetTensors
from spectrain.tests.models import rand_llama

LAYERS = (1, 2, 3, 4)


def raw_states(model: PreTrainedModel, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """All residual streams [tokens, L + 1, hidden], the last before the final norm, and logits [tokens, vocab]."""
    kept: list[Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0]))
    try:
        with torch.no_grad():
            output = model(token_ids[None].long(), output_hidden_states=True, use_cache=False)
    finally:
        hook.remove()
    return torch.stack([*(state[0] for state in output.hidden_states[:-1]), kept[0][0]], dim=1), output.logits[0]


def make_document(model: PreTrainedModel, token_ids: Tensor, mask: Tensor, row: int, layers: Sequence[int]) -> Document:
    states, logits = raw_states(model, token_ids)
    supervised_next = torch.cat([mask[1:], torch.zeros(1, dtype=torch.bool)])
    argmax = torch.where(supervised_next, logits.argmax(-1), -1)
    return Document(token_ids.int(), mask, argmax.int(), states[:, list(layers)], row)


def random_documents(
    model: PreTrainedModel,
    lengths: Sequence[int],
    *,
    prompt: int = 3,
    masked: Sequence[int] = (),
    layers: Sequence[int] = LAYERS,
    vocab: int = 97,
    seed: int = 0,
) -> list[Document]:
    """Documents of random ids; the first `prompt` tokens, and all of those in `masked`, are unsupervised."""
    generator = torch.Generator().manual_seed(seed)
    documents = []
    for row, length in enumerate(lengths):
        token_ids = torch.randint(3, vocab, (length,), generator=generator)
        mask = (torch.arange(length) >= prompt) & (row not in masked)
        documents.append(make_document(model, token_ids, mask, row, layers))
    return documents


def target_tensors(model: PreTrainedModel) -> TargetTensors:
    norm = FinalNorm("rms", model.model.norm.weight.detach().clone(), None, model.config.rms_norm_eps)
    return TargetTensors(
        model.model.embed_tokens.weight.detach().clone(), model.lm_head.weight.detach().clone(), None, norm
    )


def write_shards(
    folder: Path,
    lengths: Sequence[int] = (9, 17, 12, 25, 8, 14, 21, 11, 16, 10, 13, 19),
    *,
    model: PreTrainedModel | None = None,
    documents: Sequence[Document] | None = None,
    per_shard: int = 5,
    layers: Sequence[int] = LAYERS,
    changes: dict[str, Any] | None = None,
    **options: Any,
) -> Path:
    """Writes a whole folder, float32, and returns it; `changes` replaces fields of the manifest."""
    model = model if model is not None else rand_llama(4)
    if documents is None:
        documents = random_documents(model, lengths, layers=layers, **options)
    config = model.config
    writer = ShardWriter(folder, num_layer_ids=len(layers), hidden_size=config.hidden_size, dtype="float32")
    groups = [documents[start : start + per_shard] for start in range(0, len(documents), per_shard)]
    entries = tuple(writer.write(index, group) for index, group in enumerate(groups))
    counts = torch.zeros(config.vocab_size, dtype=torch.int64)
    for document in documents:
        counts += torch.bincount(document.token_ids[document.loss_mask].long(), minlength=config.vocab_size)
    write_token_counts(folder, counts)
    (folder / "target").mkdir(exist_ok=True)
    target_tensors(model).save(folder / "target" / "target.safetensors")
    config.save_pretrained(folder / "target")
    fields: dict[str, Any] = {
        "target": TargetIdentity(name="rand", revision="0", fingerprint="f0"),
        "tokenizer_hash": "t0",
        "template_hash": "c0",
        "on_policy": False,
        "layer_ids": tuple(layers),
        "hidden_size": config.hidden_size,
        "dtype": "float32",
        "num_layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "shards": entries,
    }
    write_manifest(folder, Manifest(**{**fields, **(changes or {})}))
    return folder
