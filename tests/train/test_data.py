"""The split, the packing and the order of samples."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrain.extract.shards import ShardSet
from spectrain.tests.shard_folders import LAYERS, write_shards
from spectrain.train.batch import TrainBatch
from spectrain.train.data import DataError, RowReader, StepPlan, TrainingRows, pack_rows, split_documents
from spectrain.train.prefetch import prefetch
from spectrain.train.settings import DataSettings, SettingsError


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> ShardSet:
    return ShardSet.open([write_shards(tmp_path_factory.mktemp("data") / "shards")])


@pytest.mark.parametrize("number", [1, 2, 3, 7, 10])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.1, 0.5, 0.95])
def test_the_two_parts_are_exact_complements(number: int, share: float) -> None:
    split = split_documents(number, DataSettings(validation_share=share, seed=4))
    assert sorted([*split.train.tolist(), *split.validation.tolist()]) == list(range(number))
    assert len(split.train) >= 1
    assert (len(split.validation) > 0) == (share > 0 and number > 1)


def test_a_split_is_seeded_and_bounded() -> None:
    def held_out(seed: int, most: int = 512) -> list[int]:
        settings = DataSettings(validation_share=0.5, seed=seed, max_validation_documents=most)
        return split_documents(40, settings).validation.tolist()

    assert held_out(1) == held_out(1) != held_out(2)
    assert len(held_out(1, most=3)) == 3


def test_nothing_to_split_and_whole_shares_are_refused() -> None:
    with pytest.raises(DataError, match="at least one document"):
        split_documents(0, DataSettings())
    with pytest.raises(SettingsError, match="validation_share"):
        DataSettings(validation_share=1.0)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=120), st.integers(0, 5))
def test_packing_places_every_document_once_and_never_overflows(lengths: list[int], seed: int) -> None:
    sizes = torch.tensor(lengths)
    rows = pack_rows(torch.arange(len(lengths)), sizes, 16, seed)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(min(16, lengths[i]) for i in row) <= 16 for row in rows)
    # only the rows left open at the end may be more than half empty beside each other
    half_empty = [row for row in rows if sum(min(16, lengths[i]) for i in row) <= 8]
    assert len(half_empty) <= 1


def test_rows_hold_documents_side_by_side_and_padding_is_marked(shards: ShardSet) -> None:
    reader = RowReader(shards, (1, 3), True, sequence_length=32)
    rows = [[0, 1], [4]]  # 9 + 17 tokens, 8 tokens
    batch = reader.fill(reader.ids(rows), rows)
    assert batch.token_ids.shape == (2, 32) and batch.aux_states.shape == (2, 32, 2, 32)
    first, second = shards.document(0), shards.document(1)
    assert torch.equal(batch.token_ids[0, 9:26], second.token_ids.long())
    assert batch.positions[0, :26].tolist() == [*range(9), *range(17)]
    assert batch.document_ids[0].tolist() == [0] * 9 + [1] * 17 + [-1] * 6
    assert torch.equal(batch.loss_mask[0, :9], first.loss_mask) and not batch.loss_mask[0, 26:].any()
    assert torch.equal(batch.target_argmax[0, 9:26], second.target_argmax.long())
    assert batch.target_argmax[0, 26:].eq(-1).all()
    assert torch.equal(batch.aux_states[0, 9:26], second.hidden_states[:, [LAYERS.index(1), LAYERS.index(3)]])
    assert batch.final_states is not None
    assert torch.equal(batch.final_states[1, :8], shards.document(4).hidden_states[:, LAYERS.index(4)])
    assert not batch.aux_states[1, 8:].any() and not batch.final_states[1, 8:].any()


def test_padding_is_told_by_place_not_by_token(tmp_path: Path) -> None:
    """Documents that end in the padding token's id keep the loss of that end."""
    from spectrain.tests.models import rand_llama
    from spectrain.tests.shard_folders import make_document

    model, mask = rand_llama(4), torch.tensor([False, True, True, True])
    documents = [make_document(model, torch.tensor([5, 6, 7, 0]), mask, 0, LAYERS)]
    shards = ShardSet.open([write_shards(tmp_path / "s", model=model, documents=documents)])
    batch = RowReader(shards, (1,), True, 16).ids([[0]])
    assert batch.loss_mask[0].tolist() == [False, True, True, True] + [False] * 12


def test_longer_documents_are_cut(shards: ShardSet) -> None:
    reader = RowReader(shards, (1,), False, sequence_length=10)
    batch = reader.ids([[3]])
    assert batch.token_ids.shape == (1, 10)
    assert torch.equal(batch.token_ids[0], shards.document(3).token_ids[:10].long())
    assert reader.fill(batch, [[3]]).final_states is None


def plans(shards: ShardSet, position: int, end: int, rank: int = 0, world: int = 1, micro: int = 1) -> list[StepPlan]:
    data = DataSettings(sequence_length=32, batch_size=3, micro_batch_size=micro, validation_share=0.0, seed=7)
    reader = RowReader(shards, (1,), False, 32)
    rows = TrainingRows(reader, torch.arange(shards.num_documents), data, rank, world)
    return [item for item in rows.stream(position, end) if isinstance(item, StepPlan)]


def test_every_epoch_sees_every_document_once_in_another_order(shards: ShardSet) -> None:
    data = DataSettings(sequence_length=32, batch_size=3, validation_share=0.0, seed=7)
    rows = TrainingRows(RowReader(shards, (1,), False, 32), torch.arange(shards.num_documents), data, 0, 1)
    steps = rows.steps_per_epoch
    epochs = [
        [i for at in range(steps * e, steps * (e + 1)) for row in rows.rows_at(at) for i in row] for e in range(3)
    ]
    for epoch in epochs:
        assert Counter(epoch) == Counter(range(shards.num_documents))
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("position", [1, 2, 3, 5, 7])
def test_starting_anywhere_continues_the_same_order(shards: ShardSet, position: int) -> None:
    whole = [plan.documents for plan in plans(shards, 0, 9)]
    assert [plan.documents for plan in plans(shards, position, 9)] == whole[position:]


@pytest.mark.parametrize(("world", "micro"), [(2, 1), (3, 1), (2, 2), (5, 1)])
def test_order_does_not_depend_on_the_number_of_processes(shards: ShardSet, world: int, micro: int) -> None:
    alone = plans(shards, 0, 6)
    together = [plans(shards, 0, 6, rank, world, micro) for rank in range(world)]
    for step, plan in enumerate(alone):
        assert all(ranks[step].documents == plan.documents for ranks in together)
        assert len({len(ranks[step].micro_batches) for ranks in together}) == 1
        tokens = sum(int((b.document_ids >= 0).sum()) for ranks in together for b in ranks[step].micro_batches)
        assert tokens == sum(int((b.document_ids >= 0).sum()) for b in plan.micro_batches)


def test_what_is_drawn_for_a_document_follows_it_and_changes_with_epoch_and_seed(shards: ShardSet) -> None:
    def seeds(seed: int, length: int, epoch: int) -> dict[int, int]:
        data = DataSettings(sequence_length=length, batch_size=3, validation_share=0.0, seed=seed)
        rows = TrainingRows(RowReader(shards, (1,), False, length), torch.arange(shards.num_documents), data, 0, 1)
        found: dict[int, int] = {}
        for at in range(rows.steps_per_epoch * epoch, rows.steps_per_epoch * (epoch + 1)):
            plan, *batches = rows.stream(at, at + 1)
            assert isinstance(plan, StepPlan)
            parts = [
                batch.document_seeds[b][batch.document_ids[b] == number].unique()
                for batch in batches
                for b, ids in enumerate(batch.document_ids)
                for number in range(int(ids.max()) + 1)
            ]
            assert all(len(part) == 1 for part in parts)
            found |= dict(zip(plan.documents, (int(part) for part in parts), strict=True))
        return found

    first = seeds(7, 32, 0)
    assert sorted(first) == list(range(shards.num_documents)) and len(set(first.values())) == len(first)
    assert seeds(7, 64, 0) == first
    for other in (seeds(7, 32, 1), seeds(8, 32, 0)):
        assert not set(other.values()) & set(first.values())


def test_a_last_state_that_is_an_aux_state_too_is_read_once(shards: ShardSet) -> None:
    last = LAYERS[-1]
    both = RowReader(shards, (1, last), True, 32)
    batch = both.fill(both.ids([[0, 1]]), [[0, 1]])
    apart = RowReader(shards, (1,), True, 32)
    expected = apart.fill(apart.ids([[0, 1]]), [[0, 1]])
    assert batch.final_states is not None and expected.final_states is not None
    assert torch.equal(batch.final_states, expected.final_states)
    assert batch.final_states.data_ptr() == batch.aux_states[:, :, 1].data_ptr()


def test_the_stream_interleaves_plans_and_their_batches(shards: ShardSet) -> None:
    data = DataSettings(sequence_length=32, batch_size=4, micro_batch_size=2, validation_share=0.0)
    rows = TrainingRows(RowReader(shards, (1,), True, 32), torch.arange(shards.num_documents), data, 0, 1)
    kinds = [type(item) for item in prefetch(rows.stream(0, 1), 2)]
    assert kinds == [StepPlan, TrainBatch, TrainBatch]


def test_prefetch_passes_errors_on_and_ends_its_thread_when_closed() -> None:
    import threading

    def broken() -> object:
        yield 1
        raise OSError("disk gone")

    items = prefetch(broken(), 1)
    assert next(items) == 1
    with pytest.raises(OSError, match="disk gone"):
        next(items)
    endless = prefetch(iter(range(10**9)), 2)
    assert next(endless) == 0
    endless.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "shard-reader"]
