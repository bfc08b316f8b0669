"""Medusa-1's loss (arXiv 2401.10774): the target is frozen, every head reads its last state, later heads count less."""

from dataclasses import dataclass

from ...heads.medusa import MedusaConfig
from .per_step import PerStepObjective, PerStepSettings


@dataclass(frozen=True, kw_only=True)
class MedusaSettings(PerStepSettings):
    """A recipe's `objective` section."""

    head_decay: float = 0.8


class MedusaObjective(PerStepObjective):
    """Head i of row t is trained on x_{t+2+i} or its law, never on x_{t+1}, which the target gives itself."""

    def __init__(self, config: MedusaConfig, settings: MedusaSettings) -> None:
        super().__init__(config, settings)
