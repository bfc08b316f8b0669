"""The packed batch: rows of many requests in one line, and where each row's keys and values live."""

from typing import NamedTuple

from torch import Tensor


class PackedBatch(NamedTuple):
    """One step's rows. Request b owns rows cu_seqlens[b]:cu_seqlens[b+1], the last ones of its seq_lens[b] tokens."""

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    slot_mapping: Tensor  # [num_tokens] int64; block * block_size + offset
    cu_seqlens: Tensor  # [batch + 1] int32
    seq_lens: Tensor  # [batch] int32; tokens in the cache once this step's rows are written
    block_tables: Tensor  # [batch, max_blocks] int32; unused entries 0
    logits_rows: Tensor  # [num_logits] int64; the rows whose logits are asked for
    max_query_len: int
    max_seq_len: int
