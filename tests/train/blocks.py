"""Tiny DFlash and DSpark heads, and drafters written from the methods: one block, row and attention head at a time."""

from typing import Any

import torch
from torch import Tensor

from spectrain.heads.dflash import DFlashConfig, DFlashHead
from spectrain.heads.dspark import DSparkConfig
from spectrain.heads.target_tensors import TargetTensors
from spectrain.tests.train.reference_decoder import rms, rope
from spectrain.tests.train.toys import Document, pack, seeded, tiny_facts
from spectrain.train.batch import TrainBatch


def block_config(vocab: int = 16, hidden: int = 16, **settings: Any) -> DFlashConfig:
    shape = {"layer_ids": (2, 3, 4), "num_layers": 1, "block_size": 4, "mask_token_id": vocab - 1}
    return DFlashConfig.derive(tiny_facts(vocab, hidden), shape | settings)


def spark_config(vocab: int = 16, hidden: int = 16, **settings: Any) -> DSparkConfig:
    shape = {"layer_ids": (2, 3, 4), "num_layers": 1, "block_size": 3, "mask_token_id": vocab - 1, "markov_rank": 4}
    return DSparkConfig.derive(tiny_facts(vocab, hidden), shape | settings)


def block_batch(rows: list[list[Document]], target: TargetTensors, config: DFlashConfig, **options: Any) -> TrainBatch:
    return seeded(pack(rows, target, config.num_drafts, **options))


class BlockDrafter:
    """Drafts blocks behind one document whose aux states [tokens, layers, hidden] are known."""

    def __init__(self, head: DFlashHead, target: TargetTensors, aux: Tensor) -> None:
        self.c, self.w, self.target, self.shift = head.config, head.state_dict(), target, 0  # shift: of block positions
        self.fused = [self._norm(self.w["fc.weight"] @ torch.cat(list(row)), "hidden_norm.weight") for row in aux]

    def logits(self, anchor: int, token_id: int, size: int | None = None) -> Tensor:
        """[size, vocab]; the anchor is token `token_id` at row `anchor`, so states 0..anchor-1 are its context."""
        return self.states(anchor, token_id, size) @ self.target.lm_head.T

    def states(self, anchor: int, token_id: int, size: int | None = None) -> Tensor:
        """[size, hidden], what the output head is applied to."""
        ids = [token_id] + [self.c.mask_token_id] * ((size or self.c.block_size) - 1)
        rows = [self.target.embed_tokens[i] for i in ids]
        for layer in range(self.c.num_layers):
            rows = self._layer(layer, rows, anchor)
        return torch.stack([self._norm(row, "norm.weight") for row in rows])

    def drafts(self, anchor: int, token_id: int) -> list[int]:
        """The greedy drafts of the token at `anchor`, for positions anchor + 1, anchor + 2, ..."""
        best = self.logits(anchor, token_id).argmax(-1).tolist()
        return best if self.c.sample_from_anchor else best[1:]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms(x, self.w[name], self.c.rms_norm_eps)

    def _layer(self, layer: int, rows: list[Tensor], anchor: int) -> list[Tensor]:
        name = f"layers.{layer}."
        normed = [self._norm(row, name + "input_layernorm.weight") for row in rows]
        keys = [self._key_value(name, self.fused[j], j) for j in range(anchor)]
        keys += [self._key_value(name, x, anchor + slot + self.shift) for slot, x in enumerate(normed)]
        out = []
        for slot, (row, x) in enumerate(zip(rows, normed, strict=True)):
            position, last = anchor + slot, anchor + (slot if self.c.causal else len(rows) - 1)
            first = 0 if self.c.sliding_window is None else max(0, position - self.c.sliding_window + 1)
            row = row + self._attend(name, x, position + self.shift, keys[first : last + 1])
            x = self._norm(row, name + "post_attention_layernorm.weight")
            gate = self.w[name + "mlp.gate_proj.weight"] @ x
            up = self.w[name + "mlp.up_proj.weight"] @ x
            out.append(row + self.w[name + "mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up))
        return out

    def _key_value(self, name: str, x: Tensor, position: int) -> tuple[Tensor, Tensor]:
        k, v = ((self.w[f"{name}self_attn.{p}_proj.weight"] @ x).view(-1, self.c.head_dim) for p in "kv")
        return rope(self._norm(k, name + "self_attn.k_norm.weight"), position, self._theta), v

    def _attend(self, name: str, x: Tensor, position: int, keys: list[tuple[Tensor, Tensor]]) -> Tensor:
        q = (self.w[name + "self_attn.q_proj.weight"] @ x).view(-1, self.c.head_dim)
        q = rope(self._norm(q, name + "self_attn.q_norm.weight"), position, self._theta)
        out = []
        for h in range(self.c.num_heads):
            group = h * self.c.num_kv_heads // self.c.num_heads
            scores = torch.stack([q[h] @ k[group] for k, _ in keys]) / self.c.head_dim**0.5
            out.append(scores.softmax(0) @ torch.stack([v[group] for _, v in keys]))
        return self.w[name + "self_attn.o_proj.weight"] @ torch.cat(out)

    @property
    def _theta(self) -> float:
        return self.c.rope_parameters["rope_theta"]


class WalkingBlockDrafter(BlockDrafter):
    """DSpark: every slot is biased by the token drafted in the one before it."""

    def bias(self, previous: int) -> Tensor:
        w1, w2 = (self.w[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
        return w2 @ w1[previous]

    def drafts(self, anchor: int, token_id: int) -> list[int]:
        walk = [token_id]
        for row in self.logits(anchor, token_id)[0 if self.c.sample_from_anchor else 1 :]:
            walk.append(int((row + self.bias(walk[-1])).argmax()))
        return walk[1:]


def drafter_of(head: DFlashHead, target: TargetTensors, aux: Tensor) -> BlockDrafter:
    return (WalkingBlockDrafter if isinstance(head.config, DSparkConfig) else BlockDrafter)(head, target, aux)
