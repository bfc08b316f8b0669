"""Rows, plans and folder hashes of the extraction tests."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spectrain.extract.conversations import RowCounts
from spectrain.extract.extraction import ExtractionSettings
from spectrain.extract.plan import Plan, PlannedRow

LENGTHS = (3, 20, 5, 17, 4, 11, 8, 1, 16)


def rows_of(lengths: Sequence[int], vocab_size: int = 97, seed: int = 0) -> list[PlannedRow]:
    generator = np.random.default_rng(seed)
    rows = []
    for index, length in enumerate(lengths):
        mask = generator.random(length) < 0.6
        mask[-1] = True
        ids = generator.integers(0, vocab_size, length).astype(np.int32)
        rows.append(PlannedRow(10 + index, f"rows.jsonl:{index}", ids, mask))
    return rows


def plan_of(shards: Sequence[Sequence[PlannedRow]]) -> Plan:
    counts = RowCounts(kept=sum(map(len, shards)))
    return Plan(tuple(map(tuple, shards)), counts, False)


def settings(**changes: Any) -> ExtractionSettings:
    return ExtractionSettings(**{"layer_ids": (0, 2, 3), "batch_tokens": 24, "max_length": 63, **changes})


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
