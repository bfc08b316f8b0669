"""A budget of tokens becomes steps: those the trainer would count, on rows that no head decides about."""

import pytest

from spectrain.extract.shards import ShardSet
from spectrain.tests.shard_folders import write_shards
from spectrain.train.budget import Budget, steps_for_tokens
from spectrain.train.data import RowReader, TrainingRows, split_documents
from spectrain.train.settings import DataSettings, SettingsError


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> ShardSet:
    return ShardSet.open([write_shards(tmp_path_factory.mktemp("shards"))])


DATA = DataSettings(sequence_length=32, batch_size=2, validation_share=0.1, seed=3)


def tokens_of_steps(shards: ShardSet, data: DataSettings, steps: int) -> int:
    """As the trainer counts them: rows of batches that hold a document."""
    reader = RowReader(shards, (1,), True, data.sequence_length)
    rows = TrainingRows(reader, split_documents(shards.num_documents, data).train, data, 0, 1)
    batches = [reader.ids(rows.rows_at(position)) for position in range(steps)]
    return sum(int((batch.document_ids >= 0).sum()) for batch in batches)


@pytest.mark.parametrize("tokens", [1, 60, 175, 700])
def test_the_first_step_that_reaches_the_budget_is_the_last(shards: ShardSet, tokens: int) -> None:
    budget = steps_for_tokens(shards, DATA, tokens)
    assert budget.tokens == tokens_of_steps(shards, DATA, budget.steps) >= tokens
    assert tokens_of_steps(shards, DATA, budget.steps - 1) < tokens


def test_epochs_cover_the_steps(shards: ShardSet) -> None:
    whole = steps_for_tokens(shards, DATA, 160)
    reader = RowReader(shards, (), False, 32)
    trained = split_documents(shards.num_documents, DATA).train
    per_epoch = TrainingRows(reader, trained, DATA, 0, 1).steps_per_epoch
    assert whole.steps <= per_epoch and whole.epochs == 1
    assert steps_for_tokens(shards, DATA, 10_000).epochs == -(
        -steps_for_tokens(shards, DATA, 10_000).steps // per_epoch
    )
    every = int(reader.lengths[trained].sum())
    assert steps_for_tokens(shards, DATA, every) == Budget(per_epoch, 1, every)
    assert steps_for_tokens(shards, DATA, 3 * every) == Budget(3 * per_epoch, 3, 3 * every)


def test_documents_are_counted_as_they_are_cut(shards: ShardSet) -> None:
    short = DataSettings(sequence_length=10, batch_size=100, validation_share=0.0)
    expected = int(shards.document_lengths().clamp(max=10).sum())
    assert steps_for_tokens(shards, short, 1) == Budget(1, 1, expected)


def test_no_budget_is_refused(shards: ShardSet) -> None:
    with pytest.raises(SettingsError, match="at least 1, found 0"):
        steps_for_tokens(shards, DATA, 0)
