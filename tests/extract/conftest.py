"""Tokenizers, templates and real conversations of the extraction tests."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from spectrain.tests.chats import CHATML, MARKED, PLAIN, word_tokenizer


@pytest.fixture
def word_level() -> Callable[..., PreTrainedTokenizerFast]:
    return word_tokenizer


@pytest.fixture(scope="session")
def chatml() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of 512 ids with the ChatML template."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the user asks and the assistant answers: how, what, where, that this."] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", bos_token="<|im_start|>")
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture
def plain_template() -> str:
    return PLAIN


@pytest.fixture
def marked_template() -> str:
    return MARKED


@pytest.fixture(scope="session")
def real_data() -> Path:
    default = Path(__file__).resolve().parents[2].parent / "shared" / "data"
    folder = Path(os.environ.get("SPECTRAIN_TEST_DATA", default))
    if not folder.is_dir():
        pytest.skip(f"no test data at {folder}")
    return folder
