"""An EAGLE-3 drafter written from the paper and the checkpoint's tensor names: one row at a time, a growing cache."""

import torch
from torch import Tensor

from spectrain.heads.eagle3 import Eagle3Head
from spectrain.heads.target_tensors import TargetTensors


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
    """Holds a cache of (k, v) per layer; `row` runs one token and appends to it."""

    def __init__(self, head: Eagle3Head, target: TargetTensors) -> None:
        self.c, self.w, self.target = head.config, head.state_dict(), target
        self.cache: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(self.c.num_layers)]

    def fork(self) -> "ReferenceDecoder":
        twin = object.__new__(ReferenceDecoder)
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
        state = residual + self._attention(layer, x, position, w)
        x = rms(state, w("post_attention_layernorm"), eps)
        gate = w("mlp.gate_proj") @ x
        return state + w("mlp.down_proj") @ (gate * torch.sigmoid(gate) * (w("mlp.up_proj") @ x))

    def _attention(self, layer: int, x: Tensor, position: int, w) -> Tensor:
        dim, eps, theta = self.c.head_dim, self.c.rms_norm_eps, self.c.rope_parameters["rope_theta"]
        q, k, v = ((w(f"self_attn.{name}_proj") @ x).view(-1, dim) for name in "qkv")
        if self.c.layer_style == "qwen3":
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


@torch.no_grad()
def teacher_forced(head: Eagle3Head, target: TargetTensors, token_ids: Tensor, aux: Tensor, steps: int) -> dict:
    """(t, k) -> draft logits for one document; the tokens after the bonus token are the text's own."""
    found, decoder = {}, ReferenceDecoder(head, target)
    for t in range(len(token_ids) - 1):
        logits, state = decoder.row(int(token_ids[t + 1]), decoder.true_state(aux[t]), t)
        found[t, 0] = logits
        draft = decoder.fork()
        for k in range(1, min(steps, len(token_ids) - 1 - t)):
            logits, state = draft.row(int(token_ids[t + 1 + k]), state, t + k)
            found[t, k] = logits
    return found


@torch.no_grad()
def accepted_drafts(
    head: Eagle3Head, target: TargetTensors, token_ids: Tensor, aux: Tensor, row: int, num_drafts: int
) -> int:
    """Greedy drafts from `row` that equal the text, up to the first miss; the text is the target's own output."""
    decoder = ReferenceDecoder(head, target)
    for t in range(row + 1):
        logits, state = decoder.row(int(token_ids[t + 1]), decoder.true_state(aux[t]), t)
    ids = head.draft_to_target()
    for k in range(num_drafts):
        best = int(logits.argmax())
        token = best if ids is None else int(ids[best])
        if token != int(token_ids[row + 2 + k]):
            return k
        logits, state = decoder.row(token, state, row + k + 1)
    return num_drafts
