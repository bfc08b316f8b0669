"""What stands before and behind the decoder layer of an MTP layer."""

from typing import cast

import torch
from torch import Tensor, nn

from .mtp_block import LibraryBlocks, library_class, on_nothing
from .mtp_layouts import MtpLayout
from .mtp_plain import PlainBlocks


class MtpLayer(nn.Module):
    """Two halves, a projection, the family's decoder layer, a norm; and an output matrix where the family has one."""

    final_norm: nn.Module
    head: nn.Linear

    def __init__(self, layout: MtpLayout, kind: LibraryBlocks | PlainBlocks, first: int, vocab: int) -> None:
        """`first`: the number of the first of the layer's blocks."""
        super().__init__()
        hidden = kind.config.hidden_size
        self.hidden_first = layout.hidden_first
        self.embedding_norm, self.hidden_norm, self.final_norm = (kind.norm() for _ in range(3))
        self.projection = self.new_projection(hidden)
        self.first = first
        self.blocks = nn.ModuleList(kind.block(first + b) for b in range(len(layout.blocks)))
        if layout.head is not None:
            self.head = cast(nn.Linear, on_nothing(nn.Linear, hidden, vocab, bias=False))

    def new_projection(self, hidden: int) -> nn.Module:
        """What makes the decoder layer's input of both halves, its weights NaN."""
        return on_nothing(nn.Linear, 2 * hidden, hidden, bias=False)

    def enter(self, embeds: Tensor, states: Tensor) -> Tensor:
        """What goes into the first block [..., hidden]."""
        halves = [self.embedding_norm(embeds), self.hidden_norm(states)]
        return self.projection(torch.cat(halves[::-1] if self.hidden_first else halves, dim=-1))

    def leave(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """From the last block: what goes into the output head [..., hidden], and the state before the last norm."""
        return self.final_norm(x), x


class StreamsLayer(MtpLayer):
    """DeepSeek V4: states are streams side by side, [..., streams * hidden], normed and projected one by one.

    The embedding is added to each; its decoder layer mixes them; for the output head they are weighed and summed.
    """

    def __init__(self, layout: MtpLayout, kind: LibraryBlocks | PlainBlocks, first: int, vocab: int) -> None:
        assert isinstance(kind, LibraryBlocks)
        super().__init__(layout, kind, first, vocab)
        self.num_streams: int = kind.config.hc_mult
        self.collapse = on_nothing(library_class(layout, "HyperHead"), kind.config)

    def new_projection(self, hidden: int) -> nn.Module:
        return nn.ModuleDict({name: on_nothing(nn.Linear, hidden, hidden, bias=False) for name in ("e_proj", "h_proj")})

    def enter(self, embeds: Tensor, states: Tensor) -> Tensor:
        """What goes into the block [..., streams, hidden]."""
        projection, streams = cast(nn.ModuleDict, self.projection), states.unflatten(-1, (self.num_streams, -1))
        token = projection["e_proj"](self.embedding_norm(embeds))
        return projection["h_proj"](self.hidden_norm(streams)) + token[..., None, :]

    def leave(self, x: Tensor) -> tuple[Tensor, Tensor]:
        batched = x if x.dim() == 4 else x[None]
        return self.final_norm(self.collapse(batched).view(*x.shape[:-2], -1)), x.flatten(-2)
