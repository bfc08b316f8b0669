"""MTP drafting in the engine: what it computes for any row is what training computes, whatever was rejected before."""

import pytest
import torch

from spectrain.infer.batch import PackedBatch
from spectrain.infer.config import EngineConfig
from spectrain.infer.engine import Engine
from spectrain.infer.proposers.mtp import moved_back
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.target import Target
from spectrain.tests.fresh import loud_proposer
from spectrain.tests.infer.block_invariants import WatchedEngine
from spectrain.tests.infer.proposers import keep_drafts
from spectrain.tests.models import rand_llama


def test_a_cached_beginning_is_used_only_where_the_tokens_a_deeper_layer_read_are_the_same():
    """Texts that part two tokens after a full block: the second layer's last row there is not the other text's."""
    target = Target.from_model(rand_llama(max_position_embeddings=128))
    shared = [5, 9, 31, 77, 12, 60, 44, 8]
    texts = [[*shared, 20, 30, 41, 52], [*shared, 20, 33, 45, 56]]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    seen = []
    for cached in (False, True):
        proposer = loud_proposer("mtp", target, 3, num_layers=3)
        drafts = keep_drafts(proposer)
        config = EngineConfig(num_draft_tokens=3, num_blocks=60, block_size=4, prefix_cache=cached)
        engine = Engine(target, proposer, config)
        for text in texts:
            engine.generate([text], params)
        assert engine.statistics.cached_prompt_tokens == (4 if cached else 0), "the second full block is not the same"
        seen.append(drafts)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("num_layers", [2, 3])
def test_a_block_is_offered_once_the_deeper_layers_have_filled_it(num_layers: int):
    """Prompts in pieces that end with a block: its last rows of layer k are made k rows later.

    A request that begins behind such a block makes those rows again, the same but for rounding.
    """

    class Watched(WatchedEngine):
        rounding = 1e-3

    target = Target.from_model(rand_llama(max_position_embeddings=128))
    proposer = loud_proposer("mtp", target, 3, num_layers=num_layers)
    config = EngineConfig(num_draft_tokens=3, num_blocks=60, block_size=4, max_batch_tokens=8)
    engine = Watched(target, proposer, config)
    texts = [list(range(5, 22 + i)) for i in range(3)]
    engine.generate(texts, SamplingParams(max_tokens=8, ignore_eos=True))
    assert engine.statistics.cached_prompt_tokens > 0


@pytest.mark.parametrize("by", [1, 2, 3])
def test_rows_moved_back_are_those_whose_text_reaches_far_enough(by: int):
    """By hand: requests that begin here, went on before, and begin here with fewer rows than are moved."""
    block_size, computed, rows = 4, (0, 5, 0), (6, 3, 2)
    starts = torch.tensor([0, 6, 9, 11], dtype=torch.int32)
    tables = torch.tensor([[1, 2, 0], [3, 4, 5], [6, 0, 0]], dtype=torch.int32)
    positions = torch.cat([torch.arange(c, c + r) for c, r in zip(computed, rows, strict=True)])
    batch = PackedBatch(
        token_ids=torch.zeros(12, dtype=torch.int64),  # one row is padding
        positions=torch.cat([positions, torch.zeros(1, dtype=torch.int64)]),
        slot_mapping=torch.zeros(12, dtype=torch.int64),
        cu_seqlens=starts,
        seq_lens=torch.tensor([c + r for c, r in zip(computed, rows, strict=True)], dtype=torch.int32),
        block_tables=tables,
        logits_rows=torch.zeros(1, dtype=torch.int64),
        max_query_len=6,
        max_seq_len=12,
    )
    back = moved_back(batch, by, block_size)
    for b, (before, count) in enumerate(zip(computed, rows, strict=True)):
        first = int(starts[b])
        live = [p - by for p in range(before, before + count) if p >= by]
        assert back.batch.positions[first : first + len(live)].tolist() == live
        assert back.positions[first : first + len(live)].tolist() == [p + by for p in live]
        source = back.rows[first : first + len(live)]
        assert positions[source].tolist() == [p + by for p in live]
        slots = [int(tables[b, p // block_size]) * block_size + p % block_size for p in live]
        assert back.batch.slot_mapping[first : first + count].tolist() == slots + [0] * (count - len(live))
        if live:
            assert int(back.batch.seq_lens[b]) - count == live[0], "the first row's position, as attention counts it"
    assert int(back.batch.slot_mapping[11]) == 0
