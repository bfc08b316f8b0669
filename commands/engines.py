"""Engines sized for the work at hand, for the commands that decode."""

import torch

from ..infer.engine import Engine, EngineConfig
from ..infer.proposers.base import Proposer
from ..infer.target import Target
from .devices import free_memory

BLOCK_SIZE = 16
MEMORY_SHARE = 0.8
STEP_TOKENS = 2048


def build_engine(
    target: Target,
    proposer: Proposer,
    *,
    num_draft_tokens: int,
    batch_size: int,
    longest: int,
    num_blocks: int | None = None,
) -> Engine:
    """An engine whose cache holds a full batch of `longest` tokens each, as far as memory goes.

    A target serves one engine at a time, the newest; the cache of the one before is given up first.
    """
    target.capture(proposer.requirements.layer_ids)
    longest = min(longest, target.max_length)
    if num_blocks is None:
        num_blocks = _num_blocks(target, proposer, longest, batch_size)
    config = EngineConfig(
        num_draft_tokens=num_draft_tokens,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_batch_tokens=max(STEP_TOKENS, batch_size * (num_draft_tokens + 1)),
        max_batch_size=batch_size,
    )
    if target.device.type == "cuda":
        torch.cuda.empty_cache()
    return Engine(target, proposer, config)


def _num_blocks(target: Target, proposer: Proposer, longest: int, batch_size: int) -> int:
    """Blocks for a full batch of the longest request, or what memory allows, never fewer than one request needs."""
    one = -(-(longest + proposer.requirements.lookahead + 1) // BLOCK_SIZE)
    per_block = BLOCK_SIZE * sum(spec.bytes_per_token for spec in (*target.plane_specs, *proposer.requirements.planes))
    affordable = int(MEMORY_SHARE * free_memory(target.device)) // per_block
    return max(one + 1, min(batch_size * one + 1, affordable))
