"""What must hold of blocks at any moment: `from spectrain.tests.infer.block_invariants import WatchedEngine`."""

from collections import Counter
from collections.abc import Sequence

import torch

from spectrain.infer.config import EngineConfig
from spectrain.infer.engine import Engine
from spectrain.infer.planes import BlockPool, Planes
from spectrain.infer.proposers.base import Proposer
from spectrain.infer.request import Request, RequestOutput
from spectrain.infer.scheduler import ScheduledRequest
from spectrain.infer.target import Target


def check_pool(pool: BlockPool, tables: Sequence[Sequence[int]]) -> None:
    """Every block is free, idle or used, and its reference count is the number of tables that hold it."""
    holders = Counter(block for table in tables for block in table)
    assert all(len(set(table)) == len(table) for table in tables), "a table holds a block twice"
    assert pool._refs == [holders[block] for block in range(pool.num_blocks)], "references are miscounted"
    free, idle, used = set(pool._free), set(pool._idle), set(holders)
    assert len(free) == len(pool._free), "a block is free twice"
    assert sorted([*free, *idle, *used]) == list(range(1, pool.num_blocks)), "the three kinds do not part the pool"
    assert pool._block_of == {key: block for block, key in pool._key_of.items()}
    assert idle <= pool._key_of.keys(), "an idle block cannot be found"
    assert not free & pool._key_of.keys(), "a free block can be found"
    assert all(count == 1 or block in pool._key_of for block, count in holders.items()), "a shared block has no key"
    assert pool.num_free == len(free) + len(idle)


def check_writes(pool: BlockPool, scheduled: Sequence[ScheduledRequest]) -> None:
    """No row of the step lies in a block that another table holds or that can be found."""
    for rows in scheduled:
        first, last = rows.start // pool.block_size, (rows.start + rows.num_tokens - 1) // pool.block_size
        for block in rows.request.block_table[first : last + 1]:
            assert pool._refs[block] == 1 and block not in pool._key_of, "a shared block is written"


def all_requests(engine: Engine) -> list[Request]:
    return [*engine.scheduler.running, *engine.scheduler.waiting]


class WatchedEngine(Engine):
    """Checks after every step and cancellation: the pool, the rows about to be written, and that the rows of a block
    that can be found have not changed by a bit since it first could, or by no more than `rounding`.
    """

    rounding = 0.0

    def __init__(self, target: Target, proposer: Proposer, config: EngineConfig) -> None:
        bind = proposer.bind
        self.planes: Planes

        def keep(planes: Planes, num_rows: int) -> None:
            self.planes = planes
            bind(planes, num_rows)

        proposer.bind = keep
        super().__init__(target, proposer, config)
        tensors = [t for plane in self.planes._planes.values() for t in (plane.k, plane.v) if t is not None]
        self.pairs = [(tensor, tensor.clone()) for tensor in tensors]
        self.known: dict[int, bytes] = {}
        self.most_shared = 0
        schedule = self.scheduler.schedule

        def checked():
            scheduled, preempted = schedule()
            check_writes(self.pool, scheduled)
            return scheduled, preempted

        self.scheduler.schedule = checked

    def step(self) -> list[RequestOutput]:
        outputs = super().step()
        self.check()
        return outputs

    def cancel(self, request_id: int) -> RequestOutput | None:
        output = super().cancel(request_id)
        self.check()
        return output

    def check(self) -> None:
        check_pool(self.pool, [request.block_table for request in all_requests(self)])
        self.most_shared = max(self.most_shared, *self.pool._refs)
        keys = self.pool._key_of
        same = [block for block, key in self.known.items() if keys.get(block) == key]
        fresh = [block for block, key in keys.items() if self.known.get(block) != key]
        old, new = torch.tensor(same, dtype=torch.int64), torch.tensor(fresh, dtype=torch.int64)
        for tensor, kept in self.pairs:
            same_rows = (tensor[old] - kept[old]).abs() <= self.rounding
            assert same_rows.all(), "a row of a block that can be found was overwritten"
            kept[new] = tensor[new]
        self.known = dict(keys)
