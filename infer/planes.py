"""Paged memory: blocks and block tables that know no tensors, and planes of tensors over one table.

A plane is one layer's cache: [num_blocks, block_size, heads, width]. Target layers, draft layers and the cache-only
layer are planes over the same block table: allocated, preempted and freed together. Block 0 is never handed out;
padding rows write there. Full blocks are shared between requests whose texts begin alike.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256

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


def target_plane(layer: int) -> str:
    """The name of the plane of a target's layer: the target's to write, a proposer's to read."""
    return f"target.{layer}"


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
    """Which tables hold which block, and which text a block's rows stand for: the prefix cache.

    A block is used (by one table or more), idle (by none, but its rows still answer a key) or free. Only full blocks
    whose rows are final get a key, and a table writes only behind its final rows: shared blocks are never written and
    need no copy-on-write.

    A key is SHA-256 over the key of the block before and the block's own tokens, so it names the whole text up to the
    block's end; with `next_token` also the token that follows, on which the last row of a draft plane may depend.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, prefix_cache: bool = False, next_token: bool = False
    ) -> None:
        if num_blocks < 2:
            raise ValueError(f"a cache needs at least 2 blocks (one is kept for padding), found {num_blocks}")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.prefix_cache, self.next_token = prefix_cache, next_token
        self._free = list(range(num_blocks - 1, 0, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._refs = [0] * num_blocks
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out: free and idle ones."""
        return len(self._free) + len(self._idle)

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
        if wanted > self.num_free:
            return False
        for _ in range(wanted):
            block_table.append(self._take())
        return True

    def grow_within(self, block_table: list[int], num_tokens: int) -> None:
        """Extends a table in place towards `num_tokens` slots as far as the free blocks go."""
        held = len(block_table) * self.block_size
        self.grow(block_table, min(num_tokens, held + self.num_free * self.block_size))

    def release(self, block_table: list[int]) -> None:
        """Gives up every block of a table and empties it; blocks with a key stay findable until they are needed."""
        # the end of a text goes first: without its beginning it could not be found
        for block in reversed(block_table):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if block in self._key_of:
                    self._idle[block] = None
                else:
                    self._free.append(block)
        block_table.clear()

    def extend_keys(self, keys: list[bytes], token_ids: Sequence[int]) -> None:
        """Appends the keys of the full blocks of `token_ids` that `keys` does not reach yet; a text only grows."""
        if not self.prefix_cache:
            return
        size = self.block_size
        span = size + self.next_token
        for start in range(len(keys) * size, len(token_ids) - span + 1, size):
            text = array("q", token_ids[start : start + span]).tobytes()
            keys.append(sha256((keys[-1] if keys else b"") + text).digest())

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks that hold the longest known beginning of a text; not taken yet."""
        blocks = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def fits(self, num_tokens: int, shared: Sequence[int]) -> bool:
        """Whether a table that starts with the blocks `shared` could grow to `num_tokens` slots."""
        used = sum(self._refs[block] > 0 for block in shared)
        return self.blocks_for(num_tokens) - used <= self.num_free

    def share(self, block_table: list[int], blocks: Sequence[int]) -> None:
        """Lets an empty table start with blocks that `find` just gave."""
        assert not block_table, "shared blocks stand at the beginning of a table"
        for block in blocks:
            self._idle.pop(block, None)
            self._refs[block] += 1
        block_table.extend(blocks)

    def register(self, block: int, key: bytes) -> None:
        """Makes a used block findable; its rows must be final in every plane. A second block of a key stays private."""
        assert self._refs[block] > 0 and block not in self._key_of, "only a used block without a key can be given one"
        if key not in self._block_of:
            self._block_of[key], self._key_of[block] = block, key

    def forget(self) -> None:
        """Empties the prefix cache; tables keep their blocks."""
        self._free.extend(reversed(self._idle))
        self._idle.clear()
        self._key_of.clear()
        self._block_of.clear()

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            del self._block_of[self._key_of.pop(block)]
        self._refs[block] = 1
        return block


def slots_of(block_table: Sequence[int], positions: Tensor, block_size: int) -> Tensor:
    """Slot ids int64 of positions int64 [num_tokens] under one block table."""
    table = torch.as_tensor(block_table, dtype=torch.int64)
    return table[positions // block_size] * block_size + positions % block_size
