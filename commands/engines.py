"""Engines sized for the work at hand, for the commands that decode."""

from collections.abc import Collection

import torch

from ..heads.folder import LoadedHead
from ..heads.resolve import resolve
from ..infer.draft_policy import DraftPolicyName
from ..infer.engine import Engine, EngineConfig
from ..infer.proposers.base import Proposer
from ..infer.proposers.drafting import DraftSampling
from ..infer.proposers.none import NoneProposer
from ..infer.proposers.synthetic import SyntheticProposer
from ..infer.target import Target
from ..kernels.records import VerifyMode

STEP_TOKENS = 2048


def build_engine(
    target: Target,
    proposer: Proposer,
    *,
    num_draft_tokens: int,
    batch_size: int,
    longest: int,
    num_blocks: int | None = None,
    eager: bool = False,
    verify_mode: VerifyMode = VerifyMode.STANDARD,
    acceptance_rates: tuple[float, ...] | None = None,
    draft_policy: DraftPolicyName = "fixed",
) -> Engine:
    """An engine whose cache holds a full batch of `longest` tokens each, as far as memory goes.

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
    )
    if target.device.type == "cuda":
        torch.cuda.empty_cache()
    return Engine(target, proposer, config)


def build_proposer(
    target: Target,
    loaded: LoadedHead | None,
    num_draft_tokens: int,
    draft_sampling: DraftSampling = "greedy",
    allowed_packages: Collection[str] = (),
) -> Proposer:
    """What drafts `num_draft_tokens` a step: nothing for 0, a head's own proposer, free drafts without a head."""
    if not num_draft_tokens:
        return NoneProposer()
    if loaded is None:
        return SyntheticProposer(num_draft_tokens, target.vocab_size)
    proposer = resolve(loaded.head.config.proposer, allowed_packages)
    return proposer(loaded.head, target.tensors(), num_draft_tokens, draft_sampling)
