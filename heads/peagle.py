"""P-EAGLE (arXiv 2602.01469): an EAGLE-3 network that drafts all tokens in one pass, in the tensor names vLLM loads.

The rows of later tokens know no token and no state: they embed a mask token and are conditioned on a learned stand-in
for the aux states, `mask_hidden`. They differ by their position and by what they attend to.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .base import Elsewhere, No, TargetFacts, check_mask_token, chosen_mask_token
from .eagle3 import Eagle3Config, Eagle3Head
from .layers import nan_parameter
from .target_tensors import TargetTensors


@dataclass(frozen=True, kw_only=True)
class PEagleConfig(Eagle3Config):
    """An EAGLE-3 head's config, and the token that stands for an unknown one; None until `fit` has chosen it."""

    network = "spectrain.heads.peagle:PEagleHead"
    objective = "spectrain.train.objectives.peagle:PEagleObjective"
    proposer = "spectrain.infer.proposers.peagle:PEagleProposer"

    mask_token_id: int | None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_mask_token(self.mask_token_id, self.vocab_size)

    @classmethod
    def implied(cls, target: TargetFacts) -> dict[str, Any]:
        return {**super().implied(target), "mask_token_id": None}

    def elsewhere(self) -> Elsewhere:
        return Elsewhere("method eagle3 with parallel_drafting: true", No("it drafts one token a pass"))

    def serving_config(self) -> dict[str, Any]:
        """An EAGLE-3 config for `parallel_drafting: true`; without that option vLLM warns and drafts badly."""
        ids = {"pard_token": self.mask_token_id, "ptd_token_id": self.mask_token_id}
        return {**super().serving_config(), **ids}


class PEagleHead(Eagle3Head):
    """The EAGLE-3 network and its learned stand-in for unknown aux states."""

    config: PEagleConfig

    def __init__(self, config: PEagleConfig) -> None:
        super().__init__(config)
        self.mask_token_id = chosen_mask_token(config.mask_token_id)
        self.mask_hidden = nan_parameter(1, len(config.layer_ids) * config.target.hidden_size)

    def mask_state(self, target: TargetTensors) -> Tensor:
        """The state [hidden] of every row whose aux states are unknown."""
        return self.combine(self.mask_hidden.view(len(self.config.layer_ids), -1), target)

    def mask_embed(self, target: TargetTensors) -> Tensor:
        """The token embedding [hidden] of every such row."""
        return target.embed_tokens[self.mask_token_id]

    def initialise(self, target: TargetTensors, generator: torch.Generator) -> None:
        """As EAGLE-3; the stand-in is drawn from N(0, 0.02)."""
        super().initialise(target, generator)
        with torch.no_grad():
            self.mask_hidden.copy_(torch.randn(self.mask_hidden.shape, generator=generator) * 0.02)
