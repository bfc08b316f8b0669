"""Decoding on a GPU, for tests: `from spectrain.tests.infer.gpu_runs import decode`."""

import dataclasses

import torch

from spectrain.infer.config import EngineConfig
from spectrain.infer.engine import Engine
from spectrain.infer.proposers.base import Proposer
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.target import Target

CONFIG = EngineConfig(num_blocks=400, block_size=16, max_batch_tokens=256, max_batch_size=16)


def texts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 60, (count,), generator=generator).tolist()
    return [torch.randint(3, 97, (n,), generator=generator).tolist() for n in lengths]


def decode(
    target: Target, proposer: Proposer, k: int, temperature: float = 0.0, **changes
) -> tuple[list[list[int]], Engine]:
    """What 24 requests of unlike length emit with k draft tokens; every block is free again."""
    engine = Engine(target, proposer, dataclasses.replace(CONFIG, num_draft_tokens=k, **changes))
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=5 + 9 * (i % 5), stop_token_ids=(11, 42))
        for i in range(24)
    ]
    outputs = engine.generate(texts(24), params)
    assert engine.pool.num_free == engine.pool.num_blocks - 1
    return [o.token_ids for o in outputs], engine
