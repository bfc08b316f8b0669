"""What the target says after given rows of one text, asked alone: the judge of the losslessness checks.

It borrows blocks of an idle engine's cache, and nobody's row of its table, and gives them back; the proposer sees none
of it.
"""

import itertools
from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from .batch import PackedBatch
from .engine import Engine, EngineError
from .planes import slots_of
from .sampling import LogitsRows, SamplingParams, SamplingTable, features_of, process_logits


@torch.inference_mode()
def score_rows(engine: Engine, token_ids: Sequence[int], rows: Sequence[int], *, one_by_one: bool = False) -> Tensor:
    """Raw target logits [len(rows), vocab] float32 after ascending `rows` of one text, by one chunked prefill.

    `one_by_one`: from the first of `rows` on, tokens are computed one at a time, as plain decoding does. Raises
    EngineError while requests are running or where the text does not fit the cache.
    """
    if engine.has_unfinished():
        raise EngineError("scoring needs an idle engine, found unfinished requests; run them to the end first")
    block_table: list[int] = []
    if not engine.pool.grow(block_table, len(token_ids)):
        raise EngineError(
            f"scoring {len(token_ids)} tokens needs {engine.pool.blocks_for(len(token_ids))} blocks, the cache has "
            f"{engine.pool.num_free} free; raise --num-blocks"
        )
    try:
        single = rows[0] if one_by_one else len(token_ids)
        starts = [*range(0, single, engine.config.max_batch_tokens), *range(single, len(token_ids)), len(token_ids)]
        parts = []
        for start, end in itertools.pairwise(starts):
            wanted = [row - start for row in rows if start <= row < end]
            batch = _one_request(engine, token_ids[start:end], start, block_table, wanted)
            logits = engine.target.forward(batch).logits
            if wanted:
                parts.append(logits.float())
        return torch.cat(parts)
    finally:
        engine.pool.release(block_table)


def score_logits(
    engine: Engine, params: SamplingParams, token_ids: Sequence[int], rows: Sequence[int], prompt_len: int
) -> Tensor:
    """Processed logits [len(rows), vocab] float32 of plain decoding with `params` after `rows` of one text.

    The first `prompt_len` tokens of the text are the prompt. Raises like `score_rows`.
    """
    ends = params.end_token_ids(engine.target.eos_token_ids)
    return apply_settings(score_rows(engine, token_ids, rows), params, ends, token_ids, rows, prompt_len)


def apply_settings(
    logits: Tensor,
    params: SamplingParams,
    end_ids: Collection[int],
    token_ids: Sequence[int],
    rows: Sequence[int],
    prompt_len: int,
) -> Tensor:
    """Processed logits of raw ones [len(rows), vocab] that stand after `rows` of one text."""
    device = logits.device
    settings = SamplingTable(2, logits.shape[1], device)
    settings.set(0, params, sorted(end_ids))
    return process_logits(
        logits,
        LogitsRows(torch.zeros(len(rows), dtype=torch.int64, device=device), torch.tensor(list(rows), device=device)),
        settings,
        torch.tensor([list(token_ids), [0] * len(token_ids)], dtype=torch.int32, device=device),
        torch.tensor([prompt_len, 0], device=device),
        features_of([params]),
    )


def score_probs(
    engine: Engine, params: SamplingParams, token_ids: Sequence[int], rows: Sequence[int], prompt_len: int
) -> Tensor:
    """The laws [len(rows), vocab] float32 that plain decoding with `params` draws from after `rows`."""
    return score_logits(engine, params, token_ids, rows, prompt_len).softmax(-1)


def _one_request(
    engine: Engine, token_ids: Sequence[int], start: int, block_table: Sequence[int], wanted: Sequence[int]
) -> PackedBatch:
    device = engine.target.device
    length, end = len(token_ids), start + len(token_ids)
    positions = torch.arange(start, end)

    def ids(values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(device, dtype)

    return PackedBatch(
        token_ids=ids(token_ids),
        positions=positions.to(device),
        slot_mapping=slots_of(block_table, positions, engine.pool.block_size).to(device),
        cu_seqlens=ids([0, length], torch.int32),
        seq_lens=ids([end], torch.int32),
        block_tables=ids(block_table, torch.int32)[None],
        logits_rows=ids(wanted),
        max_query_len=length,
        max_seq_len=end,
        state_rows=ids([engine.table.nobody]),
    )
