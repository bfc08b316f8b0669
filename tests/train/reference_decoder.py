"""EAGLE drafters written from the papers and the checkpoints' tensor names: one row at a time, a growing cache."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spectrain.heads.decoder import DecoderHead
from spectrain.heads.eagle import EagleHead
from spectrain.heads.mtp import MtpHead
from spectrain.heads.peagle import PEagleHead
from spectrain.heads.target_tensors import TargetTensors
from spectrain.tests.train.formulas import law_of, row_loss
from spectrain.tests.train.toys import Document


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rope(x: Tensor, position: int, theta: float) -> Tensor:
    half = x.shape[-1] // 2
    out = torch.empty_like(x)
    for i in range(half):
        angle = torch.tensor(position * theta ** (-i / half))
        a, b = x[..., i], x[..., i + half]
        out[..., i] = a * angle.cos() - b * angle.sin()
        out[..., i + half] = b * angle.cos() + a * angle.sin()
    return out


class ReferenceDecoder:
    """EAGLE-3. Holds a cache of (k, v) per layer; `row` runs one token and appends to it."""

    def __init__(self, head: DecoderHead, target: TargetTensors) -> None:
        self.c: Any = head.config
        self.w, self.target = head.state_dict(), target
        self.cache: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(self.c.num_layers)]

    def fork(self) -> "ReferenceDecoder":
        twin = object.__new__(type(self))
        twin.c, twin.w, twin.target = self.c, self.w, self.target
        twin.cache = [list(layer) for layer in self.cache]
        return twin

    def true_state(self, aux: Tensor) -> Tensor:
        """aux [layers, hidden] of one row, ascending layers."""
        eps = self.c.rms_norm_eps
        parts = list(aux)
        if self.c.fc_norm:
            parts = [rms(part, self.w[f"fc_norm.{i}.weight"], eps) for i, part in enumerate(parts)]
        wide = torch.cat(parts)
        if self.c.norm_before_fc:
            wide = rms(wide, self.w["input_norm.weight"], eps)
        return self.w["fc.weight"] @ wide

    def draft_row(self, token_id: int, state: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """`row` for a draft: the token was drafted, the state is the head's own."""
        return self.row(token_id, state, position)

    def row(self, token_id: int, state: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Draft logits [draft_vocab] and the state the next step is conditioned on."""
        embed = self.target.embed_tokens[token_id]
        for layer in range(self.c.num_layers):
            state = self._layer(layer, embed, state, position)
        normed = rms(state, self.w["norm.weight"], self.c.rms_norm_eps)
        return self.w["lm_head.weight"] @ normed, normed if self.c.norm_output else state

    def _layer(self, layer: int, embed: Tensor, state: Tensor, position: int) -> Tensor:
        def w(name: str) -> Tensor:
            return self.w[f"layers.{layer}.{name}.weight"]

        eps = self.c.rms_norm_eps
        residual = state
        if layer == 0:
            hidden = rms(state, w("hidden_norm"), eps)
            if self.c.norm_before_residual:
                residual = hidden
            x = torch.cat([rms(embed, w("input_layernorm"), eps), hidden])
        else:
            x = rms(state, w("input_layernorm"), eps)
        return self._mix(layer, residual, x, position)

    def _mix(self, layer: int, residual: Tensor, x: Tensor, position: int) -> Tensor:
        def w(name: str) -> Tensor:
            return self.w[f"layers.{layer}.{name}.weight"]

        state = residual + self._attention(layer, x, position, w)
        x = rms(state, w("post_attention_layernorm"), self.c.rms_norm_eps)
        gate = w("mlp.gate_proj") @ x
        return state + w("mlp.down_proj") @ (gate * torch.sigmoid(gate) * (w("mlp.up_proj") @ x))

    def _attention(self, layer: int, x: Tensor, position: int, w) -> Tensor:
        dim, eps, theta = self.c.head_dim, self.c.rms_norm_eps, self.c.rope_parameters["rope_theta"]
        q, k, v = ((w(f"self_attn.{name}_proj") @ x).view(-1, dim) for name in "qkv")
        if getattr(self.c, "layer_style", "llama") == "qwen3":
            q, k = rms(q, w("self_attn.q_norm"), eps), rms(k, w("self_attn.k_norm"), eps)
        self.cache[layer].append((rope(k, position, theta), v))
        q = rope(q, position, theta)
        out = []
        for h in range(self.c.num_heads):
            kv = h // (self.c.num_heads // self.c.num_kv_heads)
            scores = torch.stack([q[h] @ key[kv] for key, _ in self.cache[layer]]) / dim**0.5
            values = torch.stack([value[kv] for _, value in self.cache[layer]])
            out.append(scores.softmax(0) @ values)
        return w("self_attn.o_proj") @ torch.cat(out)


class EagleDecoder(ReferenceDecoder):
    """EAGLE: fc over embedding and state, no norm before the first layer and none behind the last."""

    def true_state(self, aux: Tensor) -> Tensor:
        norm = self.target.norm
        return aux[-1] if norm.weight is None else rms(aux[-1], norm.weight, norm.eps)

    def row(self, token_id: int, state: Tensor, position: int) -> tuple[Tensor, Tensor]:
        state = self.w["fc.weight"] @ torch.cat([self.target.embed_tokens[token_id], state])
        if self.c.fc_bias:
            state = state + self.w["fc.bias"]
        for layer in range(self.c.num_layers):
            x = state
            if layer > 0:
                x = rms(state, self.w[f"layers.{layer}.input_layernorm.weight"], self.c.rms_norm_eps)
            state = self._mix(layer, state, x, position)
        return self.target.lm_head @ state, state


class PEagleDecoder(ReferenceDecoder):
    """P-EAGLE: drafts know neither token nor state."""

    def draft_row(self, token_id: int, state: Tensor, position: int) -> tuple[Tensor, Tensor]:
        stand_in = self.true_state(self.w["mask_hidden"].view(len(self.c.layer_ids), -1))
        return self.row(self.c.mask_token_id, stand_in, position)


class MtpDecoder(EagleDecoder):
    """A fresh MTP layer: both halves normed, a Llama layer, a norm; fed back is what stands behind it or before it."""

    def __init__(self, head: DecoderHead, target: TargetTensors) -> None:
        super().__init__(head, target)
        self.w = {
            name.replace(f"model.layers.{self.c.target.num_layers}.", "layers.0."): w for name, w in self.w.items()
        }

    def row(self, token_id: int, state: Tensor, position: int) -> tuple[Tensor, Tensor]:
        def norm(name: str, x: Tensor) -> Tensor:
            return rms(x, self.w[f"layers.0.{name}.weight"], self.c.rms_norm_eps)

        halves = norm("enorm", self.target.embed_tokens[token_id]), norm("hnorm", state)
        state = self.w["layers.0.eh_proj.weight"] @ torch.cat(halves)
        state = self._mix(0, state, norm("input_layernorm", state), position)
        normed = norm("shared_head.norm", state)
        return self.target.lm_head @ normed, {"normed": normed, "raw": state}[self.c.feedback]


def decoder_of(head: DecoderHead, target: TargetTensors) -> ReferenceDecoder:
    kinds = {EagleHead: EagleDecoder, MtpHead: MtpDecoder, PEagleHead: PEagleDecoder}
    return kinds.get(type(head), ReferenceDecoder)(head, target)


@torch.no_grad()
def teacher_forced(head: DecoderHead, target: TargetTensors, token_ids: Tensor, aux: Tensor, steps: int) -> dict:
    """(t, k) -> draft logits for one document; the tokens after the bonus token are the text's own."""
    found, decoder = {}, decoder_of(head, target)
    for t in range(len(token_ids) - 1):
        logits, state = decoder.row(int(token_ids[t + 1]), decoder.true_state(aux[t]), t)
        found[t, 0] = logits
        draft = decoder.fork()
        for k in range(1, min(steps, len(token_ids) - 1 - t)):
            logits, state = draft.draft_row(int(token_ids[t + 1 + k]), state, t + k)
            found[t, k] = logits
    return found


def assert_decoders_logits(
    found: Tensor,
    rows: Sequence[Sequence[Document]],
    head: DecoderHead,
    target: TargetTensors,
    atol: float = 1e-5,
    rtol: float = 1e-5,
) -> int:
    """Holds logits [steps, batch, seq, draft_vocab] of packed documents against the decoder's; how many it compared."""
    compared = 0
    for b, row in enumerate(rows):
        start = 0
        for document in row:
            forced = teacher_forced(head, target, document.token_ids, document.aux, len(found))
            for (t, k), expected in forced.items():
                torch.testing.assert_close(found[k, b, start + t], expected, atol=atol, rtol=rtol)
            compared += len(forced)
            start += len(document.token_ids)
    return compared


def decoder_losses(
    kind: str, rows: Sequence[Sequence[Document]], head: DecoderHead, target: TargetTensors, steps: int
) -> list[list[float]]:
    """The formula's loss of every row that counts, by step, on the decoder's logits."""
    ids = head.draft_to_target()
    losses: list[list[float]] = [[] for _ in range(steps)]
    for document in (d for row in rows for d in row):
        law, text = law_of(target, document.final), document.token_ids.tolist()
        for (t, k), logits in teacher_forced(head, target, document.token_ids, document.aux, steps).items():
            if t + 2 + k < len(text):
                loss = row_loss(kind, logits, law[t + 1 + k], text[t + 2 + k], None if ids is None else ids.tolist())
                losses[k] += [] if loss is None else [loss]
    return losses


@torch.no_grad()
def accepted_drafts(
    head: DecoderHead, target: TargetTensors, token_ids: Tensor, aux: Tensor, row: int, num_drafts: int
) -> int:
    """Greedy drafts from `row` that equal the text, up to the first miss; the text is the target's own output."""
    decoder = decoder_of(head, target)
    for t in range(row + 1):
        logits, state = decoder.row(int(token_ids[t + 1]), decoder.true_state(aux[t]), t)
    ids = head.draft_to_target()
    for k in range(num_drafts):
        best = int(logits.argmax())
        token = best if ids is None else int(ids[best])
        if token != int(token_ids[row + 2 + k]):
            return k
        logits, state = decoder.draft_row(token, state, row + k + 1)
    return num_drafts
