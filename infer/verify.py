"""Verification of drafts: the emitted tokens follow the target's processed law exactly, however the drafts were made.

A draft x drawn from the law q is kept with probability min(1, p(x) / q(x)), where p is the target's law in its row; at
the first rejection the token is drawn from max(p - q, 0), normalised, and after the last draft from p (Leviathan et al.
2211.17192, Chen et al. 2302.01318). A draft without a law is a point mass, also when it was drawn at random: it is kept
with probability p(x), and rejection draws from p without x. At temperature 0 a draft is kept iff it is the argmax.
Block verification (Sun et al. 2403.10444) decides over whole prefixes and keeps at least as many drafts on average.
Synthetic verification (`synthetic.py`) keeps drafts by given rates and is not lossless.
"""

from typing import NamedTuple

from torch import Tensor

from ..kernels import dispatch
from ..kernels.records import RejectionInputs, RejectionOutputs, VerifyMode


class Verification(NamedTuple):
    """Which drafts an engine keeps; fixed for its lifetime, so that it can be recorded."""

    mode: VerifyMode = VerifyMode.STANDARD
    rates: Tensor | None = None  # [num_draft_tokens] float32 on the device: the conditional rates of the synthetic mode
    fp64_gumbel: bool = False


def verify_drafts(
    logits: Tensor,
    draft_token_ids: Tensor,
    cu_rows: Tensor,
    positions: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    *,
    draft_log_probs: Tensor | None = None,
    law_columns: Tensor | None = None,
    mode: VerifyMode = VerifyMode.STANDARD,
    rates: Tensor | None = None,
    fp64_gumbel: bool = False,
) -> RejectionOutputs:
    """Keeps a prefix of each request's drafts and adds one token of the target's; reads nothing back to the host.

    logits [num_rows, vocab] float32, bfloat16 or float16, from `process_logits`: request b owns rows cu_rows[b] to
    cu_rows[b + 1] (cu_rows [batch + 1] int32), one per draft and one more; rows past the last belong to nobody.
    draft_token_ids [batch, k] int64, -1 beyond each length. positions [batch] int64: index in the sequence of the first
    token this step emits; temperature [batch] float32 (0 = greedy) and seeds [batch] int64. draft_log_probs [batch, k,
    draft_vocab] float32: the law each draft was drawn from, its columns named by law_columns [vocab] int32 from
    `records.law_columns` (None = the target's ids). rates [>= k] float32 for the synthetic mode. All of one device.

    The noise depends on seed and position only, so a request's tokens do not depend on its batch mates. Raises
    ValueError on shapes, modes and dtypes that do not belong together.
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
            law_columns=law_columns,
            mode=mode,
            rates=rates,
        ),
        fp64_gumbel=fp64_gumbel,
    )
