"""The scheduler and the prefix cache without tensors: a model of memory says what every row holds.

A row of memory is the text up to its token, and the token after it where rows of a draft plane depend on that. A
request may only ever read rows that hold its own text.
"""

import random
from collections import Counter
from hashlib import sha256

import pytest

from spectrain.infer.planes import BlockPool
from spectrain.infer.request import FinishReason, Request
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.scheduler import ScheduledRequest, Scheduler
from spectrain.infer.stopping import Stopper
from spectrain.tests.infer.block_invariants import check_pool, check_writes

SIZE = 4


class Simulation:
    """An engine of texts: `step` computes, accepts, stops and drafts at random; memory is compared row by row."""

    def __init__(
        self,
        seed: int,
        *,
        num_blocks: int = 15,
        budget: int = 11,
        batch: int = 6,
        look_ahead: bool = True,
        key_look_ahead: bool | None = None,
        prefix_cache: bool = True,
    ) -> None:
        self.random = random.Random(seed)
        self.look_ahead = look_ahead
        self.pool = BlockPool(
            num_blocks,
            SIZE,
            prefix_cache=prefix_cache,
            next_token=look_ahead if key_look_ahead is None else key_look_ahead,
        )
        self.scheduler = Scheduler(self.pool, budget, batch)
        self.memory: dict[int, object] = {}
        self.starts: Counter[str] = Counter()
        self.next_id = 0

    @property
    def requests(self) -> list[Request]:
        return [*self.scheduler.running, *self.scheduler.waiting]

    def add(self, prompt: list[int], max_tokens: int) -> Request:
        params = SamplingParams(max_tokens=max_tokens)
        request = Request(self.next_id, prompt, params, 0, Stopper(params, frozenset(), prompt, 10**6))
        self.next_id += 1
        self.scheduler.add(request)
        return request

    def cancel(self, request: Request) -> None:
        request.finish_reason = FinishReason.CANCELLED
        self.scheduler.finish(request)
        self.check()

    def step(self) -> list[ScheduledRequest]:
        could = self.scheduler.can_admit()
        waiting = list(self.scheduler.waiting)
        scheduled, preempted = self.scheduler.schedule()
        admitted = [rows.request for rows in scheduled if rows.request in waiting]
        assert admitted == waiting[: len(admitted)], "not first come, first served"
        assert could or not admitted, "a request ran that could not be admitted"
        assert sum(rows.num_tokens for rows in scheduled) <= self.scheduler.max_batch_tokens
        assert len(self.scheduler.running) <= self.scheduler.max_batch_size
        for request in preempted:
            self.scheduler.requeue(request)
        order = [r.request_id for r in self.requests]
        assert order == sorted(order), "who came later stands earlier"
        assert scheduled or preempted or not self.requests, "requests wait and nothing can run"
        check_writes(self.pool, scheduled)
        for rows in scheduled:
            if rows.request in admitted:
                self._count_start(rows)
            self._compute(rows)
        for rows in scheduled:
            self.scheduler.register(rows.request)
        for rows in scheduled:
            if rows.request.finish_reason:
                self.scheduler.finish(rows.request)
            elif rows.request.is_decoding:
                self._draft(rows.request)
        self.check()
        return scheduled

    def check(self) -> None:
        check_pool(self.pool, [r.block_table for r in self.requests])
        for request in self.scheduler.running:
            for position in range(request.num_computed):
                held = self.memory[self._slot(request, position)]
                assert held == self._row(request.token_ids, position), "a request would read rows of another text"

    def _count_start(self, rows: ScheduledRequest) -> None:
        request = rows.request
        assert rows.start < len(request.token_ids) and rows.start % SIZE == 0
        kind = "resumed" if request.num_preemptions else "first"
        self.starts[f"{kind}, {'cached' if rows.start else 'cold'}"] += 1

    def _slot(self, request: Request, position: int) -> int:
        return request.block_table[position // SIZE] * SIZE + position % SIZE

    def _row(self, text: list[int], position: int) -> object:
        return bytes(text[: position + 1 + self.look_ahead])

    def _compute(self, rows: ScheduledRequest) -> None:
        request, end = rows.request, rows.start + rows.num_tokens
        for position in range(rows.start, end):
            self.memory[self._slot(request, position)] = "not final"
        request.num_computed = end
        if rows.samples:
            request.num_drafts = 0
            if self.random.random() < 0.02:
                request.finish_reason = FinishReason.ERROR
                return
            emitted = [self.random.randrange(2) for _ in range(self.random.randint(1, rows.num_drafts + 1))]
            room = request.params.max_tokens - request.num_output_tokens
            stop = room if self.random.random() < 0.9 else self.random.randint(1, len(emitted))
            kept = emitted[: min(room, stop)]
            request.token_ids.extend(kept)
            if len(kept) == room or stop < room:
                request.finish_reason = FinishReason.LENGTH
            request.num_computed = end - rows.num_drafts + len(kept) - 1
        for position in range(rows.start, request.num_computed):
            self.memory[self._slot(request, position)] = self._row(request.token_ids, position)

    def _draft(self, request: Request) -> None:
        room = min(3, request.params.max_tokens - request.num_output_tokens - 1)
        known = len(request.token_ids)
        if room > 0 and self.pool.grow(request.block_table, known + 2):
            for position in range(known - 1, known + 1):
                self.memory[self._slot(request, position)] = "a draft"
            request.num_drafts = self.random.randint(0, room)


def run(simulation: Simulation, steps: int = 1000) -> Simulation:
    """Arrivals, cancellations and steps at random, then to the end; texts of two tokens begin alike all the time."""
    rng = simulation.random
    for _ in range(steps):
        if rng.random() < 0.5:
            prompt = [rng.randrange(2) for _ in range(rng.randint(1, 24))]
            prompt[:8] = [1] * len(prompt[:8])
            simulation.add(prompt, rng.randint(1, 20))
        if simulation.requests and rng.random() < 0.05:
            simulation.cancel(rng.choice(simulation.requests))
        simulation.step()
    while simulation.requests:
        simulation.step()
    assert simulation.pool.num_free == simulation.pool.num_blocks - 1, "a block leaked"
    return simulation


@pytest.mark.parametrize("look_ahead", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_no_request_ever_reads_rows_of_another_text(seed, look_ahead):
    starts = run(Simulation(seed, look_ahead=look_ahead)).starts
    assert starts["first, cached"] > 10 and starts["resumed, cached"] > 2


@pytest.mark.parametrize("shape", [(13, 3, 2), (13, 40, 8), (60, 7, 9)], ids=str)
def test_the_same_with_other_supplies(shape):
    num_blocks, budget, batch = shape
    run(Simulation(1, num_blocks=num_blocks, budget=budget, batch=batch), steps=150)


def test_without_the_look_ahead_token_in_the_key_another_texts_rows_are_read():
    with pytest.raises(AssertionError, match="rows of another text"):
        for seed in range(5):
            run(Simulation(seed, look_ahead=True, key_look_ahead=False))


def test_with_the_cache_off_every_request_starts_at_its_beginning():
    starts = run(Simulation(0, prefix_cache=False)).starts
    assert starts["first, cold"] > 50 and starts["resumed, cold"] > 2
    assert not starts["first, cached"] and not starts["resumed, cached"]


def filled(simulation: Simulation, prompt: list[int]) -> None:
    """Computes a prompt and one token more, and lets it go."""
    request = simulation.add(prompt, 99)
    while request.num_computed < len(prompt):
        simulation.step()
    simulation.cancel(request)


def admitted(simulation: Simulation, prompt: list[int]) -> Request:
    request = simulation.add(prompt, 9)
    assert [rows.request for rows in simulation.scheduler.schedule()[0]] == [request]
    return request


class Calm(random.Random):
    """Nothing fails, nothing stops early, one token a step."""

    def random(self) -> float:
        return 0.5

    def randrange(self, *args) -> int:
        return 7

    def randint(self, a: int, b: int) -> int:
        return min(a, b)


def calm(**settings) -> Simulation:
    simulation = Simulation(0, **{"budget": 100, "look_ahead": False, **settings})
    simulation.random = Calm()
    return simulation


@pytest.mark.parametrize(
    ("length", "look_ahead", "expected"),
    [
        (1, False, 0),
        (4, False, 0),
        (5, False, 4),
        (8, False, 4),
        (9, False, 8),
        (8, True, 4),
        (9, True, 8),
        (10, True, 8),
    ],
)
def test_a_hit_covers_whole_blocks_and_leaves_a_token_to_compute(length, look_ahead, expected):
    simulation = calm(look_ahead=look_ahead)
    prompt = list(range(length))
    filled(simulation, prompt)
    request = admitted(simulation, prompt)
    assert (request.num_cached, request.num_computed) == (expected, expected)


def test_a_block_followed_by_another_token_is_shared_only_where_rows_do_not_depend_on_it():
    for look_ahead, expected in ((False, 8), (True, 4)):
        simulation = calm(look_ahead=look_ahead)
        filled(simulation, [*range(8), 20, 21])
        assert admitted(simulation, [*range(8), 30, 31]).num_cached == expected


def test_the_same_tokens_behind_another_beginning_are_another_block():
    simulation = calm()
    filled(simulation, [1, 1, 1, 1, 2, 2, 2, 2, 3])
    assert admitted(simulation, [0, 1, 1, 1, 2, 2, 2, 2, 3]).num_cached == 0


def test_keys_are_sha256_over_the_whole_chain():
    pool = BlockPool(4, 2, prefix_cache=True)
    keys: list[bytes] = []
    pool.extend_keys(keys, [5, -1, 2**40])
    assert keys == [sha256((5).to_bytes(8, "little") + b"\xff" * 8).digest()]
    pool.extend_keys(keys, [5, -1, 2**40, 0])
    assert keys[1:] == [sha256(keys[0] + (2**40).to_bytes(8, "little") + bytes(8)).digest()]


def test_what_was_used_longest_ago_is_evicted_first_and_ends_before_beginnings():
    simulation = calm(num_blocks=8)
    first, second = list(range(9)), list(range(50, 59))
    filled(simulation, first)
    filled(simulation, second)
    simulation.cancel(admitted(simulation, first))  # now the one used last
    pool, table = simulation.pool, []
    assert len(pool._free) == 3 and pool.grow(table, 4 * SIZE)  # one more than is free
    keys: dict[str, list[bytes]] = {"first": [], "second": []}
    pool.extend_keys(keys["first"], first)
    pool.extend_keys(keys["second"], second)
    assert (len(pool.find(keys["first"])), len(pool.find(keys["second"]))) == (2, 1)
    assert pool.grow(table, 5 * SIZE)
    assert (len(pool.find(keys["first"])), len(pool.find(keys["second"]))) == (2, 0)


@pytest.mark.parametrize(("others", "fits"), [(3, True), (4, False)])
def test_admission_counts_cached_blocks_that_nobody_uses_as_taken(others, fits):
    """A text of 12 tokens and one to come needs 4 blocks; 2 are cached and idle, yet 4 of the 7 must not be held."""
    simulation = calm(num_blocks=8)
    prompt = list(range(11))
    filled(simulation, prompt)
    assert simulation.pool.grow(table := [], others * SIZE)
    simulation.add([*prompt, 40], 1)
    assert simulation.scheduler.can_admit() == fits
    assert len(simulation.scheduler.schedule()[0]) == fits
    assert len(table) == others


@pytest.mark.parametrize(("others", "fits"), [(1, True), (2, False)])
def test_admission_takes_nothing_for_cached_blocks_in_use(others, fits):
    """Of 6 blocks the first request holds 3, and the second needs 4 of which it shares 2: 2 must be left."""
    simulation = calm(num_blocks=7)
    prompt = list(range(11))
    simulation.add(prompt, 2)
    simulation.step()
    assert simulation.pool.grow([], others * SIZE)
    simulation.add([*prompt, 40], 1)
    assert simulation.scheduler.can_admit() == fits


def test_no_more_requests_are_preempted_than_are_needed():
    simulation = calm(num_blocks=7)
    requests = [simulation.add([i] * 7, 9) for i in range(3)]
    simulation.step()  # 8 tokens known, 7 computed, 2 blocks each
    assert simulation.pool.num_free == 0
    simulation.step()
    assert simulation.scheduler.running == requests
    scheduled, preempted = simulation.scheduler.schedule()  # row 8 opens a third block
    assert preempted == requests[2:] and [rows.request for rows in scheduled] == requests[:2]


def test_drafts_are_dropped_before_a_neighbour_is_preempted():
    simulation = calm(num_blocks=5)
    first, second = (simulation.add([i] * 6, 9) for i in range(2))
    simulation.step()
    first.num_drafts = 3  # rows 6..9 would need a third block
    scheduled, preempted = simulation.scheduler.schedule()
    assert not preempted
    assert [(rows.request, rows.num_tokens, rows.num_drafts) for rows in scheduled] == [(first, 1, 0), (second, 1, 0)]


def test_a_preempted_request_finds_its_blocks_again():
    simulation = calm(num_blocks=8)
    requests = [simulation.add([i] * 7, 5) for i in range(3)]
    for _ in range(3):
        simulation.step()
    victim = requests[2]
    assert victim.num_preemptions == 1 and victim.num_computed == 0
    while victim not in simulation.scheduler.running:
        simulation.step()
    assert simulation.starts["resumed, cached"] == 1


def test_a_preempted_request_comes_back_without_its_drafts():
    """The cache may hold all but its newest token; what stands behind that in its new table row is another's."""
    simulation = calm(num_blocks=6)
    first, victim = (simulation.add([i] * 7, 9) for i in range(2))
    simulation.scheduler.schedule()
    for request in (first, victim):
        request.token_ids += [5, 6]
        request.num_computed = 8
        simulation.scheduler.register(request)
    victim.num_drafts = 2
    assert simulation.pool.grow(victim.block_table, 11)  # the last free block, for its drafts
    _, preempted = simulation.scheduler.schedule()
    assert preempted == [victim]
    simulation.scheduler.requeue(victim)
    simulation.scheduler.finish(first)
    ((request, start, num_tokens, num_drafts, samples),), _ = simulation.scheduler.schedule()
    assert (request, start, num_tokens, num_drafts, samples) == (victim, 8, 1, 0, True)


def test_a_failed_request_shares_nothing():
    simulation = calm()
    request = simulation.add(list(range(9)), 5)
    scheduled, _ = simulation.scheduler.schedule()
    request.num_computed = 9
    request.finish_reason = FinishReason.ERROR
    simulation.scheduler.register(request)
    simulation.scheduler.finish(request)
    assert scheduled and admitted(simulation, list(range(9))).num_cached == 0


def test_forgetting_leaves_tables_alone():
    simulation = calm()
    filled(simulation, list(range(9)))
    request = admitted(simulation, list(range(9)))
    table = list(request.block_table)
    simulation.pool.forget()
    check_pool(simulation.pool, [table])
    assert request.block_table == table
    other = simulation.add(list(range(9)), 5)
    simulation.scheduler.schedule()
    assert other.num_cached == 0
