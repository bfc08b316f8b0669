"""One micro-batch of documents packed into fixed-length rows."""

from typing import NamedTuple

from torch import Tensor


class TrainBatch(NamedTuple):
    """Rows of a shard, unshifted: column t of every field speaks of the same token. Shifts are the objective's."""

    token_ids: Tensor  # [batch, seq] int64; 0 in padding
    positions: Tensor  # [batch, seq] int64; within the document
    document_ids: Tensor  # [batch, seq] int32; equal ids are one document, -1 is padding
    loss_mask: Tensor  # [batch, seq] bool; False in padding
    target_argmax: Tensor  # [batch, seq] int64; the target's top token after the row, -1 where never used
    aux_states: Tensor  # [batch, seq, num_layer_ids, target_hidden]; the head's layer ids, ascending
    final_states: Tensor | None  # [batch, seq, target_hidden]; raw state at id L
    denominators: Tensor  # [num_terms] float32; valid rows per loss term over all ranks and accumulation steps
    document_seeds: Tensor | None = (
        None  # [batch, seq] int64; one number a document and epoch, for what is drawn by row
    )
