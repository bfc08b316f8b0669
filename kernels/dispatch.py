"""Picks the implementation of an op by where its tensors live: Triton on a GPU, plain PyTorch elsewhere.

Triton is imported when the first GPU tensor arrives, not before.
"""

from torch import Tensor

from . import reference
from .records import RejectionInputs, RejectionOutputs, Stream


def verify(inputs: RejectionInputs, *, fp64_gumbel: bool = False) -> RejectionOutputs:
    """See `reference.verify`."""
    if inputs.target_logits.is_cuda:
        from . import rejection

        return rejection.verify(inputs, fp64_gumbel=fp64_gumbel)
    return reference.verify(inputs, fp64_gumbel=fp64_gumbel)


def sample(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    stream: Stream,
    *,
    fp64_gumbel: bool = False,
) -> Tensor:
    """See `reference.sample`."""
    if logits.is_cuda:
        from . import sampling

        return sampling.sample(logits, temperature, seeds, positions, stream, fp64_gumbel=fp64_gumbel)
    return reference.sample(logits, temperature, seeds, positions, stream, fp64_gumbel=fp64_gumbel)


def store_kv(k: Tensor, v: Tensor | None, k_plane: Tensor, v_plane: Tensor | None, slot_mapping: Tensor) -> None:
    """See `reference.store_kv`."""
    if k_plane.is_cuda:
        from . import attention

        attention.store_kv(k, v, k_plane, v_plane, slot_mapping)
    else:
        reference.store_kv(k, v, k_plane, v_plane, slot_mapping)


def paged_attention(
    q: Tensor,
    k_plane: Tensor,
    v_plane: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    *,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `reference.paged_attention`."""
    if q.is_cuda:
        from .attention import paged_attention as implementation
    else:
        implementation = reference.paged_attention
    return implementation(
        q,
        k_plane,
        v_plane,
        cu_seqlens,
        seq_lens,
        block_tables,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        scale=scale,
        window=window,
        chunk=chunk,
        softcap=softcap,
        sinks=sinks,
    )
