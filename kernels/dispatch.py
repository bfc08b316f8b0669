"""Picks the implementation of an op by where its tensors live: Triton on a GPU, plain PyTorch elsewhere.

Triton is imported when the first GPU tensor arrives, not before.
"""

import torch
from torch import Tensor

from . import reference
from .records import AttentionInputs, RejectionInputs, RejectionOutputs, Stream, SurvivalModel


def verify(inputs: RejectionInputs, *, fp64_gumbel: bool = False) -> RejectionOutputs:
    """See `reference.rejection.verify`."""
    if inputs.target_logits.is_cuda:
        from . import rejection

        return rejection.verify(inputs, fp64_gumbel=fp64_gumbel)
    return reference.rejection.verify(inputs, fp64_gumbel=fp64_gumbel)


def sample(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    stream: Stream,
    *,
    fp64_gumbel: bool = False,
) -> Tensor:
    """See `reference.sampling.sample`."""
    if logits.is_cuda:
        from . import sampling

        return sampling.sample(logits, temperature, seeds, positions, stream, fp64_gumbel=fp64_gumbel)
    return reference.sampling.sample(logits, temperature, seeds, positions, stream, fp64_gumbel=fp64_gumbel)


def argmax(logits: Tensor) -> Tensor:
    """See `reference.sampling.argmax`."""
    if logits.is_cuda:
        from .sampling import argmax as implementation
    else:
        implementation = reference.sampling.argmax
    return implementation(logits)


def store_kv(k: Tensor, v: Tensor | None, k_plane: Tensor, v_plane: Tensor | None, slot_mapping: Tensor) -> None:
    """See `reference.attention.store_kv`."""
    if k_plane.is_cuda:
        from . import attention

        attention.store_kv(k, v, k_plane, v_plane, slot_mapping)
    else:
        reference.attention.store_kv(k, v, k_plane, v_plane, slot_mapping)


def paged_attention(inputs: AttentionInputs) -> Tensor:
    """See `reference.attention.paged_attention`."""
    if inputs.q.is_cuda:
        from .attention import paged_attention as implementation
    else:
        implementation = reference.attention.paged_attention
    return implementation(inputs)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """See `reference.linear.linear`."""
    if x.is_cuda:
        from .linear import linear as implementation
    else:
        implementation = reference.linear.linear
    return implementation(x, weight, bias, residual, out_dtype=out_dtype)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `reference.linear.gated_linear`."""
    if x.is_cuda:
        from .linear import gated_linear as implementation
    else:
        implementation = reference.linear.gated_linear
    return implementation(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False) -> Tensor:
    """See `reference.fused.rms_norm`."""
    if x.is_cuda:
        from .fused import rms_norm as implementation
    else:
        implementation = reference.fused.rms_norm
    return implementation(x, weight, eps, unit_offset=unit_offset)


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `reference.fused.silu_mul`."""
    if gate_up.is_cuda:
        from .fused import silu_mul as implementation
    else:
        implementation = reference.fused.silu_mul
    return implementation(gate_up)


def rope_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    k_plane: Tensor,
    v_plane: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """See `reference.fused.rope_store`."""
    if qkv.is_cuda:
        from .fused import rope_store as implementation
    else:
        implementation = reference.fused.rope_store
    return implementation(qkv, cos, sin, q_norm, k_norm, eps, k_plane, v_plane, slot_mapping)


def learn_survival(
    model: SurvivalModel, log_odds: Tensor, num_verified: Tensor, num_emitted: Tensor, memory: float
) -> None:
    """See `reference.survival.learn_survival`."""
    if log_odds.is_cuda:
        from .survival import learn_survival as implementation
    else:
        implementation = reference.survival.learn_survival
    implementation(model, log_odds, num_verified, num_emitted, memory)


def draft_survival(model: SurvivalModel, log_odds: Tensor, num_drafts: Tensor) -> Tensor:
    """See `reference.survival.draft_survival`."""
    if log_odds.is_cuda:
        from .survival import draft_survival as implementation
    else:
        implementation = reference.survival.draft_survival
    return implementation(model, log_odds, num_drafts)


def gated_steps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    memory: Tensor,
    state_rows: Tensor,
    starts: Tensor,
    counts: Tensor,
    first: Tensor,
    *,
    most: int,
) -> Tensor:
    """See `reference.gated_steps.gated_steps`."""
    if memory.is_cuda:
        from .gated_steps import gated_steps as implementation
    else:
        implementation = reference.gated_steps.gated_steps
    return implementation(q, k, v, log_decay, beta, memory, state_rows, starts, counts, first, most=most)
