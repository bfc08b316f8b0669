"""Paged memory: blocks and block tables that know no tensors, and planes of tensors over one table.

A plane is one layer's cache: [num_blocks, block_size, heads, width]. Target layers, draft layers and the cache-only
layer are planes over the same block table: allocated, preempted and freed together. Block 0 is never handed out;
padding rows write there.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PlaneSpec:
    """What one plane stores a token: `heads` rows of `width_k` (and of `width_v` unless 0)."""

    name: str
    heads: int
    width_k: int
    width_v: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return self.heads * (self.width_k + self.width_v) * self.dtype.itemsize


@dataclass(frozen=True)
class Plane:
    """The tensors of one plane; `v` is None for a cache-only layer."""

    k: Tensor  # [num_blocks, block_size, heads, width_k]
    v: Tensor | None  # [num_blocks, block_size, heads, width_v]


class Planes:
    """All planes of an engine, zeroed: an unwritten slot times probability zero must not be NaN."""

    def __init__(self, specs: Iterable[PlaneSpec], num_blocks: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self._planes: dict[str, Plane] = {}
        for spec in specs:
            if spec.name in self._planes:
                raise ValueError(f"plane names must be distinct, found {spec.name!r} twice")
            shape = (num_blocks, block_size, spec.heads)
            self._planes[spec.name] = Plane(
                k=torch.zeros(*shape, spec.width_k, dtype=spec.dtype, device=device),
                v=torch.zeros(*shape, spec.width_v, dtype=spec.dtype, device=device) if spec.width_v else None,
            )

    def __getitem__(self, name: str) -> Plane:
        return self._planes[name]


class BlockPool:
    """The free blocks; a block belongs to at most one request."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a cache needs at least 2 blocks (one is kept for padding), found {num_blocks}")
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free = list(range(num_blocks - 1, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def capacity(self) -> int:
        """Tokens one request alone could hold."""
        return (self.num_blocks - 1) * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` slots."""
        return -(-num_tokens // self.block_size)

    def grow(self, block_table: list[int], num_tokens: int) -> bool:
        """Extends a table in place to hold `num_tokens` slots; False, and nothing taken, if too few are free."""
        wanted = self.blocks_for(num_tokens) - len(block_table)
        if wanted > len(self._free):
            return False
        for _ in range(wanted):
            block_table.append(self._free.pop())
        return True

    def grow_within(self, block_table: list[int], num_tokens: int) -> None:
        """Extends a table in place towards `num_tokens` slots as far as the free blocks go."""
        held = len(block_table) * self.block_size
        self.grow(block_table, min(num_tokens, held + self.num_free * self.block_size))

    def release(self, block_table: list[int]) -> None:
        """Takes every block of a table back and empties it."""
        self._free.extend(reversed(block_table))
        block_table.clear()


def slots_of(block_table: Sequence[int], positions: Tensor, block_size: int) -> Tensor:
    """Slot ids int64 of positions int64 [num_tokens] under one block table."""
    table = torch.as_tensor(block_table, dtype=torch.int64)
    return table[positions // block_size] * block_size + positions % block_size
