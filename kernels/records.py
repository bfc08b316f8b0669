"""What goes into and comes out of the larger kernels, shared by those in Triton and their PyTorch twins."""

from enum import Enum, IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

VOCAB_BLOCK = 4096
"""Rows are summed, and tokens drawn, in blocks of this many ids. It is part of the rule: with another size the same
seed draws other tokens."""


class Stream(IntEnum):
    """The three independent noise streams; mixing two of them for one position biases the output."""

    DRAFT = 0
    ACCEPT = 1
    RECOVER = 2


class VerifyMode(Enum):
    """Which drafts are kept. Requests of temperature 0 keep a draft iff it is the argmax, unless SYNTHETIC."""

    STANDARD = "standard"  # token by token, with probability min(1, p / q)
    BLOCK = "block"  # the longest prefix that can be kept at once; never shorter than STANDARD on average
    SYNTHETIC = "synthetic"  # by given rates, whatever the tokens: a load for benchmarks

    @property
    def lossless(self) -> bool:
        """Whether the emitted tokens follow the target's law."""
        return self is not VerifyMode.SYNTHETIC


class RejectionInputs(NamedTuple):
    """One verification step. Request b owns logits rows cu_rows[b]:cu_rows[b+1]; its last row is the bonus row."""

    target_logits: Tensor  # [num_rows, vocab] float32, bfloat16 or float16; processed (temperature, masks); -inf = no
    draft_token_ids: Tensor  # [batch, k] int64; outside [0, vocab) = placeholder: rejected, never an index
    cu_rows: Tensor  # [batch + 1] int32; request b has cu_rows[b+1] - cu_rows[b] - 1 drafts (0 to k)
    positions: Tensor  # [batch] int64; index in the sequence of the first token this step emits; keys the noise
    temperature: Tensor  # [batch] float32; 0 = greedy
    seeds: Tensor  # [batch] int64
    # The normalised law of each draft, [batch, k, draft_vocab] float32; None = point mass.
    draft_log_probs: Tensor | None = None
    law_columns: Tensor | None = None  # [vocab] int32 from `law_columns`: the law's column of each id; None = identity
    mode: VerifyMode = VerifyMode.STANDARD
    rates: Tensor | None = None  # SYNTHETIC only: [>= k] float32, the chance to keep draft j once all before it were

    def check(self) -> None:
        """Raises ValueError when the fields do not belong together; reads no values, so nothing waits for a GPU."""
        if self.target_logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"target_logits must be float32, bfloat16 or float16, found {self.target_logits.dtype}")
        batch, k = self.draft_token_ids.shape
        vocab = self.target_logits.shape[1]
        expected: dict[str, tuple[Tensor, tuple[int, ...]]] = {
            "cu_rows": (self.cu_rows, (batch + 1,)),
            "positions": (self.positions, (batch,)),
            "temperature": (self.temperature, (batch,)),
            "seeds": (self.seeds, (batch,)),
        }
        law, columns = self.draft_log_probs, self.law_columns
        if law is not None:
            if law.dtype != torch.float32:
                raise ValueError(f"draft_log_probs must be float32, found {law.dtype}")
            expected["draft_log_probs"] = (law, (batch, k, vocab if columns is None else law.shape[-1]))
        if columns is not None:
            if law is None:
                raise ValueError("law_columns names columns of draft_log_probs, which is None; pass both or neither")
            expected["law_columns"] = (columns, (vocab,))
        for name, (tensor, shape) in expected.items():
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name} must be {list(shape)}, found {list(tensor.shape)}")
        if (self.rates is not None) != (self.mode is VerifyMode.SYNTHETIC):
            given = "none were given" if self.rates is None else f"the mode is {self.mode.value}"
            raise ValueError(f"synthetic verification and only that takes acceptance rates, but {given}")
        if self.rates is not None and (self.rates.ndim != 1 or self.rates.shape[0] < k):
            raise ValueError(f"rates must be one row of at least {k}, one per draft, found {list(self.rates.shape)}")


def law_columns(token_map: Tensor, vocab: int) -> Tensor:
    """The column [vocab] int32 of each target id in a law over token_map [draft_vocab] int64; -1 where it has none.

    Depends on the head only: build it once, not per step.
    """
    columns = torch.full((vocab,), -1, dtype=torch.int32, device=token_map.device)
    columns[token_map] = torch.arange(token_map.shape[0], dtype=torch.int32, device=token_map.device)
    return columns


class RejectionOutputs(NamedTuple):
    """The tokens of one step."""

    token_ids: Tensor  # [batch, k + 1] int64; -1 beyond num_emitted
    num_emitted: Tensor  # [batch] int32; accepted drafts + 1, or 0 for a failed request
    failed: Tensor  # [batch] bool; a row that was needed holds NaN or +inf, forbids every token, or does not exist


class AttentionInputs(NamedTuple):
    """Packed query rows over paged keys and values. The queries of request b are the last of its seq_lens[b] tokens."""

    q: Tensor  # [num_tokens, q_heads, width_k]
    k_plane: Tensor  # [num_blocks, block_size, kv_heads, width_k]; kv_heads divides q_heads
    v_plane: Tensor  # [num_blocks, block_size, kv_heads, width_v]
    cu_seqlens: Tensor  # [batch + 1] int32; request b has rows cu_seqlens[b]:cu_seqlens[b+1]
    seq_lens: Tensor  # [batch] int32
    block_tables: Tensor  # [batch, max_blocks] int32
    max_query_len: int  # upper bounds, known to the host
    max_seq_len: int
    scale: float
    window: int = 0  # query t sees key p only if t - window < p; 0 = every p
    chunk: int = 0  # only if p // chunk == t // chunk; 0 = every p
    softcap: float = 0.0  # c turns a score s into c * tanh(s / c); 0 = off
    sinks: Tensor | None = None  # [q_heads]; join the softmax as keys without a value
    causal: bool = True  # only p <= t; False: also the later keys of its request


def rope_heads(qkv: Tensor, cos: Tensor, sin: Tensor, k_plane: Tensor, v_plane: Tensor) -> tuple[int, int, int]:
    """(query heads, key heads, width) of qkv [rows, (q_heads + 2 * kv_heads) * width]; raises ValueError on misfits."""
    kv_heads, width = k_plane.shape[2:]
    q_heads, rest = divmod(qkv.shape[1] - 2 * kv_heads * width, width)
    if v_plane.shape != k_plane.shape or rest or q_heads < kv_heads or width % 2:
        raise ValueError(
            f"rows {list(qkv.shape)} must hold whole heads for planes {list(k_plane.shape)} and {list(v_plane.shape)}"
        )
    if cos.shape != (qkv.shape[0], width) or sin.shape != cos.shape:
        raise ValueError(
            f"cos and sin must turn whole heads, [{qkv.shape[0]}, {width}], found {list(cos.shape)}, {list(sin.shape)}"
        )
    return q_heads, kv_heads, width


SURVIVAL_PRIOR = (1.0, 4.0)
"""How firmly bias and slope are believed beforehand, as information; one draft adds at most a quarter of it."""


class SurvivalModel(NamedTuple):
    """A logistic model a position: log-odds of acceptance, all earlier drafts accepted = bias + slope * log-odds of the
    draft law's top probability. Changed in place.

    Fitted online by an information filter: each draft adds its linearised likelihood, older ones fade. A position with
    little of its own believes the position before it; the first starts by believing the confidence as it is.
    """

    coefficients: Tensor  # [k, 2] float32; bias and slope
    information: Tensor  # [k, 3] float32; of bias, of both, of slope
    evidence: Tensor  # [k, 2] float32; information times what the drafts alone say of the coefficients
