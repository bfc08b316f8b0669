"""Heads without attention that give every draft step parameters of its own: Medusa, the MLP speculator.

Step k of row t turns the target's normed last state h_t, or what step k - 1 made of it, into the law of x_{t+2+k}. A
row knows nothing of other rows, so there is nothing to attend to and nothing to cache.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from .base import DraftHead, DraftOutput, HeadConfig, HeadError, TargetFacts, check_draft_vocab
from .target_tensors import TargetTensors


@dataclass(frozen=True, kw_only=True)
class PerStepConfig(HeadConfig):
    """What these heads have in common: they are conditioned on the final state alone."""

    requires_final_state = True

    num_heads: int  # draft steps, each with its own parameters

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layer_ids:
            raise HeadError(
                f"{type(self).__name__} is conditioned on the target's last state alone, found layers "
                f"{list(self.layer_ids)}; remove head.layer_ids"
            )
        if self.num_heads < 1:
            raise HeadError(f"head.num_heads must be 1 or more, found {self.num_heads}")

    @classmethod
    def derive(cls, target: TargetFacts, settings: Mapping[str, Any]) -> Self:
        wanted = {key: value for key, value in settings.items() if value is not None}
        implied = {"layer_ids": (), "vocab_size": target.vocab_size, "draft_vocab_size": target.vocab_size}
        values = implied | cls.defaults(target) | wanted
        values["layer_ids"] = tuple(values["layer_ids"])
        values["draft_vocab_size"] = min(values["draft_vocab_size"], target.vocab_size)
        return cls(target=target, **values)

    @classmethod
    @abstractmethod
    def defaults(cls, target: TargetFacts) -> dict[str, Any]:
        """A head's own fields where a recipe leaves them out."""

    @property
    def is_reduced(self) -> bool:
        """Whether the head drafts over a part of the target's vocabulary."""
        return self.draft_vocab_size < self.vocab_size


class PerStepHead(DraftHead):
    """A head whose `forward` and output matrix depend on the draft step."""

    config: PerStepConfig
    token_map: Tensor

    def __init__(self, config: PerStepConfig) -> None:
        super().__init__()
        self.config = config
        if config.is_reduced:
            # absolute target ids, unlike EAGLE's offsets; -1 marks a map nobody has set
            self.register_buffer("token_map", torch.full((config.draft_vocab_size,), -1, dtype=torch.int64))

    @abstractmethod
    def forward(self, states: Tensor, token_ids: Tensor, step: int) -> DraftOutput:
        """One draft step over rows of any leading shape.

        `states` [..., hidden]: the target's normed last state at step 0, the step before's feedback afterwards.
        `token_ids` [...] int64: the newest token, x_{t+1+step}.
        """

    @abstractmethod
    def output_weight(self, target: TargetTensors, step: int = 0) -> Tensor:
        """The matrix [draft_vocab, hidden] of one step."""

    def logits(self, logits_states: Tensor, target: TargetTensors, step: int = 0) -> Tensor:
        """Draft logits [..., draft_vocab] float32 of one step."""
        return self.project(logits_states, self.output_weight(target, step))

    def draft_to_target(self) -> Tensor | None:
        return self.token_map if self.config.is_reduced else None

    def assert_filled(self) -> None:
        """Raises HeadError also where `token_map` is no map."""
        super().assert_filled()
        if self.config.is_reduced:
            check_draft_vocab(self.token_map, self.config)

    def set_draft_vocab(self, token_ids: Tensor) -> None:
        """Stores the target ids [draft_vocab] int64 that can be drafted, ascending, as `token_map`."""
        check_draft_vocab(token_ids, self.config)
        self.token_map.copy_(token_ids)
