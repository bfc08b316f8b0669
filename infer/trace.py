"""Finds a target's embeddings, final norm, output head and logit transform by tracing one forward.

Names and config keys lie (a scaling key divides in one family and multiplies in another; a norm may store w or 1 + w),
so each part is found by which tensor it receives and measured by what it does to known inputs.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..heads.target_tensors import FinalNorm, TargetTensors
from .probe import TargetError, first_output, first_tensor


@dataclass
class Trace:
    """What one plain forward of a document showed outside the layers."""

    logits: Tensor  # [seq, vocab] float32
    layer_inputs: list[Tensor]  # L tensors, as they entered the layers
    last_state: Tensor  # the raw output of the last layer
    uses: list[tuple[str, nn.Module, Tensor, Any]] = field(default_factory=list)  # path, module, first input, output


def trace_forward(model: PreTrainedModel, layers: nn.ModuleList, token_ids: Tensor) -> Trace:
    """Runs token_ids [seq] alone through the model's present attention, without cache, and records."""
    inside = {id(module) for module in layers.modules()}
    layer_inputs: list[Tensor] = []
    last: list[Tensor] = []
    uses: list[tuple[str, nn.Module, Tensor, Any]] = []
    handles = [layers[-1].register_forward_hook(lambda module, args, output: last.append(first_output(output)))]
    for layer in layers:
        handles.append(
            layer.register_forward_pre_hook(
                lambda module, args, kwargs: layer_inputs.append(first_tensor(args, kwargs)), with_kwargs=True
            )
        )
    for path, module in model.named_modules():
        if id(module) not in inside:
            handles.append(module.register_forward_hook(_recorder(path, uses), with_kwargs=True))
    try:
        with torch.no_grad():
            out = _run(model, token_ids)
    finally:
        for handle in handles:
            handle.remove()
    return Trace(out.logits[0].float(), layer_inputs, last[0], uses)


def _run(model: PreTrainedModel, token_ids: Tensor) -> Any:
    rows = torch.arange(len(token_ids), device=token_ids.device)
    return model(input_ids=token_ids[None], position_ids=rows[None], use_cache=False, logits_to_keep=rows)


def _recorder(path: str, uses: list[tuple[str, nn.Module, Tensor, Any]]) -> Any:
    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        first = args[0] if args else next((v for v in kwargs.values() if isinstance(v, Tensor)), None)
        if isinstance(first, Tensor):
            uses.append((path, module, first, output))

    return record


def trace_tensors(model: PreTrainedModel, trace: Trace, token_ids: Tensor, hidden_size: int) -> TargetTensors:
    """The target's head as a record verified against the traced logits; TargetError where no record can express it."""
    name = type(model).__name__
    head = _find_head(model, trace)
    embedding = _find_embedding(model, trace, token_ids)
    embed_tokens, lm_head = embedding.get_parameter("weight").detach(), head.get_parameter("weight").detach()
    if embed_tokens.shape[1] != hidden_size or lm_head.shape[1] != hidden_size:
        raise TargetError(
            f"{name} is refused for draft heads: embeddings are {embed_tokens.shape[1]} and the output head "
            f"{lm_head.shape[1]} wide where states are {hidden_size} wide (a projection stands between); "
            f"use another target"
        )
    state = trace.last_state
    norms = [(path, m, out) for path, m, first, out in trace.uses if first is state and isinstance(out, Tensor)]
    head_input = next(first for _, module, first, _ in trace.uses if module is head)
    if norms:
        path, module, normed = norms[0]
        norm = measure_norm(f"{name}'s {path}", module, hidden_size, state.device)
    else:
        normed, norm = state, FinalNorm("none", None, None, 0.0)
    input_scale = _ratio(head_input, normed)
    bias = getattr(head, "bias", None)
    if input_scale is None or (bias is not None and input_scale != 1.0):
        same = (path for path, _, x, _ in trace.uses if x.shape == normed.shape and torch.equal(x, normed))
        raise TargetError(
            f"{name} is refused for draft heads: {next(same, 'a transform')} stands between the final norm and the "
            f"output head, which a norm, one matrix and a scale cannot express; use another target"
        )
    scale, softcap = measure_logit_transform(model, head, token_ids)
    tensors = TargetTensors(
        embed_tokens=embed_tokens,
        lm_head=lm_head,
        lm_head_bias=None if bias is None else bias.detach(),
        norm=norm,
        logit_scale=_snap(scale * input_scale),
        softcap=softcap,
    )
    _verify(name, tensors, state.reshape(-1, hidden_size), trace.logits)
    return tensors


def _find_head(model: PreTrainedModel, trace: Trace) -> nn.Module:
    vocab = trace.logits.shape[-1]
    called = [module for _, module, _, _ in trace.uses]
    known = model.get_output_embeddings()
    if known is not None and any(module is known for module in called):
        return known
    linears = [module for module in called if isinstance(module, nn.Linear) and module.out_features == vocab]
    if not linears:
        raise TargetError(
            f"{type(model).__name__} is refused for draft heads: no linear output head of {vocab} rows was called; use "
            f"another target"
        )
    return linears[-1]


def _find_embedding(model: PreTrainedModel, trace: Trace, token_ids: Tensor) -> nn.Module:
    for _, module, first, output in trace.uses:
        weight = getattr(module, "weight", None)
        if (
            isinstance(weight, Tensor)
            and weight.dim() == 2
            and isinstance(output, Tensor)
            and not first.is_floating_point()
            and torch.equal(first.reshape(-1), token_ids)
        ):
            return module
    raise TargetError(
        f"{type(model).__name__} is refused for draft heads: no embedding table was called with the token ids; use "
        f"another target"
    )


def _ratio(scaled: Tensor, base: Tensor) -> float | None:
    """The constant c with scaled = c * base, 1.0 exactly where they are equal, None where there is none."""
    if scaled.numel() != base.numel():
        return None
    wide, reference = scaled.double().flatten(), base.double().flatten()
    if torch.equal(wide, reference):
        return 1.0
    ratio = float((wide @ reference) / (reference @ reference))
    error = (wide - ratio * reference).abs().max() / wide.abs().max()
    return ratio if error < 4 * torch.finfo(scaled.dtype).eps else None


@torch.no_grad()
def measure_norm(name: str, module: nn.Module, hidden_size: int, device: torch.device) -> FinalNorm:
    """Kind, effective weight, bias and eps of a norm module, from its outputs on known inputs in float32."""
    norm = copy.deepcopy(module).float()
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(8, hidden_size, generator=generator).to(device)
    signs = torch.where(random[:1] < 0, -1.0, 1.0)
    bias = norm(torch.zeros_like(signs))[0].float()
    shifted = norm(random + 1.0)
    kind = "layer" if torch.allclose(shifted, norm(random), rtol=1e-3, atol=1e-3) else "rms"
    centred = signs - signs.mean() if kind == "layer" else signs
    unit = centred * torch.rsqrt(centred.square().mean())
    weight = ((norm(1e3 * signs) - bias) / unit)[0]
    eps = 0.0
    for exponent in range(1, 8):
        size = 10.0**-exponent
        ratio = ((norm(size * signs) - bias) / (weight * unit))[0][weight.abs() > 1e-3].median().item()
        if 0.2 < ratio < 0.9:
            eps = float(f"{size**2 * float(centred.square().mean()) * (ratio**-2 - 1):.3g}")
            break
    measured = FinalNorm(kind, weight, bias if bool(bias.any()) else None, eps)
    for inputs in (random, 30.0 * random, 0.01 * random + 0.001):
        expected = norm(inputs)
        if not torch.allclose(measured(inputs), expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max())):
            raise TargetError(
                f"{name} is refused for draft heads: the final norm is neither an RMS nor a layer norm; use "
                f"another target"
            )
    return measured


@torch.no_grad()
def measure_logit_transform(model: PreTrainedModel, head: nn.Module, token_ids: Tensor) -> tuple[float, float | None]:
    """(scale s, softcap c or None) of what the model does to its head's output y: s * y, or c * tanh(s * y / c).

    The head's output is replaced by a ramp of known values from 1e-3 to 1e6, so that neither depends on this input.
    """
    ramps: list[Tensor] = []

    def replace(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        half = torch.logspace(-3, 6, (output.numel() + 1) // 2, device=output.device)
        ramps.append(torch.cat([half, -half])[: output.numel()].view(output.shape))
        return ramps[-1]

    handle = head.register_forward_hook(replace)
    try:
        logits = _run(model, token_ids).logits.flatten().double()
    finally:
        handle.remove()
    ramp = ramps[-1].flatten().double()
    slope, top = float(logits[0] / ramp[0]), float(logits[: (len(ramp) + 1) // 2].max())
    softcap = None if top > 0.5 * slope * float(ramp.max()) else _snap(top)
    scale = _snap(slope)
    expected = scale * ramp if softcap is None else softcap * torch.tanh(scale * ramp / softcap)
    if logits.shape != expected.shape or not torch.allclose(logits, expected, rtol=1e-4, atol=1e-6):
        raise TargetError(
            f"{type(model).__name__} is refused for draft heads: what it does to its head's output is neither a scale "
            f"nor a softcap; use another target"
        )
    return scale, softcap


def _snap(value: float) -> float:
    """Rounds a measured constant to the six digits float32 gives."""
    return float(f"{value:.6g}")


def _verify(name: str, tensors: TargetTensors, states: Tensor, logits: Tensor) -> None:
    errors = (tensors.logits(states) - logits).norm(dim=-1) / logits.norm(dim=-1).clamp(min=1e-6)
    error, bound = errors.max().item(), 8 * torch.finfo(states.dtype).eps + 1e-5
    if not error <= bound:
        raise TargetError(
            f"{name} is refused for draft heads: its logits rebuilt from norm, head, scale and softcap are off by "
            f"{error:.2g} of their size, expected at most {bound:.2g}; use another target"
        )
