"""Engines sized for the work at hand, for the commands that decode."""

import sys
from collections.abc import Callable

import torch

from ..infer.config import EngineConfig
from ..infer.draft_policy import DraftPolicyName
from ..infer.engine import Engine
from ..infer.proposers.base import Proposer
from ..infer.target import Target
from ..kernels.records import VerifyMode

STEP_TOKENS = 2048

_said: set[str] = set()
"""Why engines run slower than they could; a command builds several, and says each reason once."""


def build_engine(
    target: Target,
    proposer: Proposer | Callable[[EngineConfig], Proposer],
    *,
    num_draft_tokens: int,
    batch_size: int,
    longest: int,
    num_blocks: int | None = None,
    eager: bool = False,
    verify_mode: VerifyMode = VerifyMode.STANDARD,
    acceptance_rates: tuple[float, ...] | None = None,
    draft_policy: DraftPolicyName = "fixed",
    fp64_gumbel: bool = False,
) -> Engine:
    """An engine whose cache holds a full batch of `longest` tokens each, as far as memory goes.

    A proposer that depends on the engine's sizes is given as what makes it from them.
    A target serves one engine at a time, the newest.
    """
    config = EngineConfig(
        num_draft_tokens=num_draft_tokens,
        num_blocks=num_blocks,
        max_batch_tokens=max(STEP_TOKENS, batch_size * (num_draft_tokens + 1)),
        max_batch_size=batch_size,
        max_length=max(longest, num_draft_tokens + 1),
        eager=eager,
        verify_mode=verify_mode,
        acceptance_rates=acceptance_rates,
        draft_policy=draft_policy,
        fp64_gumbel=fp64_gumbel,
    )
    if target.device.type == "cuda":
        torch.cuda.empty_cache()
    engine = Engine(target, proposer if isinstance(proposer, Proposer) else proposer(config), config)
    for reason in (engine.not_fused, engine.not_recorded):
        if reason is not None and reason not in _said:
            _said.add(reason)
            print(f"spectrain: warning: {target.name} runs slower than it could: {reason}", file=sys.stderr)
    return engine
