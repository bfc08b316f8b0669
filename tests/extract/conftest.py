"""The word-level tokenizer of the mask tests, its templates, and real conversations."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIALS = ["<pad>", "<s>", "</s>", "<unk>", "<u>", "<a>", "<e>"]
VOCABULARY = [*SPECIALS, *"abcdefghijklmnopqrstuvwxyz", "think"]

PLAIN = (
    "<s> {% for m in messages %}{% if m.role == 'assistant' %}<a> {{ m.content }} <e> {% else %}<u> {{ m.content }} "
    "<e> {% endif %}{% endfor %}{% if add_generation_prompt %}<a> {% endif %}"
)
MARKED = (
    "<s> {% for m in messages %}{% if m.role == 'assistant' %}<a> {% generation %}{{ m.content }} <e> "
    "{% endgeneration %}{% else %}<u> {{ m.content }} <e> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a> {% endif %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}\n<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def word_tokenizer(template: str | None, *, end: str = "</s>", pad: str = "<pad>") -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token=end, unk_token="<unk>", pad_token=pad
    )
    tokenizer.chat_template = template
    return tokenizer


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
