"""The sizes and modes of an engine."""

from dataclasses import dataclass
from typing import get_args

from ..kernels.records import VerifyMode
from .draft_policy import DraftPolicyName
from .request import EngineError
from .synthetic import check_survival


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes of an engine. `num_blocks` None takes what memory allows, up to what the batch could ever use."""

    num_draft_tokens: int = 0
    num_blocks: int | None = None
    block_size: int = 16
    max_batch_tokens: int = 2048
    max_batch_size: int = 64
    max_length: int | None = None  # None: the target's
    prefix_cache: bool = True  # requests share the blocks of a common beginning; not of targets with recurrent states
    memory_share: float = 0.8  # of what is free when the engine is built; used where num_blocks is None
    eager: bool = False  # no fused layers, no CUDA graphs, and no step is launched before the last one was read
    launch_ahead: bool | None = None  # launch a step before the last one was read; None: where graphs are used
    verify_mode: VerifyMode = VerifyMode.STANDARD
    acceptance_rates: tuple[float, ...] | None = None  # SYNTHETIC: share of steps that keep the first 1, 2, ... drafts
    draft_policy: DraftPolicyName = "fixed"  # adaptive: verify what pays, draft while it pays
    fp64_gumbel: bool = False  # the noise that draws a token in float64; that of drafts stays float32

    def __post_init__(self) -> None:
        for name in ("block_size", "max_batch_tokens", "max_batch_size"):
            if getattr(self, name) < 1:
                raise EngineError(f"{name} must be at least 1, found {getattr(self, name)}")
        if self.num_draft_tokens < 0:
            raise EngineError(f"num_draft_tokens must be 0 or more, found {self.num_draft_tokens}")
        for name, least in (("num_blocks", 2), ("max_length", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise EngineError(f"{name} must be None or at least {least}, found {value}")
        if not 0 < self.memory_share <= 1:
            raise EngineError(f"memory_share must be in (0, 1], found {self.memory_share}")
        if self.draft_policy not in get_args(DraftPolicyName):
            raise EngineError(
                f"draft_policy must be one of {', '.join(get_args(DraftPolicyName))}, found {self.draft_policy!r}"
            )
        if not isinstance(self.verify_mode, VerifyMode):
            raise EngineError(f"verify_mode must be a VerifyMode, found {self.verify_mode!r}")
        if (self.acceptance_rates is not None) != (self.verify_mode is VerifyMode.SYNTHETIC):
            given = "none were given" if self.acceptance_rates is None else f"the mode is {self.verify_mode.value}"
            raise EngineError(f"synthetic verification, and no other, takes acceptance rates; found {given}")
        if self.acceptance_rates is not None:
            try:
                check_survival(self.acceptance_rates, self.num_draft_tokens)
            except ValueError as error:
                raise EngineError(str(error)) from error
