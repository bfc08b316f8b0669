"""Multi-token prediction: the draft layers a model is published with, in its own tensor names, or fresh ones.

Row t pairs the target's state at t, its final norm applied, with the token at t + 1, row 0 included. What a layer
returns, normed, gives the draft's logits; the next draft's state is that or what it was before the norm, as the config
says. Of several layers, layer k % n makes draft k.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self, cast, get_args

import torch
from torch import Tensor, nn

from .base import (
    Attend,
    DraftOutput,
    DraftRows,
    Elsewhere,
    HeadError,
    TargetFacts,
    check_plain_logits,
    check_whole_vocabulary,
)
from .decoder import DecoderConfig, DecoderHead, KeyShape
from .model_folder import Checkpoint
from .mtp_block import LibraryBlocks
from .mtp_layer import MtpLayer, StreamsLayer
from .mtp_layouts import FRESH, LAYOUTS, Feedback, MtpLayout, layout_of
from .mtp_names import Names
from .mtp_plain import PlainBlocks
from .target_tensors import TargetTensors


@dataclass(frozen=True, kw_only=True)
class MtpConfig(DecoderConfig):
    """Which family's layers, how many, and the config of the target they are built from.

    The shape fields describe a fresh layer; those of a family follow its `block`.
    """

    network = "spectrain.heads.mtp:MtpHead"
    objective = "spectrain.train.objectives.mtp:MtpObjective"
    proposer = "spectrain.infer.proposers.mtp:MtpProposer"
    requires_final_state = True
    accepts_model = True

    layout: str
    prefix: str  # what stands before `layers.` in the checkpoint
    fused_experts: bool  # whether the checkpoint holds the experts of a layer in one tensor
    block: dict[str, Any] | None  # the target's config.json, its text part; None for a fresh layer
    feedback: Feedback  # what a draft is fed of the one before it, in training as in serving

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layout not in LAYOUTS:
            raise HeadError(f"head.layout must be one of {', '.join(LAYOUTS)}, found {self.layout!r}")
        if self.feedback not in get_args(Feedback):
            raise HeadError(f"head.feedback must be normed or raw, found {self.feedback!r}")
        if self.feedback == "normed" and LAYOUTS[self.layout].collapse is not None:
            raise HeadError(
                f"MTP layers like {self.layout}'s are fed their streams, which no norm stands behind, found "
                f"head.feedback normed; set it to null"
            )
        if self.layer_ids != (self.target.num_layers,):
            raise HeadError(
                f"MTP is conditioned on the state after the target's last layer, id {self.target.num_layers}, found "
                f"head.layer_ids {list(self.layer_ids)}; set it to null"
            )
        check_whole_vocabulary(self, "MTP")

    @classmethod
    def implied(cls, target: TargetFacts) -> dict[str, Any]:
        fresh = {"layout": FRESH, "prefix": "model.", "fused_experts": False, "block": None, "feedback": "normed"}
        return {**super().implied(target), "layer_ids": (target.num_layers,), **fresh}

    @classmethod
    def derive_from(cls, target: TargetFacts, settings: Mapping[str, Any], model: Checkpoint) -> Self:
        """The layers a checkpoint holds; raises HeadError where it holds none, or is of a family we do not know."""
        name = layout_of(model.model_types)
        if name is None:
            raise HeadError(
                f"no MTP layers are known for models of type {model.model_types[0]!r} ({model.name}); train a fresh "
                f"one by `fit --recipe mtp` without --model"
            )
        layout = LAYOUTS[name]
        count = _count(layout.count_key, model)
        found = {
            "layout": name,
            "prefix": model.prefix,
            "num_layers": 1 if layout.first_only else count,
            "fused_experts": model.holds(".experts.gate_up_proj"),
            "block": dict(model.values),
            "feedback": layout.feedback,
        }
        return cls.derive(target, {**found, **settings})

    @property
    def refused(self) -> str | None:
        """Why the engine cannot run these layers; None where it can."""
        return LAYOUTS[self.layout].refused

    def serving_config(self) -> dict[str, Any]:
        """The target's own config, as an engine that reads its MTP layers wants it.

        No engine reads a fresh layer, so it goes by a name that none knows.
        """
        if self.block is not None:
            return dict(self.block)
        return {
            "architectures": ["SpectrainLlamaMTP"],
            "model_type": "llama",
            **super().serving_config(),
            "num_hidden_layers": self.target.num_layers,
            "num_nextn_predict_layers": self.num_layers,
        }

    def elsewhere(self) -> Elsewhere:
        if self.block is None:
            return super().elsewhere()
        return Elsewhere("method mtp, back in the checkpoint, not tried", "back in the checkpoint, not tried")


class MtpHead(DecoderHead):
    """The layers of one family; `state_dict` and a load speak the checkpoint's names."""

    config: MtpConfig

    def __init__(self, config: MtpConfig) -> None:
        super().__init__()
        self.config = config
        self.layout = layout = LAYOUTS[config.layout]
        per_layer = len(layout.blocks)
        self._kind = _blocks_of(config, layout, config.num_layers * per_layer)
        new_layer = MtpLayer if layout.collapse is None else StreamsLayer
        starts = range(self._kind.first, self._kind.first + config.num_layers * per_layer, per_layer)
        self.layers = nn.ModuleList(new_layer(layout, self._kind, start, config.vocab_size) for start in starts)
        for name in ("embedding_norm", "hidden_norm", "projection", "final_norm"):
            if "{" not in getattr(layout, name).replace("{model}", ""):  # one for all layers
                for layer in self.layers[1:]:
                    setattr(layer, name, getattr(self.layers[0], name))
        self.names = Names(layout, config.prefix, config.target.num_layers, config.fused_experts)
        self.register_state_dict_post_hook(_to_checkpoint)
        self.register_load_state_dict_pre_hook(_from_checkpoint)
        if layout.final_norm == "model.norm":  # the target's own
            self.of_step(0).final_norm.requires_grad_(False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Buffers keep their type: a router's correction of its scores is not meant to be rounded."""
        before = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            owner, _, leaf = name.rpartition(".")
            module = self.get_submodule(owner)
            setattr(module, leaf, buffer.to(getattr(module, leaf).device))
        return self

    @property
    def limited(self) -> bool:
        """Whether a layer has a window or sinks."""
        return self._kind.limited

    def each(self) -> list[MtpLayer]:
        """The layers in the order of the drafts they make."""
        return cast(list[MtpLayer], list(self.layers))

    def of_step(self, step: int) -> MtpLayer:
        """The layer that makes draft `step`."""
        return self.each()[step % len(self.layers)]

    def key_shapes(self) -> tuple[KeyShape, ...]:
        return tuple(self._kind.key_shapes)

    def forward(self, rows: DraftRows, attend: Attend) -> DraftOutput:
        """One step over rows [num_tokens] or [batch, seq], of the layer whose turn it is."""
        layer = self.of_step(rows.step)
        x = layer.enter(rows.token_embeds, rows.states)
        x = self._kind.run(layer.blocks, layer.first, x, rows.positions, attend)
        normed, raw = layer.leave(x)
        return DraftOutput(normed, normed if self.config.feedback == "normed" else raw)

    def combine(self, aux_states: Tensor, target: TargetTensors) -> Tensor:
        states = aux_states[..., 0, :]
        return states if self.layout.raw_states else target.norm(states)

    def output_weight(self, target: TargetTensors, step: int = 0) -> Tensor:
        """The target's matrix [vocab, hidden], or that of the layer which makes draft `step`."""
        if self.layout.head is None:
            return target.lm_head
        return self.of_step(step).head.weight

    def logits(self, logits_states: Tensor, target: TargetTensors, step: int = 0) -> Tensor:
        return self.project(logits_states, self.output_weight(target, step))

    def initialise(self, target: TargetTensors, generator: torch.Generator) -> None:
        """Random weights, norms that change nothing; the last norm is the target's where it has one of that kind.

        Raises HeadError for a target whose logits are more than a product with its output matrix.
        """
        check_plain_logits(target, "MTP")
        with torch.no_grad():
            for name, tensor in {**dict(self.named_parameters()), **dict(self.named_buffers())}.items():
                if tensor.dim() >= 2:
                    std = min(0.02, tensor.shape[-1] ** -0.5)
                    tensor.copy_(torch.randn(tensor.shape, generator=generator) * std)
                else:
                    tensor.fill_(1.0 if name.endswith("norm.weight") else 0.0)
            if self.config.layout == FRESH and target.norm.kind == "rms" and target.norm.weight is not None:
                for layer in self.each():
                    cast(Tensor, layer.final_norm.weight).copy_(target.norm.weight)

    def start_from(self, model: Checkpoint) -> None:
        """Takes the layers of a checkpoint; raises HeadError naming the first tensor that is not there or not plain."""
        tensors = {}
        for name, like in self.state_dict().items():
            packed = next((other for other in _packed(name) if other in model), None)
            if name not in model and packed is None:
                raise HeadError(
                    f"{model.name} must hold {name} of its MTP layers, found none: commonly a quantiser dropped them; "
                    f"give the original checkpoint"
                )
            tensor = model.tensor(name if packed is None else packed)
            if packed is not None or not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
                dtype = str(tensor.dtype).removeprefix("torch.")
                raise HeadError(
                    f"the MTP layers of {model.name} are quantised, found {packed or name} in {dtype}: they run in "
                    f"bfloat16, float16 or float32; give the unquantised checkpoint, or use another method"
                )
            if tensor.shape != like.shape:
                raise HeadError(
                    f"{name} of {model.name} must have shape {list(like.shape)} by its config.json, found "
                    f"{list(tensor.shape)}; fetch the model again"
                )
            tensors[name] = tensor
        self.load_state_dict(tensors, strict=True)


def _packed(name: str) -> list[str]:
    """The names quantisers give what they made of a tensor."""
    stem = name.removesuffix("weight")
    return [f"{stem}qweight", f"{stem}weight_packed"] if stem != name else []


def _blocks_of(config: MtpConfig, layout: MtpLayout, count: int) -> LibraryBlocks | PlainBlocks:
    if layout.library is None:
        return PlainBlocks(layout, config)
    return LibraryBlocks(
        layout, config.block or config.serving_config(), config.target.num_layers if layout.goes_on else 0, count
    )


def _count(key: str | None, model: Checkpoint) -> int:
    if key is None:
        return 1
    count = int(model.values.get(key) or model.whole.get(key) or 0)
    if not count:
        raise HeadError(
            f"{model.name} has no MTP layers: {key} is {count} in its config.json; train a fresh one by `fit --recipe "
            f"mtp` without --model"
        )
    return count


def _to_checkpoint(head: MtpHead, tensors: dict[str, Tensor], prefix: str, _metadata: Any) -> None:
    ours = {name.removeprefix(prefix): tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
    tensors |= {prefix + name: tensor for name, tensor in head.names.to_checkpoint(ours).items()}


def _from_checkpoint(head: MtpHead, tensors: dict[str, Tensor], prefix: str, *_: Any) -> None:
    theirs = {name.removeprefix(prefix): tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
    expected = {**dict(head.named_parameters(remove_duplicate=False)), **dict(head.named_buffers())}
    ours, left = head.names.from_checkpoint(theirs, expected)
    tensors |= {prefix + name: tensor for name, tensor in {**left, **ours}.items()}
