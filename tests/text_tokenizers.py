"""Tiny tokenizers that cut text each in its own way: `from spectrain.tests.text_tokenizers import TOKENIZERS`.

Trained on a few lines, so that words are several tokens and characters beyond them are several bytes.
"""

import json
from collections.abc import Callable
from functools import cache

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

LINES = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "def add(first, second):\n    return first + second  # the sum of 12 and 345",
    "Größe, naïve café: 東京タワー is a tower; 🦊 and 🐕 are not.\n\nNext line",
    "she sells sea shells by the sea shore; the shells she sells are sea shells",
]
OTHER_LINES = [
    "Numbers like 1, 22 and 333 end; other things then start again and again.",
    "A tower of the town is another thing than that café, she thinks.",
    "while the sum is small:\n\tadd the next number, then the other one",
    "one\n  \ntwo\n  \nthree\n  \nfour",
]
MARKERS = ["<|im_start|>", "<|im_end|>"]
SPLIT = r"""[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""


def byte_level(lines: list[str], size: int, specials: list[str], *, split: str | None) -> Tokenizer:
    """Byte-level BPE, as GPT-2's, or with a pattern of words of its own, as Llama-3's and Qwen's."""
    made = Tokenizer(models.BPE())
    if split is None:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        made.normalizer = normalizers.NFC()
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(split), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        )
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(lines, trainer)
    return made


def gpt() -> PreTrainedTokenizerFast:
    """Byte-level with chat markers, nothing before a text."""
    made = byte_level(LINES, 330, ["<|end|>", *MARKERS], split=None)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|end|>")


def qwen() -> PreTrainedTokenizerFast:
    """Byte-level of other merges, words and markers; a token before every text."""
    made = byte_level(OTHER_LINES, 300, ["<|begin|>", "<|eot|>"], split=SPLIT)
    made.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", made.token_to_id("<|begin|>"))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<|begin|>", eos_token="<|eot|>")


def unigram() -> PreTrainedTokenizerFast:
    """Metaspace pieces of likelihoods, a space before every text, characters that it does not know."""
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = decoders.Metaspace()
    specials = ["<unk>", "<s>", "</s>"]
    made.train_from_iterator(
        [*LINES, *OTHER_LINES],
        trainers.UnigramTrainer(vocab_size=180, special_tokens=specials, unk_token="<unk>", show_progress=False),
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def llama() -> PreTrainedTokenizerFast:
    """Metaspace BPE of the old kind: no words, a space before every text, bytes for what it does not know."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    lines = [line for line in OTHER_LINES if "\n" not in line]
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trained.train_from_iterator(
        lines, trainers.BpeTrainer(vocab_size=400, special_tokens=specials, show_progress=False)
    )
    merges = _merges(trained)
    made = Tokenizer(
        models.BPE(vocab=trained.get_vocab(), merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    made.add_special_tokens(specials[:3])
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _merges(trained: Tokenizer) -> list[tuple[str, str]]:
    return [(first, second) for first, second in json.loads(trained.to_str())["model"]["merges"]]


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "gpt": cache(gpt),
    "qwen": cache(qwen),
    "unigram": cache(unigram),
    "llama": cache(llama),
}
"""gpt and qwen hold every byte, llama too; unigram does not know every character."""
