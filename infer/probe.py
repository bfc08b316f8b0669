"""The load-time probe: whether a transformers model can run packed on our own cache, and what each layer needs.

Nearly every exception among families is silent: attention that is never handed over, called twice, windowed only by its
mask or biased by a keyword. So one short forward records every attention call, and what is not understood is refused.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from .attention import PASSIVE_KEYWORDS

PROBE = "spectrain_probe"
CALLS = "spectrain_calls"
HONOURED_KEYWORDS = frozenset({"scaling", "softcap", "s_aux", "sliding_window"})


class TargetError(ValueError):
    """A target cannot be loaded or cannot be run rightly; the message names it, the reason and what to do."""


class MaskPattern:
    """Stands in for an attention mask and says which keys a query sees."""

    def __init__(self, mask_function: Callable[..., Any]) -> None:
        self._mask_function = mask_function

    def sees(self, query: int, key: int) -> bool:
        zero = torch.tensor(0)
        return bool(self._mask_function(zero, zero, torch.tensor(query), torch.tensor(key)))


@dataclass(frozen=True)
class AttentionCall:
    """What one attention module was called with."""

    kv_heads: int
    width_k: int
    width_v: int
    dtype: torch.dtype
    pattern: MaskPattern | None
    keywords: dict[str, Any]


@dataclass(frozen=True)
class AttentionLayer:
    """One attention module of the target and what its cache and mask must be."""

    module: nn.Module
    path: str
    index: int  # of its decoder layer
    kv_heads: int
    width_k: int
    width_v: int
    dtype: torch.dtype
    window: int
    chunk: int
    scale: float
    softcap: float
    sinks: bool


def probe_attention(
    model: PreTrainedModel,
    token_ids: Tensor,
    num_layers: int,
    max_length: int,
    recurrent: Mapping[int, str] | None = None,
) -> tuple[AttentionLayer, ...]:
    """Runs token_ids [seq] through `model` and returns its attention layers in order.

    `recurrent` are the paths of recurrent modules by layer. The model is left with the attention it came with. Raises
    TargetError for a model of which a layer neither calls the attention interface exactly once, nor is recurrent, nor
    treats every token by itself, or that needs something a packed row on our cache cannot give.
    """
    name = type(model).__name__
    if not model._can_set_attn_implementation():
        raise TargetError(
            f"{name} is refused: its attention does not go through transformers' attention interface (eager only), so "
            f"packed requests would attend to each other; use a target of another family"
        )
    calls = _record_calls(model, token_ids)
    by_layer: dict[int, list[tuple[str, nn.Module, AttentionCall]]] = {i: [] for i in range(num_layers)}
    for path, module, call in calls:
        by_layer.setdefault(getattr(module, "layer_idx", -1), []).append((path, module, call))
    _check_counts(name, num_layers, {layer: len(found) for layer, found in by_layer.items()}, len(calls))
    paths = {**(recurrent or {}), **{layer: found[0][0] for layer, found in by_layer.items() if found}}
    missing = [layer for layer in range(num_layers) if layer not in paths]
    if missing:
        _check_tokenwise(model, token_ids, num_layers, paths, missing)
    shapes: dict[MaskPattern, tuple[int, int]] = {}
    return tuple(
        _layer(name, layer, *found[0], max_length, shapes) for layer, found in sorted(by_layer.items()) if found
    )


def find_layers(model: nn.Module, num_layers: int, paths: Mapping[int, str]) -> nn.ModuleList:
    """The decoder layers: the list of `num_layers` modules whose member i holds the module at `paths[i]`."""
    found = _lists_around(model, num_layers, paths)
    if len(found) != 1:
        raise TargetError(
            f"{type(model).__name__} is refused: expected one list of {num_layers} decoder layers around its attention "
            f"modules, found {len(found)}; use a target of another family"
        )
    return found[0]


def first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The hidden states a layer was called with."""
    return args[0] if args else kwargs.get("hidden_states")


def first_output(output: Any) -> Tensor:
    """The hidden states a layer returned."""
    return output[0] if isinstance(output, tuple) else output


def _record_calls(model: PreTrainedModel, token_ids: Tensor) -> list[tuple[str, nn.Module, AttentionCall]]:
    AttentionInterface.register(PROBE, _probe_attention_forward)
    AttentionMaskInterface.register(PROBE, _probe_mask)
    before = model.config._attn_implementation or "eager"
    model.set_attn_implementation(PROBE)
    positions = torch.arange(len(token_ids), device=token_ids.device)
    try:
        with torch.no_grad():
            # every row is asked for by name, as in a step: some families cut the mask to the last rows otherwise
            model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=positions)
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        raise TargetError(
            f"{type(model).__name__} is refused: it needs more than attention over cached keys (its forward failed "
            f"without an ordinary mask: {type(error).__name__}: {first_line}); use a target of another family"
        ) from error
    finally:
        model.set_attn_implementation(before)
        recorded: list[tuple[str, nn.Module, AttentionCall]] = [
            (path, module, call) for path, module in model.named_modules() for call in module.__dict__.pop(CALLS, ())
        ]
    return recorded


def _probe_mask(*args: Any, mask_function: Callable[..., Any], **kwargs: Any) -> MaskPattern:
    return MaskPattern(mask_function)


def _probe_attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **keywords: Any
) -> tuple[Tensor, None]:
    call = AttentionCall(
        kv_heads=key.shape[1],
        width_k=key.shape[-1],
        width_v=value.shape[-1],
        dtype=key.dtype,
        pattern=attention_mask,
        keywords={k: v for k, v in keywords.items() if v is not None and (v is not False or k == "is_causal")},
    )
    module.__dict__.setdefault(CALLS, []).append(call)
    if key.shape[2] != query.shape[2] or key.shape[0] != 1:
        raise ValueError(f"attention over {key.shape[2]} keys for {query.shape[2]} tokens")
    out = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    return out.transpose(1, 2), None


def _check_counts(name: str, num_layers: int, counts: dict[int, int], total: int) -> None:
    if total == 0:
        raise TargetError(
            f"{name} is refused: none of its {num_layers} layers calls the attention interface (eager only), so packed "
            f"requests would attend to each other; use a target of another family"
        )
    repeated = sorted(layer for layer, count in counts.items() if count > 1)
    if repeated:
        raise TargetError(
            f"{name} is refused: layer {repeated[0]} calls attention {counts[repeated[0]]} times a step where exactly "
            f"one call is expected (looped or differential attention); use a target of another family"
        )
    unknown = sorted(layer for layer in counts if not 0 <= layer < num_layers)
    if unknown:
        raise TargetError(
            f"{name} is refused: attention is called for layer {unknown[0]}, expected 0..{num_layers - 1} only; use a "
            f"target of another family"
        )


def _lists_around(model: nn.Module, num_layers: int, paths: Mapping[int, str]) -> list[nn.ModuleList]:
    return [
        module
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == num_layers
        and all(inner.startswith(f"{path}.{i}.") for i, inner in paths.items())
    ]


def _check_tokenwise(
    model: PreTrainedModel, token_ids: Tensor, num_layers: int, paths: Mapping[int, str], missing: Sequence[int]
) -> None:
    """Layers without attention and without a known state must not look from one token at another."""
    found = _lists_around(model, num_layers, paths)
    mixing = {}
    if len(found) == 1:
        mixing = {i: kind for i in missing if (kind := _mixing_kind(model, found[0][i], token_ids)) is not None}
        missing = list(mixing)
    if missing:
        kinds = f" of {', '.join(sorted(set(mixing.values())))}" if mixing else ""
        raise TargetError(
            f"{type(model).__name__} is refused: {len(missing)} of its {num_layers} layers (first: {missing[0]}) call "
            f"no attention and carry a state{kinds} of no known kind (recurrent or convolution state, which would run "
            f"on from one request into the next); use a target of another family"
        )


def _mixing_kind(model: PreTrainedModel, layer: nn.Module, token_ids: Tensor) -> str | None:
    """What in a layer makes its last token depend on the others; None if nothing does."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = []
    handle = layer.register_forward_hook(
        lambda module, args, kwargs, output: calls.append((args, kwargs, output)), with_kwargs=True
    )
    positions = torch.arange(len(token_ids), device=token_ids.device)
    with torch.no_grad():
        try:
            model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        finally:
            handle.remove()
        args, kwargs, output = calls[0]
        hidden = first_tensor(args, kwargs)
        other = torch.cat([hidden[:, :-1].roll(1, dims=1), hidden[:, -1:]], dim=1)
        args, kwargs = ((other, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": other})
        expected, last = first_output(output)[:, -1], first_output(layer(*args, **kwargs))[:, -1]
    if (last - expected).norm() <= 0.01 * (expected - hidden[:, -1]).norm():
        return None
    inner = (type(module).__name__ for module in layer.modules() if isinstance(getattr(module, "layer_idx", None), int))
    return next((kind for kind in inner if kind != type(layer).__name__), type(layer).__name__)


def _layer(
    name: str,
    layer: int,
    path: str,
    module: nn.Module,
    call: AttentionCall,
    max_length: int,
    shapes: dict[MaskPattern, tuple[int, int]],
) -> AttentionLayer:
    unknown = sorted(set(call.keywords) - PASSIVE_KEYWORDS - HONOURED_KEYWORDS)
    if unknown:
        raise TargetError(
            f"{name} is refused: layer {layer} hands its attention {', '.join(unknown)}, which paged attention does "
            f"not honour; use a target of another family"
        )
    if call.keywords.get("is_causal") is False:
        raise TargetError(f"{name} is refused: layer {layer} is not causal; use a causal language model")
    given = int(call.keywords.get("sliding_window", 0))
    if isinstance(call.pattern, MaskPattern):
        if call.pattern not in shapes:  # layers of one kind share their mask
            shapes[call.pattern] = mask_shape(f"{name} is refused: layer {layer}", call.pattern, max_length)
        window, chunk = shapes[call.pattern]
        if given and given < max_length and (window != given or chunk):
            raise TargetError(
                f"{name} is refused: layer {layer} is given sliding_window={given} but its mask shows window={window}, "
                f"chunk={chunk}; use a target of another family"
            )
    elif call.pattern is None:
        window, chunk = given, 0
    else:
        raise TargetError(
            f"{name} is refused: layer {layer} builds its own mask ({type(call.pattern).__name__}), which paged "
            f"attention does not honour; use a target of another family"
        )
    return AttentionLayer(
        module,
        path,
        layer,
        call.kv_heads,
        call.width_k,
        call.width_v,
        call.dtype,
        window,
        chunk,
        scale=float(call.keywords.get("scaling", call.width_k**-0.5)),
        softcap=float(call.keywords.get("softcap", 0.0)),
        sinks="s_aux" in call.keywords,
    )


def mask_shape(prefix: str, pattern: MaskPattern, max_length: int) -> tuple[int, int]:
    """(window, chunk) of a causal mask over `max_length` positions, 0 where there is none; refuses any other mask."""
    window = chunk = 0
    last = max_length - 1
    if not pattern.sees(last, 0):
        low, high = 0, last  # key 0 is seen from `low` and hidden from `high`
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if pattern.sees(middle, 0) else (low, middle)
        size = high
        if size == 1 or pattern.sees(size, size - 1):
            window = size
        else:
            chunk = size
    size = window or chunk or 8
    marks = sorted({min(q, last) for q in (0, 1, size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1, last)})
    for query in marks:
        first = max(0, query - window + 1) if window else query // chunk * chunk if chunk else 0
        strides = (query - (1 << i) for i in range(query.bit_length()))
        for key in {k for k in (first - 1, first, query, query + 1, 0, *strides) if k >= 0}:
            if pattern.sees(query, key) != (first <= key <= query):
                raise TargetError(
                    f"{prefix} has a mask that is neither causal, windowed nor chunked (query {query}, key {key}), "
                    f"which paged attention does not honour; use a target of another family"
                )
    return window, chunk
