"""Targets to measure: a model from a folder, or one of a known shape with random weights, built on the device."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from ...infer.loading import load_model
from .record import BenchError

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": 503,
    },
    "1b": {
        "hidden_size": 2048,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 6144,
        "vocab_size": 151_936,
    },
    "8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12_288,
        "vocab_size": 151_936,
    },
}
LONGEST = 131_072


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where the target comes from: exactly one of a folder or hub id, and a shape."""

    model: str | None
    shape: str | None
    device: torch.device
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if (self.model is None) == (self.shape is None):
            found = "neither" if self.model is None else "both"
            raise BenchError(f"a target is given by --model or by --shape, found {found}; give one")
        if self.shape is not None and self.shape not in SHAPES:
            raise BenchError(f"--shape must be one of {', '.join(SHAPES)}, found {self.shape!r}")

    @property
    def name(self) -> str:
        return f"random Qwen3, {self.shape}" if self.shape else str(self.model).rstrip("/").split("/")[-1]

    def build(self) -> PreTrainedModel:
        """The model on its device; the same weights each time."""
        if self.model is not None:
            return load_model(self.model, self.device, self.dtype, None, False)
        assert self.shape is not None
        config = Qwen3Config(
            **SHAPES[self.shape],
            max_position_embeddings=LONGEST,
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(0)
            with torch.device(self.device):
                model: Any = AutoModelForCausalLM.from_config(config, dtype=self.dtype)
        return model.to(self.device).eval()


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights that a decoding step reads: all but the rows of an untied embedding it does not look up."""
    embedding: Any = model.get_input_embeddings().weight
    head: Any = model.get_output_embeddings()
    read = sum(parameter.nbytes for parameter in model.parameters())
    return read if head is not None and head.weight is embedding else read - embedding.nbytes


def random_prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    """The same random texts each time; text i does not depend on how many there are."""
    return [
        torch.randint(3, vocab_size, (length,), generator=torch.Generator().manual_seed(i)).tolist()
        for i in range(count)
    ]
