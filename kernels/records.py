"""What goes into and comes out of the rejection pipeline, shared by the Triton kernels and their PyTorch twins."""

from enum import IntEnum
from typing import NamedTuple

from torch import Tensor


class Stream(IntEnum):
    """The three independent noise streams; mixing two of them for one position biases the output."""

    DRAFT = 0
    ACCEPT = 1
    RECOVER = 2


class RejectionInputs(NamedTuple):
    """One verification step. Request b owns logits rows cu_rows[b]:cu_rows[b+1]; its last row is the bonus row."""

    target_logits: Tensor  # [num_rows, vocab] float32; processed (temperature, masks); -inf = forbidden
    draft_token_ids: Tensor  # [batch, k] int64; outside [0, vocab) = placeholder: rejected, never an index
    cu_rows: Tensor  # [batch + 1] int32; request b has cu_rows[b+1] - cu_rows[b] - 1 drafts (0 to k)
    positions: Tensor  # [batch] int64; index in the sequence of the first token this step emits; keys the noise
    temperature: Tensor  # [batch] float32; 0 = greedy
    seeds: Tensor  # [batch] int64
    # The normalised law of each draft, [batch, k, draft_vocab] float32; None = point mass.
    draft_log_probs: Tensor | None = None
    token_map: Tensor | None = None  # [draft_vocab] int64; ascending target ids of its columns; None = identity

    def check_shapes(self) -> None:
        """Raises ValueError when the shapes do not belong together; reads no values, so nothing waits for a GPU."""
        batch, k = self.draft_token_ids.shape
        vocab = self.target_logits.shape[1]
        expected: dict[str, tuple[Tensor, tuple[int, ...]]] = {
            "cu_rows": (self.cu_rows, (batch + 1,)),
            "positions": (self.positions, (batch,)),
            "temperature": (self.temperature, (batch,)),
            "seeds": (self.seeds, (batch,)),
        }
        law = self.draft_log_probs
        if law is not None:
            columns = vocab if self.token_map is None else self.token_map.shape[0]
            expected["draft_log_probs"] = (law, (batch, k, columns))
        elif self.token_map is not None:
            raise ValueError("token_map names the columns of draft_log_probs, which is None; pass both or neither")
        for name, (tensor, shape) in expected.items():
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name} must be {list(shape)}, found {list(tensor.shape)}")


class RejectionOutputs(NamedTuple):
    """The tokens of one step."""

    token_ids: Tensor  # [batch, k + 1] int64; -1 beyond num_emitted
    num_emitted: Tensor  # [batch] int32; accepted drafts + 1, or 0 for a failed request
    failed: Tensor  # [batch] bool; a row that was needed holds NaN or +inf, or forbids every token


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
