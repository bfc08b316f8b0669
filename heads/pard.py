"""PARD (arXiv 2504.18583): a draft model that drafts all tokens in one forward, each mask token the next position's.

Network, folder and start are the draft model's. One row of the vocabulary that no text uses is the mask token, the same
for every position, and is trained with the rest.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .base import Elsewhere, TargetFacts, check_mask_token, chosen_mask_token
from .draft_model import DraftModel, DraftModelConfig
from .model_folder import ModelFolder


@dataclass(frozen=True, kw_only=True)
class PardConfig(DraftModelConfig):
    """A draft model's shape and the mask token; `mask_token_id` is None until `fit` has chosen one."""

    network = "spectrain.heads.pard:Pard"
    objective = "spectrain.train.objectives.pard:PardObjective"
    proposer = "spectrain.infer.proposers.pard:PardProposer"

    mask_token_id: int | None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_mask_token(self.mask_token_id, self.vocab_size)

    @classmethod
    def _values(cls, target: TargetFacts, settings: Mapping[str, Any], model: TargetFacts) -> dict[str, Any]:
        return {"mask_token_id": None, **super()._values(target, settings, model)}

    @classmethod
    def derive_from(cls, target: TargetFacts, settings: Mapping[str, Any], model: ModelFolder) -> "PardConfig":
        # a model that was a PARD draft before keeps its mask token
        known = {"mask_token_id": getattr(model.config, "pard_token", None)}
        given = {key: value for key, value in settings.items() if value is not None}
        return super().derive_from(target, {**known, **given}, model)

    def serving_config(self) -> dict[str, Any]:
        """A draft model's config; served with `{"method": "draft_model", "parallel_drafting": true, ...}`."""
        return {**super().serving_config(), "pard_token": self.mask_token_id}

    def elsewhere(self) -> Elsewhere:
        vllm = "method draft_model with parallel_drafting: true"
        return Elsewhere(vllm, "algorithm STANDALONE, one token a pass, not tried")


class Pard(DraftModel):
    """A draft model with a mask token."""

    config: PardConfig

    def __init__(self, config: PardConfig) -> None:
        super().__init__(config)
        self.mask_token_id = chosen_mask_token(config.mask_token_id)
