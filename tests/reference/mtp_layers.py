"""MTP layers in plain torch, straight from a checkpoint's tensors, one function a family; it shares no code with ours.

Each takes the tensors by the names published checkpoints use, the target's `config.json` as a dict, and whole texts:
embeddings and states [seq, hidden]. It returns what goes into the output head and what is fed back.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu, softmax

Tensors = Mapping[str, Tensor]
Result = tuple[Tensor, Tensor]


def rms(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (weight + offset)


def turn(x: Tensor, theta: float, *, width: int | None = None, pairs: bool = False) -> Tensor:
    """Rotary embedding of x [heads, seq, dim] at positions 0, 1, ...; `pairs`: neighbours turn together, not halves."""
    width = width or x.shape[-1]
    x, rest = x[..., :width], x[..., width:]
    angle = torch.arange(x.shape[1])[:, None] * theta ** (-torch.arange(0, width, 2) / width)
    a, b = (x[..., 0::2], x[..., 1::2]) if pairs else x.chunk(2, dim=-1)
    turned = (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin())
    whole = torch.stack(turned, dim=-1).flatten(-2) if pairs else torch.cat(turned, dim=-1)
    return torch.cat([whole, rest], dim=-1)


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None, sinks: Tensor | None = None
) -> Tensor:
    """[heads, seq, dim] each, key heads repeated; returns [seq, heads * dim]."""
    k, v = (x.repeat_interleave(len(q) // len(x), dim=0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * scale
    row = torch.arange(q.shape[1])
    hidden = row[None] > row[:, None]
    if window:
        hidden |= row[None] <= row[:, None] - window
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, q.shape[1], 1)], dim=-1)
    return (softmax(scores, -1)[..., : k.shape[1]] @ v).transpose(0, 1).flatten(1)


def heads(t: Tensors, name: str, x: Tensor, count: int) -> Tensor:
    return linear(x, t[f"{name}.weight"], t.get(f"{name}.bias")).unflatten(-1, (count, -1)).transpose(0, 1)


def mlp(t: Tensors, name: str, x: Tensor) -> Tensor:
    gate, up = (linear(x, t[f"{name}.{kind}_proj.weight"]) for kind in ("gate", "up"))
    return linear(silu(gate) * up, t[f"{name}.down_proj.weight"])


def experts(t: Tensors, name: str, x: Tensor, weights: Tensor, run: Callable[[Tensors, str, Tensor], Tensor]) -> Tensor:
    """Every expert on every row, weighed by [seq, experts]."""
    return sum(weights[:, e : e + 1] * run(t, f"{name}.{e}", x) for e in range(weights.shape[1]))


def choose(scores: Tensor, count: int, by: Tensor) -> Tensor:
    """`scores` [seq, experts] where `by` is among its `count` largest, else zero."""
    keep = torch.zeros_like(scores).scatter(1, by.topk(count, dim=-1).indices, 1.0)
    return scores * keep


def softmax_router(t: Tensors, name: str, x: Tensor, c: dict[str, Any]) -> Tensor:
    scores = softmax(linear(x, t[f"{name}.weight"]), -1)
    chosen = choose(scores, c["num_experts_per_tok"], scores)
    return chosen / chosen.sum(-1, keepdim=True) if c["norm_topk_prob"] else chosen


def sigmoid_router(weight: Tensor, bias: Tensor, x: Tensor, c: dict[str, Any], factor: float) -> Tensor:
    scores = linear(x, weight).sigmoid()
    by, groups = scores + bias, c.get("n_group", 1)
    if groups > 1:
        grouped = by.unflatten(-1, (groups, -1))
        best = grouped.topk(2, dim=-1).values.sum(-1)
        out = torch.ones_like(best).scatter(1, best.topk(c["topk_group"], dim=-1).indices, 0.0).bool()
        by = grouped.masked_fill(out[..., None], -math.inf).flatten(1)
    chosen = choose(scores, c["num_experts_per_tok"], by)
    return chosen / chosen.sum(-1, keepdim=True) * factor


def gqa(t: Tensors, name: str, x: Tensor, c: dict[str, Any], *, offset: float = 0.0, **rope: Any) -> Tensor:
    """Grouped-query attention; per-head norms and an output gate where their tensors say so. `rope=None`: none."""
    count, eps = c["num_attention_heads"], c.get("rms_norm_eps", 1e-6)
    window, turned = rope.pop("window", None), rope.pop("turned", True)
    q, gate = heads(t, f"{name}.q_proj", x, count), None
    k, v = (heads(t, f"{name}.{kind}_proj", x, c["num_key_value_heads"]) for kind in "kv")
    if q.shape[-1] == 2 * k.shape[-1]:
        q, gate = q.chunk(2, dim=-1)
    if f"{name}.q_norm.weight" in t:
        q, k = (rms(y, t[f"{name}.{kind}_norm.weight"], eps, offset) for y, kind in ((q, "q"), (k, "k")))
    if turned:
        q, k = (turn(y, c["rope_theta"], **rope) for y in (q, k))
    out = attend(q, k, v, q.shape[-1] ** -0.5, window)
    if gate is not None:
        out = out * gate.transpose(0, 1).flatten(1).sigmoid()
    return linear(out, t[f"{name}.o_proj.weight"])


def mla(t: Tensors, name: str, x: Tensor, c: dict[str, Any], q_scale: float = 1.0, kv_scale: float = 1.0) -> Tensor:
    count, nope, rope, rank = (
        c[key] for key in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank")
    )
    low = rms(linear(x, t[f"{name}.q_a_proj.weight"]), t[f"{name}.q_a_layernorm.weight"], 1e-6) * q_scale
    q = heads(t, f"{name}.q_b_proj", low, count)
    both = linear(x, t[f"{name}.kv_a_proj_with_mqa.weight"])
    latent = rms(both[:, :rank], t[f"{name}.kv_a_layernorm.weight"], 1e-6) * kv_scale
    kv = heads(t, f"{name}.kv_b_proj", latent, count)
    shared = turn(both[None, :, rank:], c["rope_theta"], pairs=True).expand(count, -1, -1)
    q = torch.cat([q[..., :nope], turn(q[..., nope:], c["rope_theta"], pairs=True)], dim=-1)
    k = torch.cat([kv[..., :nope], shared], dim=-1)
    out = attend(q, k, kv[..., nope:], (nope + rope) ** -0.5)
    return linear(out, t[f"{name}.o_proj.weight"])


def join(t: Tensors, names: tuple[str, str, str], e: Tensor, h: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """The projection of [normed embedding ; normed state]; `names`: of the two norms and the projection."""
    first, second, projection = names
    halves = rms(e, t[f"{first}.weight"], eps, offset), rms(h, t[f"{second}.weight"], eps, offset)
    return linear(torch.cat(halves, dim=-1), t[f"{projection}.weight"])


def pre_norm(t: Tensors, name: str, x: Tensor, eps: float, attention: Any, feed: Any, offset: float = 0.0) -> Tensor:
    x = x + attention(rms(x, t[f"{name}.input_layernorm.weight"], eps, offset))
    return x + feed(rms(x, t[f"{name}.post_attention_layernorm.weight"], eps, offset))


def deepseek_parts(name: str) -> tuple[str, str, str]:
    return f"{name}.enorm", f"{name}.hnorm", f"{name}.eh_proj"


def shared_experts(t: Tensors, name: str, x: Tensor, c: dict[str, Any]) -> Tensor:
    """Experts chosen by sigmoid scores beside one that always acts, as in DeepSeek V3."""
    bias = t[f"{name}.gate.e_score_correction_bias"]
    weights = sigmoid_router(t[f"{name}.gate.weight"], bias, x, c, c["routed_scaling_factor"])
    return experts(t, f"{name}.experts", x, weights, mlp) + mlp(t, f"{name}.shared_experts", x)


def glm4_moe_lite(t: Tensors, c: dict[str, Any], e: Tensor, h: Tensor, i: int) -> Result:
    name, eps = f"model.layers.{c['num_hidden_layers'] + i}", c["rms_norm_eps"]
    x = join(t, deepseek_parts(name), e, h, eps)
    x = pre_norm(
        *(t, name, x, eps),
        lambda y: mla(t, f"{name}.self_attn", y, c),
        lambda y: shared_experts(t, f"{name}.mlp", y, c),
    )
    return rms(x, t[f"{name}.shared_head.norm.weight"], eps), x


def deepseek_v3(t: Tensors, c: dict[str, Any], e: Tensor, h: Tensor, i: int) -> Result:
    out, _ = glm4_moe_lite(t, c, e, h, i)
    return out, out


def openpangu(t: Tensors, c: dict[str, Any], e: Tensor, h: Tensor, i: int) -> Result:
    name, eps = f"model.layers.{c['num_hidden_layers'] + i}", c["rms_norm_eps"]
    x = join(t, deepseek_parts(name), e, h, eps)

    def norm(kind: str, y: Tensor) -> Tensor:
        return rms(y, t[f"{name}.{kind}_layernorm.weight"], eps)

    x = x + norm("post_attention", mla(t, f"{name}.self_attn", norm("input", x), c))
    x = x + norm("post_mlp", shared_experts(t, f"{name}.mlp", norm("pre_mlp", x), c))
    out = rms(x, t[f"{name}.shared_head.norm.weight"], eps)
    return out, out


def glm4_moe(t: Tensors, c: dict[str, Any], e: Tensor, h: Tensor, i: int) -> Result:
    name, eps = f"model.layers.{c['num_hidden_layers'] + i}", c["rms_norm_eps"]
    half = c["head_dim"] // 2
    x = join(t, deepseek_parts(name), e, h, eps)
    x = pre_norm(
        *(t, name, x, eps),
        lambda y: gqa(t, f"{name}.self_attn", y, c, width=half),
        lambda y: shared_experts(t, f"{name}.mlp", y, c),
    )
    return rms(x, t[f"{name}.shared_head.norm.weight"], eps), x


def glm_ocr(t: Tensors, c: dict[str, Any], e: Tensor, h: Tensor, i: int) -> Result:
    name, eps = f"model.language_model.layers.{c['num_hidden_layers'] + i}", c["rms_norm_eps"]
    x = join(t, deepseek_parts(name), e, h, eps)

    def norm(kind: str, y: Tensor) -> Tensor:
        return rms(y, t[f"{name}.{kind}.weight"], eps)

    attended = gqa(t, f"{name}.self_attn", norm("input_layernorm", x), c, pairs=True)
    x = x + norm("post_self_attn_layernorm", attended)
    gate, up = linear(norm("post_attention_layernorm", x), t[f"{name}.mlp.gate_up_proj.weight"]).chunk(2, dim=-1)
    x = x + norm("post_mlp_layernorm", linear(silu(gate) * up, t[f"{name}.mlp.down_proj.weight"]))
    return norm("shared_head.norm", x), x


def mimo(t: Tensors, c: dict[str, Any], e: Tensor, h: Tensor, i: int) -> Result:
    name, eps = f"model.mtp_layers.{i}", c["rms_norm_eps"]
    halves = rms(h, t[f"{name}.hidden_layernorm.weight"], eps), rms(e, t[f"{name}.token_layernorm.weight"], eps)
    x = linear(torch.cat(halves, dim=-1), t[f"{name}.input_proj.weight"])
    x = pre_norm(t, name, x, eps, lambda y: gqa(t, f"{name}.self_attn", y, c), lambda y: mlp(t, f"{name}.mlp", y))
    out = rms(x, t[f"{name}.final_layernorm.weight"], eps)
    return out, out


def mimo_v2(t: Tensors, c: dict[str, Any], e: Tensor, h: Tensor, i: int) -> Result:
    name, eps = "model.mtp.layers.0", c["rms_norm_eps"]
    x = join(t, deepseek_parts(name), e, h, eps)

    def attention(y: Tensor) -> Tensor:
        q = heads(t, f"{name}.self_attn.q_proj", y, c["num_attention_heads"])
        k, v = (heads(t, f"{name}.self_attn.{kind}_proj", y, 2 * c["num_key_value_heads"]) for kind in "kv")
        theta, width = c["rope_theta"], int(c["head_dim"] * c["partial_rotary_factor"])
        q, k = (turn(z, theta, width=width) for z in (q, k))
        sinks = t[f"{name}.self_attn.attention_sink_bias"]
        out = attend(q, k, v * c["attention_value_scale"], c["head_dim"] ** -0.5, c["sliding_window"], sinks)
        return linear(out, t[f"{name}.self_attn.o_proj.weight"])

    x = x + attention(rms(x, t[f"{name}.input_layernorm.weight"], eps))
    x = x + mlp(t, f"{name}.mlp", rms(x, t[f"{name}.pre_mlp_layernorm.weight"], eps))
    out = rms(x, t[f"{name}.final_layernorm.weight"], eps)
    return out, out


def _qwen_parts() -> tuple[str, str, str]:
    return "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc"


def qwen3_next(t: Tensors, c: dict[str, Any], e: Tensor, h: Tensor, i: int) -> Result:
    name, eps = f"mtp.layers.{i}", c["rms_norm_eps"]
    x = join(t, _qwen_parts(), e, h, eps, offset=1.0)

    def feed(y: Tensor) -> Tensor:
        if f"{name}.mlp.gate.weight" not in t:
            return mlp(t, f"{name}.mlp", y)
        shared = linear(y, t[f"{name}.mlp.shared_expert_gate.weight"]).sigmoid() * mlp(
            t, f"{name}.mlp.shared_expert", y
        )
        return experts(t, f"{name}.mlp.experts", y, softmax_router(t, f"{name}.mlp.gate", y, c), mlp) + shared

    width = int(c["head_dim"] * c["partial_rotary_factor"])
    x = pre_norm(t, name, x, eps, lambda y: gqa(t, f"{name}.self_attn", y, c, offset=1.0, width=width), feed, 1.0)
    out = rms(x, t["mtp.norm.weight"], eps, 1.0)
    return out, out


def ernie4_5_moe(t: Tensors, c: dict[str, Any], e: Tensor, h: Tensor, i: int) -> Result:
    name, eps = f"model.mtp_block.{i}", c["rms_norm_eps"]
    parts = (f"model.mtp_emb_norm.{i}", f"model.mtp_hidden_norm.{i}", f"model.mtp_linear_proj.{i}")
    x = join(t, parts, e, h, eps)
    x = pre_norm(
        *(t, name, x, eps),
        lambda y: gqa(t, f"{name}.self_attn", y, c, pairs=True),
        lambda y: mlp(t, f"{name}.mlp", y),
    )
    return rms(x, t["model.norm.weight"], eps), x


def nemotron_h(t: Tensors, c: dict[str, Any], e: Tensor, h: Tensor, i: int) -> Result:
    eps = c["layer_norm_epsilon"]
    x = join(t, deepseek_parts("mtp.layers.0"), e, h, eps)
    attended = rms(x, t["mtp.layers.0.norm.weight"], eps)
    x = x + gqa(t, "mtp.layers.0.mixer", attended, c, turned=False)

    def square(t: Tensors, name: str, y: Tensor) -> Tensor:
        return linear(linear(y, t[f"{name}.up_proj.weight"]).relu().square(), t[f"{name}.down_proj.weight"])

    y, mixer = rms(x, t["mtp.layers.1.norm.weight"], eps), "mtp.layers.1.mixer"
    bias = t[f"{mixer}.gate.e_score_correction_bias"]
    weights = sigmoid_router(t[f"{mixer}.gate.weight"], bias, y, c, c["routed_scaling_factor"])
    x = x + experts(t, f"{mixer}.experts", y, weights, square) + square(t, f"{mixer}.shared_experts", y)
    out = rms(x, t["mtp.layers.1.final_layernorm.weight"], eps)
    return out, out


def exaone_moe(t: Tensors, c: dict[str, Any], e: Tensor, h: Tensor, i: int) -> Result:
    """Dense; among windowed layers a full one has no rotary embedding."""
    name, eps = f"mtp.layers.{i}", c["rms_norm_eps"]
    x = join(t, _qwen_parts(), e, h, eps)
    x = pre_norm(
        *(t, name, x, eps),
        lambda y: gqa(t, f"{name}.self_attn", y, c, turned=False),
        lambda y: mlp(t, f"{name}.mlp", y),
    )
    out = rms(x, t["mtp.norm.weight"], eps)
    return out, out


def exaone4_5(t: Tensors, c: dict[str, Any], e: Tensor, h: Tensor, i: int) -> Result:
    """Norms stand behind attention and MLP; the layer's kind is that of the target's layer of the same number."""
    name, eps = f"mtp.layers.{i}", c["rms_norm_eps"]
    x = join(t, _qwen_parts(), e, h, eps)
    attended = gqa(t, f"{name}.self_attn", x, c, window=c["sliding_window"])
    x = x + rms(attended, t[f"{name}.post_attention_layernorm.weight"], eps)
    x = x + rms(mlp(t, f"{name}.mlp", x), t[f"{name}.post_feedforward_layernorm.weight"], eps)
    out = rms(x, t["mtp.norm.weight"], eps)
    return out, out


def longcat_flash(t: Tensors, c: dict[str, Any], e: Tensor, h: Tensor, i: int) -> Result:
    name, eps = "model.mtp.layers.0", c["rms_norm_eps"]
    q_scale, kv_scale = ((c["hidden_size"] / c[key]) ** 0.5 for key in ("q_lora_rank", "kv_lora_rank"))
    x = join(t, (f"{name}.enorm.m", f"{name}.hnorm.m", f"{name}.eh_proj"), e, h, eps)
    x = pre_norm(
        *(t, name, x, eps),
        lambda y: mla(t, f"{name}.self_attn", y, c, q_scale, kv_scale),
        lambda y: mlp(t, f"{name}.transformer_layer.mlp", y),
    )
    out = rms(x, t["model.mtp.norm.weight"], eps)
    return out, out


def hy_v3(t: Tensors, c: dict[str, Any], e: Tensor, h: Tensor, i: int) -> Result:
    name, eps = f"model.layers.{c['num_hidden_layers'] + i}", c["rms_norm_eps"]
    x = join(t, deepseek_parts(name), e, h, eps)

    def feed(y: Tensor) -> Tensor:
        bias = t[f"{name}.mlp.expert_bias"]
        weights = sigmoid_router(t[f"{name}.mlp.router.gate.weight"], bias, y, c, c["router_scaling_factor"])
        return experts(t, f"{name}.mlp.experts", y, weights, mlp) + mlp(t, f"{name}.mlp.shared_mlp", y)

    x = pre_norm(t, name, x, eps, lambda y: gqa(t, f"{name}.self_attn", y, c), feed)
    out = rms(x, t[f"{name}.final_layernorm.weight"], eps)
    return out, out


def step3p5(t: Tensors, c: dict[str, Any], e: Tensor, h: Tensor, i: int) -> Result:
    """Every list of the config goes on over MTP layers; windowed layers have heads of their own number."""
    number = c["num_hidden_layers"] + i
    name, eps = f"model.layers.{number}", c["rms_norm_eps"]
    x = join(t, deepseek_parts(name), e, h, eps, offset=1.0)
    windowed = c["layer_types"][number] == "sliding_attention"
    own = {**c, "num_attention_heads": c["attention_other_setting"]["num_attention_heads"]} if windowed else c
    count, width = own["num_attention_heads"], int(c["head_dim"] * c["partial_rotary_factors"][number])

    def attention(y: Tensor) -> Tensor:
        q = rms(heads(t, f"{name}.self_attn.q_proj", y, count), t[f"{name}.self_attn.q_norm.weight"], eps, 1.0)
        k, v = (heads(t, f"{name}.self_attn.{kind}_proj", y, c["num_key_value_heads"]) for kind in "kv")
        k = rms(k, t[f"{name}.self_attn.k_norm.weight"], eps, 1.0)
        q, k = (turn(z, c["rope_theta"][number], width=width) for z in (q, k))
        out = attend(q, k, v, c["head_dim"] ** -0.5, c["sliding_window"] if windowed else None)
        gate = linear(y, t[f"{name}.self_attn.g_proj.weight"]).sigmoid()
        gated = (out.unflatten(1, (count, -1)) * gate[..., None]).flatten(1)
        return linear(gated, t[f"{name}.self_attn.o_proj.weight"])

    x = pre_norm(t, name, x, eps, attention, lambda y: mlp(t, f"{name}.mlp", y), 1.0)
    return rms(x, t[f"{name}.transformer.shared_head.norm.weight"], eps, 1.0), x
