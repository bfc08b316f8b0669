"""transformers' own `generate` with its static cache: what an engine is measured beside."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .targets import Source
from .timing import synchronize


class Answer(NamedTuple):
    """Its texts, and its speed between the first and the last token."""

    texts: list[list[int]]
    tokens_per_second: float


class _Watch:
    """A stopping criterion of transformers that ends nothing and notes when the first token was there."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.first: float | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        if self.first is None:
            synchronize(self.device)
            self.first = time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class StaticCache:
    """A model of its own, not the one our engine has taken over."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self.model, self.device = model, device

    @classmethod
    def load(cls, source: Source) -> "StaticCache":
        model = source.build()
        model.generation_config.eos_token_id = None  # every text goes on, as in the engine
        return cls(model, source.device)

    def decode(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Answer:
        """Greedy continuations of prompts of one length; an untimed run comes first, in which it compiles."""
        self._generate(prompts, new_tokens)
        texts, first, last = self._generate(prompts, new_tokens)
        return Answer(texts, len(prompts) * (new_tokens - 1) / max(last - first, 1e-9))

    @torch.inference_mode()
    def _generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[list[list[int]], float, float]:
        ids = torch.tensor([list(prompt) for prompt in prompts], device=self.device)
        watch = _Watch(self.device)
        full = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            cache_implementation="static",
            stopping_criteria=[watch],
        )
        synchronize(self.device)
        last = time.perf_counter()
        assert watch.first is not None
        return full[:, ids.shape[1] :].tolist(), watch.first, last
