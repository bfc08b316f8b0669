"""The names a checkpoint gives the tensors of MTP layers, and those our modules give them.

Ours are `layers.{i}.{part}.{rest}`, with parts `embedding_norm`, `hidden_norm`, `projection`, `blocks.{b}`,
`final_norm`, `collapse` and `head`. One of our tensors is one of the checkpoint's, except for experts: we hold all of
them in one tensor, as the library does, most checkpoints one by one.
"""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from .mtp_layouts import MtpLayout

_PARTS = re.compile(r"layers\.(\d+)\.(?:blocks\.(\d+)|(\w+))\.(.+)")
_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}


@dataclass(frozen=True)
class Names:
    """Names in one checkpoint."""

    layout: MtpLayout
    model: str  # what stands before `layers.`
    num_target_layers: int
    fused_experts: bool  # whether the checkpoint, too, holds all experts of a layer in one tensor

    def to_checkpoint(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Our tensors by the checkpoint's names; those of shared parts once. Views, no copies."""
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            names = self.of(name, tensor)
            found |= dict(zip(names, _split(tensor, len(names)), strict=True))
        return found

    def from_checkpoint(
        self, found: dict[str, Tensor], expected: dict[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The checkpoint's tensors by our names, those of `expected` whose parts are all there; and what is left."""
        tensors: dict[str, Tensor] = {}
        used: set[str] = set()
        for name, like in expected.items():
            names = self.of(name, like)
            if all(part in found for part in names):
                parts = [found[part] for part in names]
                tensors[name] = parts[0] if len(parts) == 1 else _join(parts, like)
                used.update(names)
        return tensors, {name: tensor for name, tensor in found.items() if name not in used}

    def of(self, name: str, tensor: Tensor) -> list[str]:
        """The checkpoint's names of one of our tensors, in the order of its parts."""
        match = _PARTS.fullmatch(name)
        assert match is not None, name
        layer, block, part, rest = match.groups()
        pattern = self.layout.blocks[int(block)] if block else getattr(self.layout, part)
        where = pattern.format(i=int(layer), n=self.num_target_layers + int(layer), model=self.model)
        owner, _, leaf = rest.rpartition(".experts.")
        parts = [rest]
        if owner and leaf in _EXPERTS and not self.fused_experts:
            parts = [f"{owner}.experts.{e}.{kind}.weight" for e in range(len(tensor)) for kind in _EXPERTS[leaf]]
        return [f"{where}.{self._renamed(part)}" for part in parts]

    def _renamed(self, rest: str) -> str:
        for theirs, ours in self.layout.renames:
            rest = rest.replace(ours, theirs)
        return rest


def _split(tensor: Tensor, count: int) -> list[Tensor]:
    if count == 1:
        return [tensor]
    halves = count // len(tensor)
    return [part for expert in tensor for part in expert.chunk(halves)]


def _join(parts: list[Tensor], like: Tensor) -> Tensor:
    halves = len(parts) // len(like)
    return torch.stack([torch.cat(parts[i : i + halves]) for i in range(0, len(parts), halves)])
