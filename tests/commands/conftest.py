"""A tiny target and a head for it, for the commands that measure them."""

from pathlib import Path

import pytest
import torch

from spectrain.heads.target_tensors import TargetTensors
from spectrain.infer.target import Target
from spectrain.tests.commands.evaluations import write_head
from spectrain.tests.commands.test_self_chat import tokenizer
from spectrain.tests.models import rand_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    rand_llama(4, max_position_embeddings=96).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tensors(model: Path) -> TargetTensors:
    return Target.load(model, dtype=torch.float32).tensors()


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory, tensors: TargetTensors) -> Path:
    return write_head(tmp_path_factory.mktemp("head") / "e3", tensors, {"serving": {"num_draft_tokens": 2}})
