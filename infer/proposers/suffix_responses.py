"""Cached responses on disk: the token sequences alone, from which the suffix tree is built again."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from .base import ProposerError

FORMAT = "spectrain suffix responses 1"


def save_responses(path: Path, responses: Sequence[Sequence[int] | np.ndarray], tokenizer: str) -> None:
    """Writes responses, oldest first; `tokenizer` says whose ids they are. An earlier file is replaced by a whole one.

    tokens int32 [total], cu_seqlens int64 [responses + 1].
    """
    lengths = [len(response) for response in responses]
    tokens = np.concatenate([np.zeros(0, np.int32), *(np.asarray(r, dtype=np.int32) for r in responses)])
    tensors = {"tokens": tokens, "cu_seqlens": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)}
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".tmp")
    try:
        save_file(tensors, unfinished, metadata={"format": FORMAT, "tokenizer": tokenizer})
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def load_responses(path: Path, tokenizer: str, vocab_size: int) -> list[np.ndarray]:
    """The responses of a file, [length] int32 each, oldest first.

    Raises ProposerError for another kind of file, another tokenizer's ids, or ids outside the vocabulary.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            facts, names = file.metadata() or {}, set(file.keys())
            if facts.get("format") != FORMAT or names != {"tokens", "cu_seqlens"}:
                raise ProposerError(f"{path} must be responses saved by spectrain, found {facts.get('format')!r}")
            tokens, bounds = file.get_tensor("tokens"), file.get_tensor("cu_seqlens")
    except (SafetensorError, OSError) as error:
        raise ProposerError(f"{path} must be responses saved by spectrain, found {error}; give another file") from error
    if facts.get("tokenizer") != tokenizer:
        raise ProposerError(
            f"{path} holds responses of another tokenizer ({facts.get('tokenizer', '')[:12]}) than this target's "
            f"({tokenizer[:12]}); give another file"
        )
    whole = bounds.ndim == tokens.ndim == 1 and len(bounds) and bounds[0] == 0 and bounds[-1] == len(tokens)
    if not whole or (np.diff(bounds) < 0).any() or ((tokens < 0) | (tokens >= vocab_size)).any():
        raise ProposerError(f"{path} is damaged: its sequences do not fit its {tokens.size} tokens; give another file")
    return [np.ascontiguousarray(tokens[a:b], dtype=np.int32) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
