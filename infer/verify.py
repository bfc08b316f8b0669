"""Verification of drafts: the emitted tokens follow the target's processed law exactly, however the drafts were made.

A draft x drawn from the law q is kept with probability min(1, p(x) / q(x)), where p is the target's law in its row; at
the first rejection the token is drawn from max(p - q, 0), normalised, and after the last draft from p (Leviathan et al.
2211.17192, Chen et al. 2302.01318). A draft without a law is a point mass, also when it was drawn at random: it is kept
with probability p(x), and rejection draws from p without x. At temperature 0 a draft is kept iff it is the argmax.
"""

from itertools import accumulate

import torch
from torch import Tensor

from ..kernels import dispatch
from ..kernels.records import RejectionInputs, RejectionOutputs
from .proposers.base import Drafts


def verify_drafts(
    logits: Tensor,
    drafts: Drafts,
    positions: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    *,
    fp64_gumbel: bool = False,
) -> RejectionOutputs:
    """Keeps a prefix of each request's drafts and adds one token of the target's.

    logits [num_rows, vocab] float32, from `process_logits`: lengths[b] + 1 rows per request, in order. positions
    [batch] int64: index in the sequence of the first token this step emits; temperature [batch] float32 (0 = greedy)
    and seeds [batch] int64. The noise depends on seed and position only, so a request's tokens do not depend on its
    batch mates. Raises ValueError when the rows do not match the drafts.
    """
    cu_rows = [0, *accumulate(length + 1 for length in drafts.lengths)]
    if cu_rows[-1] != logits.shape[0]:
        raise ValueError(
            f"drafts of lengths {drafts.lengths} need {cu_rows[-1]} logits rows (one each, one more per request), "
            f"found {logits.shape[0]}"
        )
    k = drafts.token_ids.shape[1]
    if any(not 0 <= length <= k for length in drafts.lengths):
        raise ValueError(f"draft lengths must lie between 0 and the {k} columns of token_ids, found {drafts.lengths}")
    return dispatch.verify(
        RejectionInputs(
            target_logits=logits,
            draft_token_ids=drafts.token_ids,
            cu_rows=torch.tensor(cu_rows, dtype=torch.int32, device=logits.device),
            positions=positions,
            temperature=temperature,
            seeds=seeds,
            draft_log_probs=drafts.log_probs,
            token_map=drafts.token_map if drafts.log_probs is not None else None,
        ),
        fp64_gumbel=fp64_gumbel,
    )
