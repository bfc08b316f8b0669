"""The decoder layers of MTP layers that are plain Llama ones: ours, which serving runs by its fused kernels."""

from collections.abc import Iterable

from torch import Tensor, nn

from .base import Attend
from .decoder import DecoderConfig, DecoderLayer, KeyShape
from .layers import RMSNorm, RotaryEmbedding
from .mtp_layouts import MtpLayout


class PlainBlocks:
    """As `LibraryBlocks`, shaped by the head's own config."""

    limited = False
    first = 0

    def __init__(self, layout: MtpLayout, config: DecoderConfig) -> None:
        self.layout, self.config = layout, config
        self.key_shapes: list[KeyShape] = []
        # kept out of the head's modules: its frequencies stay float32
        self._rotary = RotaryEmbedding(config.head_dim, config.rope_parameters, config.max_position_embeddings)

    def norm(self) -> nn.Module:
        """An RMS norm, its weight NaN."""
        return RMSNorm(self.config.hidden_size, self.config.rms_norm_eps)

    def block(self, index: int) -> nn.Module:
        """Block `index`, its parameters NaN."""
        config = self.config
        self.key_shapes.append(KeyShape(config.num_kv_heads, config.head_dim, config.head_dim))
        return DecoderLayer(config, index, qk_norm=False, qkv_bias=self.layout.qkv_bias)

    def run(self, blocks: Iterable[nn.Module], first: int, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Blocks over rows x [num_tokens, hidden] or [batch, seq, hidden]."""
        if self._rotary.frequencies.device != x.device:
            self._rotary.to(x.device)
        cos, sin = self._rotary(positions)
        for block in blocks:
            x = block(x, cos, sin, attend)
        return x
