"""The few tensors of a target that heads and objectives need: embeddings, final norm, output head.

A plain record passed to calls, never a submodule, so that it is absent from state dicts, optimisers, DDP and FSDP.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


@dataclass(frozen=True)
class FinalNorm:
    """The norm between the last layer and the output head.

    `weight` is what multiplies the normalised state: 1 + w is already added for families that store w.
    """

    kind: Literal["rms", "layer", "none"]
    weight: Tensor | None  # [hidden]
    bias: Tensor | None  # [hidden]
    eps: float

    def __call__(self, states: Tensor) -> Tensor:
        """Normalises [..., hidden] in float32 and returns the dtype it was given."""
        if self.kind == "none":
            return states
        wide = states.float()
        if self.kind == "layer":
            wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.weight is not None:
            wide = wide * self.weight.float()
        if self.bias is not None:
            wide = wide + self.bias.float()
        return wide.to(states.dtype)


@dataclass(frozen=True)
class TargetTensors:
    """Raw tensors of a target, and how raw hidden states become its logits."""

    embed_tokens: Tensor  # [vocab, hidden], raw rows: no scale, no positions
    lm_head: Tensor  # [vocab, hidden]
    lm_head_bias: Tensor | None  # [vocab]
    norm: FinalNorm
    logit_scale: float = 1.0
    softcap: float | None = None

    def logits(self, states: Tensor) -> Tensor:
        """Target logits [..., vocab] float32 of the raw states at id L [..., hidden]: norm, head, scale, softcap."""
        return self.logits_of_normed(self.norm(states))

    def logits_of_normed(self, normed: Tensor, vocab_rows: Tensor | None = None) -> Tensor:
        """Logits [..., vocab or len(vocab_rows)] float32 of states the final norm was already applied to."""
        weight = self.lm_head if vocab_rows is None else self.lm_head[vocab_rows]
        logits = torch.nn.functional.linear(normed, weight.to(normed.dtype)).float()
        if self.lm_head_bias is not None:
            bias = self.lm_head_bias if vocab_rows is None else self.lm_head_bias[vocab_rows]
            logits = logits + bias.float()
        return self.shape_logits(logits)

    def shape_logits(self, logits: Tensor) -> Tensor:
        """Applies the logit scale and the softcap to logits that come straight from the head."""
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Self:
        """The same record on another device; `dtype` changes embeddings and head, the norm stays float32."""
        tied = self.embed_tokens is self.lm_head or self.embed_tokens.data_ptr() == self.lm_head.data_ptr()
        embed = self.embed_tokens.to(device, dtype)
        return dataclasses.replace(
            self,
            embed_tokens=embed,
            lm_head=embed if tied else self.lm_head.to(device, dtype),
            lm_head_bias=None if self.lm_head_bias is None else self.lm_head_bias.to(device),
            norm=dataclasses.replace(
                self.norm,
                weight=None if self.norm.weight is None else self.norm.weight.to(device),
                bias=None if self.norm.bias is None else self.norm.bias.to(device),
            ),
        )

    def save(self, path: Path) -> None:
        """Writes one safetensors file; tied embeddings are stored once, scalars go into the file's metadata."""
        tensors = {
            "embed_tokens": self.embed_tokens,
            "lm_head": self.lm_head,
            "lm_head_bias": self.lm_head_bias,
            "norm.weight": self.norm.weight,
            "norm.bias": self.norm.bias,
        }
        if self.embed_tokens.data_ptr() == self.lm_head.data_ptr():
            del tensors["lm_head"]
        scalars = {
            "norm_kind": self.norm.kind,
            "norm_eps": self.norm.eps,
            "logit_scale": self.logit_scale,
            "softcap": self.softcap,
        }
        present = {name: t.detach().cpu().contiguous() for name, t in tensors.items() if t is not None}
        save_file(present, path, metadata={"spectrain": json.dumps(scalars)})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads what `save` wrote."""
        with safe_open(path, framework="pt") as file:
            scalars = json.loads(file.metadata()["spectrain"])
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
        embed = tensors["embed_tokens"]
        return cls(
            embed_tokens=embed,
            lm_head=tensors.get("lm_head", embed),
            lm_head_bias=tensors.get("lm_head_bias"),
            norm=FinalNorm(
                scalars["norm_kind"], tensors.get("norm.weight"), tensors.get("norm.bias"), scalars["norm_eps"]
            ),
            logit_scale=scalars["logit_scale"],
            softcap=scalars["softcap"],
        )
