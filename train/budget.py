"""How long a run is that trains a given number of tokens: the same documents in the same order for every head."""

from typing import NamedTuple

from ..extract.shards import ShardSet
from .data import RowReader, TrainingRows, split_documents
from .settings import DataSettings, SettingsError


class Budget(NamedTuple):
    """A length of training; `tokens` is what it really trains, the last step included."""

    steps: int
    epochs: int
    tokens: int


def steps_for_tokens(shards: ShardSet, data: DataSettings, tokens: int) -> Budget:
    """The steps until `tokens` are reached, one epoch after another; reads lengths only.

    The rows and their order depend on `data.seed`, `data.sequence_length` and the held-out share, and not on the head.
    Raises SettingsError for fewer than 1.
    """
    if tokens < 1:
        raise SettingsError(f"the token budget must be at least 1, found {tokens}; give a larger --token-budget")
    reader = RowReader(shards, (), False, data.sequence_length)
    rows = TrainingRows(reader, split_documents(shards.num_documents, data).train, data, rank=0, world=1)
    lengths = reader.lengths.clamp(max=data.sequence_length)
    steps = trained = 0
    while trained < tokens:
        trained += sum(int(lengths[row].sum()) for row in rows.rows_at(steps))
        steps += 1
    return Budget(steps, -(-steps // rows.steps_per_epoch), trained)
