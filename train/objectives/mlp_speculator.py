"""The MLP speculator's loss (arXiv 2404.19124): the heads' cross-entropies, plainly summed, in both stages.

The stages differ in their shards alone: text of any origin first, then text the target sampled itself, where the loss
mask leaves the prompts out.
"""

from ...heads.mlp_speculator import MLPSpeculatorConfig
from .per_step import PerStepObjective, PerStepSettings


class MLPSpeculatorObjective(PerStepObjective):
    """Head i of row t is given h_t and x_{t+1}..x_{t+1+i}, and is trained on x_{t+2+i} or its law."""

    def __init__(self, config: MLPSpeculatorConfig, settings: PerStepSettings) -> None:
        super().__init__(config, settings)
