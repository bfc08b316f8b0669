"""Attention over paged planes: the function transformers calls, and the `attend` draft heads are given.

Everything a call needs beside q, k and v is bound to the attention module beforehand, because some families do not pass
forward keywords on to their attention.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from ..kernels import dispatch
from ..kernels.records import AttentionInputs
from .batch import PackedBatch, RequestRows
from .planes import Plane, Planes

PAGED = "spectrain_paged"
SITE = "spectrain_site"
"""The attribute of an attention module that holds its `AttentionSite`."""

PASSIVE_KEYWORDS = frozenset(
    {
        "cache",
        "deterministic",
        "dropout",
        "is_causal",
        "layer_idx",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Keywords that say nothing about what a row attends to; beside the honoured ones anything else refuses the target."""


@dataclass
class StepState:
    """What changes from step to step; one per target, shared by its sites and hooks."""

    batch: PackedBatch | None = None
    rows: RequestRows | None = None  # of the same batch, where layers have recurrent states
    states: Tensor | None = None  # [num_tokens, num_layer_ids, hidden], filled by the hooks


@dataclass(frozen=True)
class AttentionSite:
    """One attention module's place: its plane and what its mask hides."""

    name: str
    window: int  # 0 = none; a row sees itself and the window - 1 rows before it
    chunk: int  # 0 = none
    step: StepState
    plane: Plane | None = None


def register() -> None:
    """Makes `PAGED` known to transformers; only there, so that it builds no mask for it."""
    AttentionInterface.register(PAGED, paged_attention_forward)


def bind_site(module: nn.Module, planes: Planes) -> None:
    """Gives an attention module the plane its site is named after."""
    site = getattr(module, SITE)
    setattr(module, SITE, dataclasses.replace(site, plane=planes[site.name]))


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **passive: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it, for one packed row.

    query [1, heads, num_tokens, dim]; key and value [1, kv_heads, num_tokens, dim]; returns
    ([1, num_tokens, heads, value dim], None). Raises ValueError when a mask comes in or no plane is bound.
    """
    site: AttentionSite = getattr(module, SITE)
    if attention_mask is not None:
        raise ValueError(
            f"{site.name} must run without a mask, found one: it would not be honoured; do not pass a mask"
        )
    if site.plane is None or site.step.batch is None:
        raise ValueError(f"{site.name} has no cache; call Target.bind and run the model through Target.forward")
    batch = site.step.batch
    dispatch.store_kv(key[0].transpose(0, 1), value[0].transpose(0, 1), site.plane.k, site.plane.v, batch.slot_mapping)
    out = attend(
        site.plane,
        batch,
        query[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=site.window,
        chunk=site.chunk,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    return out[None], None


def attend(
    plane: Plane,
    batch: PackedBatch,
    q: Tensor,
    *,
    scale: float,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    causal: bool = True,
) -> Tensor:
    """Attends with q [num_tokens, heads, width_k] over a plane that holds this step's rows already.

    Returns [num_tokens, heads, width_v] in q's dtype; raises ValueError for a cache-only plane.
    """
    if plane.v is None:
        raise ValueError("a plane that is attended to must hold values, found a cache-only plane")
    inputs = AttentionInputs(
        q,
        plane.k,
        plane.v,
        batch.cu_seqlens,
        batch.seq_lens,
        batch.block_tables,
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len,
        scale=scale,
        window=window,
        chunk=chunk,
        softcap=softcap,
        sinks=sinks,
        causal=causal,
    )
    return dispatch.paged_attention(inputs)


class PagedAttend:
    """`heads.base.Attend` over paged planes: layer i of a draft head keeps its keys in the plane `names[i]`.

    Without `causal` a request's rows of this step see each other whatever their order.
    """

    def __init__(
        self, planes: Planes, names: Sequence[str], batch: PackedBatch, *, window: int = 0, causal: bool = True
    ) -> None:
        self._planes = [planes[name] for name in names]
        self._batch, self._window, self._causal = batch, window, causal

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int = 0, sinks: Tensor | None = None
    ) -> Tensor:
        """q [num_tokens, heads, width_k], k and v [num_tokens, kv_heads, width]; returns [num_tokens, heads, width_v].

        A layer's own `window` comes before that of all.
        """
        plane = self._planes[layer]
        dispatch.store_kv(k, v, plane.k, plane.v, self.slot_mapping)
        return self.over_stored(layer, q, window=window, sinks=sinks)

    @property
    def slot_mapping(self) -> Tensor:
        """Where each row's keys and values go [num_tokens] int64."""
        return self._batch.slot_mapping

    def plane(self, layer: int) -> Plane:
        """Where a layer keeps its keys and values."""
        return self._planes[layer]

    def over_stored(self, layer: int, q: Tensor, *, window: int = 0, sinks: Tensor | None = None) -> Tensor:
        """As a call, where the rows' keys and values are in the plane already."""
        return attend(
            *(self._planes[layer], self._batch, q),
            scale=q.shape[-1] ** -0.5,
            window=window or self._window,
            sinks=sinks,
            causal=self._causal,
        )
