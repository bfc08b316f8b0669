"""The decoder layer of an MTP layer: the class transformers builds the target with, its attention handed to us.

The library's own code computes everything but attention, which goes through its attention interface to the caller's
`attend`. Parameters are created as NaN, without a draw from any generator.
"""

import copy
import importlib
import inspect
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .base import Attend, HeadError
from .decoder import KeyShape
from .mtp_layouts import MtpLayout

ATTENTION = "spectrain_mtp"
CALL = "spectrain_mtp_call"
NUMBER = "spectrain_mtp_number"


@dataclass
class AttentionCall:
    """What the attention modules of one head share: the caller's `attend` while a forward runs."""

    attend: Attend | None = None
    flat: bool = False  # rows come as [num_tokens], which the library sees as a batch of one
    limited: bool = False  # whether a layer has a window or sinks, which training's attention knows nothing of


def library_class(layout: MtpLayout, kind: str) -> Any:
    """A class of the family in transformers, such as its Config, DecoderLayer or RMSNorm.

    Raises HeadError where the installed version has none.
    """
    assert layout.library is not None
    name, prefix = layout.library.split(":")
    file = "configuration" if kind == "Config" else "modeling"
    try:
        module = importlib.import_module(f"transformers.models.{name}.{file}_{name}")
    except ImportError as error:
        raise HeadError(f"MTP layers like {name}'s need a transformers that has {name}; upgrade it") from error
    found = getattr(module, f"{prefix}Text{kind}", None) or getattr(module, f"{prefix}{kind}", None)
    if found is None:
        raise HeadError(f"MTP layers like {name}'s need transformers' {prefix}{kind}, found none; upgrade transformers")
    return found


def block_config(layout: MtpLayout, values: Mapping[str, Any], num_blocks: int) -> Any:
    """The library's config for blocks 0, 1, ... of MTP layers, from a target's `config.json`.

    What that says of MTP layers itself, such as `mtp_layer_types`, comes before the layout's word.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attention_forward)
    values = dict(values)
    if layout.goes_on:
        values |= {"num_hidden_layers": values["num_hidden_layers"] + num_blocks, str(layout.count_key): 0}
    config = library_class(layout, "Config").from_dict(copy.deepcopy(values))
    for key, value in layout.set.items():
        if isinstance(value, list):
            repeats = num_blocks // len(value) + 1
            setattr(config, key, list(values.get(f"mtp_{key}") or value * repeats)[:num_blocks])
        else:
            setattr(config, key, value)
    config._attn_implementation = ATTENTION
    config._experts_implementation = "grouped_mm"
    return config


def norm_eps(config: Any) -> float:
    """What keeps a family's norms from dividing by zero."""
    return getattr(config, "rms_norm_eps", None) or config.layer_norm_epsilon


def on_nothing(cls: Any, *args: Any, **kwargs: Any) -> nn.Module:
    """A module whose parameters and buffers are NaN, built without initialising any."""
    device = torch.get_default_device()
    with torch.device("meta"):
        module = cls(*args, **kwargs)
    held = module.state_dict().keys()
    lost = [name for name, _ in module.named_buffers() if name not in held]
    if lost:
        raise HeadError(f"{cls.__name__} holds {lost[0]} outside its checkpoint, which an MTP layer cannot; report it")
    module.to_empty(device=device)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.fill_(math.nan)
    return module


class Rotary:
    """The family's rotary embedding, kept out of the head's modules: its frequencies stay float32."""

    def __init__(self, layout: MtpLayout, config: Any) -> None:
        self._module = library_class(layout, "RotaryEmbedding")(config) if layout.rotary else None
        by_type = self._module is not None and "layer_type" in inspect.signature(self._module.forward).parameters
        self._types: list[str] | None = config.layer_types if by_type else None
        kinds: list[str] = getattr(self._module, "layer_types", [])
        # where kinds of embeddings are no kinds of layers, a layer is given all of them and takes its own
        self._kinds = None if self._types is None or set(self._types) <= set(kinds) else kinds

    def __call__(self, x: Tensor, positions: Tensor, block: int) -> Any:
        """cos and sin of a block for x [batch, seq, ...] at positions [batch, seq], in x's dtype."""
        if self._module is None:
            return None
        if next(self._module.buffers()).device != x.device:
            self._module.to(x.device)
        if self._kinds is not None:
            return {kind: self._module(x, positions, layer_type=kind) for kind in self._kinds}
        return self._module(x, positions, **({} if self._types is None else {"layer_type": self._types[block]}))


class PreNormBlock(nn.Module):
    """A decoder layer of a family whose own layers are of another build, around its attention and its dense MLP."""

    def __init__(self, layout: MtpLayout, config: Any, index: int) -> None:
        super().__init__()
        norm, hidden, eps = library_class(layout, "RMSNorm"), config.hidden_size, norm_eps(config)
        self.input_layernorm, self.post_attention_layernorm = norm(hidden, eps=eps), norm(hidden, eps=eps)
        self.self_attn = library_class(layout, "MLA")(config, index)
        self.mlp = library_class(layout, "MLP")(config, config.ffn_hidden_size)

    def forward(self, x: Tensor, **passed: Any) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), **passed)[0]
        return x + self.mlp(self.post_attention_layernorm(x))


class SandwichBlock(nn.Module):
    """A decoder layer with a norm before and behind each of its halves, around the family's attention and experts."""

    def __init__(self, layout: MtpLayout, config: Any, index: int) -> None:
        super().__init__()
        norm, hidden, eps = library_class(layout, "RMSNorm"), config.hidden_size, norm_eps(config)
        self.input_layernorm, self.post_attention_layernorm = norm(hidden, eps=eps), norm(hidden, eps=eps)
        self.pre_mlp_layernorm, self.post_mlp_layernorm = norm(hidden, eps=eps), norm(hidden, eps=eps)
        self.self_attn = library_class(layout, "Attention")(config, index)
        self.mlp = library_class(layout, "MoE")(config)

    def forward(self, x: Tensor, **passed: Any) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), **passed)[0])
        return x + self.post_mlp_layernorm(self.mlp(self.pre_mlp_layernorm(x)))


OWN_BLOCKS: dict[str, type[nn.Module]] = {kind.__name__: kind for kind in (PreNormBlock, SandwichBlock)}


class LibraryBlocks:
    """The decoder layers of one head as transformers' classes, and what they share."""

    def __init__(self, layout: MtpLayout, values: Mapping[str, Any], first: int, count: int) -> None:
        """`first`: the number in the config, `values`, of the first of `count` blocks."""
        self.layout, self.first = layout, first
        self.config = block_config(layout, values, count)
        self.key_shapes: list[KeyShape] = []
        self._rotary, self._call = Rotary(layout, self.config), AttentionCall()

    @property
    def limited(self) -> bool:
        """Whether a block has a window or sinks."""
        return self._call.limited

    def norm(self) -> nn.Module:
        """A norm of the family's kind, its weight NaN."""
        return on_nothing(library_class(self.layout, "RMSNorm"), self.config.hidden_size, eps=norm_eps(self.config))

    def block(self, index: int) -> nn.Module:
        """Block `index` of the config, its parameters NaN; its attention is numbered and its keys measured."""
        own = OWN_BLOCKS.get(self.layout.block_class)
        if own is not None:
            block = on_nothing(own, self.layout, self.config, index)
        else:
            block = on_nothing(library_class(self.layout, self.layout.block_class), self.config, index)
        modules = [m for m in block.modules() if type(m).__name__.endswith(("Attention", "MLA"))]
        if len(modules) > 1:
            raise HeadError(f"{type(block).__name__} attends {len(modules)} times, an MTP layer does once; report it")
        for module in modules:
            setattr(module, CALL, self._call)
            setattr(module, NUMBER, len(self.key_shapes))
            self.key_shapes.append(self._probe(block, index))
        return block

    def run(self, blocks: Iterable[nn.Module], first: int, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Blocks `first`, `first` + 1, ... over rows x [num_tokens, ...] or [batch, seq, ...]."""
        flat = positions.dim() == 1
        if flat:
            x, positions = x[None], positions[None]
        self._call.attend, self._call.flat = attend, flat
        try:
            for index, block in enumerate(blocks, start=first):
                out = block(
                    x,
                    attention_mask=None,
                    position_embeddings=self._rotary(x, positions, index),
                    position_ids=positions,
                )
                x = out[0] if isinstance(out, tuple) else out
        finally:
            self._call.attend = None
        return x[0] if flat else x

    def _probe(self, block: nn.Module, index: int) -> KeyShape:
        def see(number: int, q: Tensor, k: Tensor, v: Tensor, **extras: Any) -> Tensor:
            self._call.limited |= bool(extras)
            raise _Seen(KeyShape(k.shape[-2], k.shape[-1], v.shape[-1]))

        width = self.config.hidden_size
        shape = (width,) if self.layout.collapse is None else (self.config.hc_mult, width)
        try:
            self.run([block], index, torch.zeros(1, *shape), torch.zeros(1, dtype=torch.int64), see)
        except _Seen as seen:
            return seen.args[0]
        raise HeadError(
            f"the attention of {type(block).__name__} does not go through transformers' interface; report it"
        )


class _Seen(Exception):
    """Carries what attention was called with out of a block whose rest need not run."""


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **passive: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it, on [batch, heads, seq, dim] each; returns [batch, seq, heads, dim]."""
    call: AttentionCall = getattr(module, CALL)
    assert call.attend is not None and attention_mask is None
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    plain = q.shape[-1] ** -0.5
    if scaling is not None and scaling != plain:
        q = q * (scaling / plain)  # `attend` divides by the root of the width
    if call.flat:
        q, k, v = q[0], k[0], v[0]
    given = {"window": sliding_window, "sinks": s_aux}
    extras = {name: value for name, value in given.items() if value is not None}
    out = call.attend(getattr(module, NUMBER), q, k, v, **extras)
    return (out[None] if call.flat else out), None
