"""Layers that carry a state from token to token: what they keep of each request, and how their forward is replaced.

Such a layer mixes tokens by a short causal convolution and, mostly, a recurrent state. What it keeps stands by row of
the request table and by position: the newest convolution inputs, and the state after each of the last k + 1 positions.
A step that begins at position p starts from the state after p - 1, whichever drafts were rejected before: what they
left behind is overwritten by later rows of the same positions, as in a cache plane. The state before position 0 is
zero, so that a row needs no clearing. Nothing is kept for blocks of the prefix cache, which such targets do without.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .attention import StepState
from .batch import RequestRows


@dataclass(frozen=True)
class StateSpec:
    """What one layer keeps of a request; a layer that only convolves has no recurrent state."""

    name: str
    channels: int  # of the convolution's input
    kernel_size: int
    conv_dtype: torch.dtype
    shape: tuple[int, ...] | None  # of the recurrent state
    dtype: torch.dtype

    def bytes_per_request(self, num_draft_tokens: int) -> int:
        """Convolution inputs, and a recurrent state for each position that a step may compute."""
        inputs = self.num_inputs(num_draft_tokens) * self.channels * self.conv_dtype.itemsize
        if self.shape is None:
            return inputs
        return inputs + (num_draft_tokens + 1) * torch.Size(self.shape).numel() * self.dtype.itemsize

    def num_inputs(self, num_draft_tokens: int) -> int:
        """Convolution inputs kept: those that any next step still reads, and those of rejected drafts."""
        return max(1, self.kernel_size - 1 + num_draft_tokens)


@dataclass(frozen=True)
class LayerState:
    """The tensors of one layer; position p stands at p modulo the second dimension. The last row is nobody's."""

    conv: Tensor  # [num_rows, num_inputs, channels]
    recurrent: Tensor | None  # [num_rows, num_draft_tokens + 1, *shape]


class States:
    """What the recurrent layers of a target keep of `num_rows` - 1 requests; the last row belongs to nobody."""

    def __init__(self, specs: Iterable[StateSpec], num_rows: int, num_draft_tokens: int, device: torch.device) -> None:
        self._layers: dict[str, LayerState] = {}
        for spec in specs:
            inputs = (num_rows, spec.num_inputs(num_draft_tokens), spec.channels)
            recurrent = None
            if spec.shape is not None:
                shape = (num_rows, num_draft_tokens + 1, *spec.shape)
                recurrent = torch.zeros(shape, dtype=spec.dtype, device=device)
            conv = torch.zeros(inputs, dtype=spec.conv_dtype, device=device)
            self._layers[spec.name] = LayerState(conv, recurrent)

    def __getitem__(self, name: str) -> LayerState:
        return self._layers[name]


class Mixer(Protocol):
    """One layer's mathematics, with the weights of the module it stands for."""

    def spec(self, name: str) -> StateSpec:
        """What the layer keeps of a request."""
        ...

    def mix(self, x: Tensor, state: LayerState, rows: RequestRows) -> Tensor:
        """x [num_tokens, hidden] -> [num_tokens, hidden]; reads and writes `state`."""
        ...


class MixerForward:
    """Stands in for a module's forward: hidden states [1, num_tokens, hidden] of one packed batch in and out."""

    def __init__(self, mixer: Mixer, spec: StateSpec, step: StepState) -> None:
        self.mixer, self.spec, self.step = mixer, spec, step
        self.state: LayerState | None = None

    def bind(self, states: States | None) -> None:
        """Gives the layer its own part of `states`."""
        self.state = None if states is None else states[self.spec.name]

    def __call__(self, hidden_states: Tensor, *passive: Any, **keywords: Any) -> Tensor:
        rows = self.step.rows
        if self.state is None or rows is None:
            raise ValueError(
                f"{self.spec.name} has no states; call Target.bind and run the model through Target.forward"
            )
        return self.mixer.mix(hidden_states[0], self.state, rows)[None]


def take_over(module: nn.Module, mixer: Mixer, spec: StateSpec, step: StepState) -> MixerForward:
    """Replaces the forward of one recurrent module."""
    forward = module.__dict__["forward"] = MixerForward(mixer, spec, step)
    return forward


def restore(model: nn.Module) -> None:
    """Gives every recurrent module of a model its own forward back."""
    for module in model.modules():
        if isinstance(module.__dict__.get("forward"), MixerForward):
            del module.__dict__["forward"]
