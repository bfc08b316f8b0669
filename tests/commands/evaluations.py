"""`spectrain eval` as tests run it, and a head to run it on: `from spectrain.tests.commands.evaluations import run`."""

from pathlib import Path

import pytest
import torch

from spectrain import cli
from spectrain.heads.base import TargetFacts
from spectrain.heads.eagle3 import Eagle3Config, Eagle3Head
from spectrain.heads.folder import save_head
from spectrain.heads.target_tensors import TargetTensors
from spectrain.tests.models import rand_llama


def write_head(folder: Path, tensors: TargetTensors, record: dict | None = None, **changes) -> Path:
    facts = TargetFacts.from_config(rand_llama(4, max_position_embeddings=96).config)
    config = Eagle3Config.derive(facts, {"draft_vocab_size": 97, **changes})
    head = Eagle3Head(config)
    head.initialise(tensors, torch.Generator().manual_seed(0))
    save_head(folder, head, record or {}, dtype=torch.float32)
    return folder


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as leaving:
        cli.main(["eval", "--device", "cpu", *map(str, arguments)])
    shown = capsys.readouterr()
    return int(leaving.value.code or 0), shown.out, shown.err


def one_line(code: int, error: str) -> str:
    assert code == 2, error
    lines = [line for line in error.splitlines() if line.startswith("spectrain: error:")]
    assert len(lines) == 1 and "Traceback" not in error
    return lines[0]
