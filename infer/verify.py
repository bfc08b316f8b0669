"""Verification of drafts: the emitted tokens follow the target's processed law exactly, however the drafts were made.

A draft x drawn from the law q is kept with probability min(1, p(x) / q(x)), where p is the target's law in its row; at
the first rejection the token is drawn from max(p - q, 0), normalised, and after the last draft from p (Leviathan et al.
2211.17192, Chen et al. 2302.01318). A draft without a law is a point mass, also when it was drawn at random: it is kept
with probability p(x), and rejection draws from p without x. At temperature 0 a draft is kept iff it is the argmax.
"""

from torch import Tensor

from ..kernels import dispatch
from ..kernels.records import RejectionInputs, RejectionOutputs


def verify_drafts(
    logits: Tensor,
    draft_token_ids: Tensor,
    cu_rows: Tensor,
    positions: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    *,
    draft_log_probs: Tensor | None = None,
    token_map: Tensor | None = None,
    fp64_gumbel: bool = False,
) -> RejectionOutputs:
    """Keeps a prefix of each request's drafts and adds one token of the target's.

    logits [num_rows, vocab] float32, from `process_logits`; request b owns rows cu_rows[b]:cu_rows[b+1] ([batch + 1]
    int32): one a draft and one more. draft_token_ids [batch, k] int64, -1 beyond a request's drafts. positions [batch]
    int64: index in the sequence of the first token this step emits; temperature [batch] float32 (0 = greedy) and seeds
    [batch] int64. The noise depends on seed and position only, so a request's tokens do not depend on its batch mates.
    """
    return dispatch.verify(
        RejectionInputs(
            target_logits=logits,
            draft_token_ids=draft_token_ids,
            cu_rows=cu_rows,
            positions=positions,
            temperature=temperature,
            seeds=seeds,
            draft_log_probs=draft_log_probs,
            token_map=token_map if draft_log_probs is not None else None,
        ),
        fp64_gumbel=fp64_gumbel,
    )
