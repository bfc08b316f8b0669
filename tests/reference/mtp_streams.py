"""DeepSeek V4's MTP layer in plain torch, as `mtp_layers.py`: row by row where it mixes its streams."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu, softmax, softplus

from spectrain.tests.reference.mtp_layers import Result, Tensors, attend, choose, experts, rms, turn


def unweighted(x: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def turned_end(x: Tensor, c: dict[str, Any], *, back: bool = False) -> Tensor:
    """Rotary embedding of the last channels of x [heads, seq, dim], neighbours together; `back` undoes it."""
    width, seq = c["qk_rope_head_dim"], torch.arange(x.shape[1])
    end = turn(x[..., -width:], c["rope_theta"], pairs=True)
    if back:
        angle = seq[:, None] * c["rope_theta"] ** (-torch.arange(0, width, 2) / width)
        a, b = x[..., -width::2], x[..., -width + 1 :: 2]
        pairs = (a * angle.cos() + b * angle.sin(), b * angle.cos() - a * angle.sin())
        end = torch.stack(pairs, dim=-1).flatten(-2)
    return torch.cat([x[..., :-width], end], dim=-1)


def attention(t: Tensors, name: str, x: Tensor, c: dict[str, Any]) -> Tensor:
    """One head of keys, which are the values as well; a window and sinks; heads projected group by group."""
    eps, count, groups = c["rms_norm_eps"], c["num_attention_heads"], c["o_groups"]
    low = rms(linear(x, t[f"{name}.wq_a.weight"]), t[f"{name}.q_norm.weight"], eps)
    q = unweighted(linear(low, t[f"{name}.wq_b.weight"]).unflatten(-1, (count, -1)), eps).transpose(0, 1)
    kv = turned_end(rms(linear(x, t[f"{name}.wkv.weight"]), t[f"{name}.kv_norm.weight"], eps)[None], c)
    sinks, window = t[f"{name}.attn_sink"], c["sliding_window"]
    out = attend(turned_end(q, c), kv, kv, c["head_dim"] ** -0.5, window, sinks)
    out = turned_end(out.unflatten(-1, (count, -1)).transpose(0, 1), c, back=True).transpose(0, 1).flatten(1)
    parts = zip(out.chunk(groups, dim=-1), t[f"{name}.wo_a.weight"].chunk(groups), strict=True)
    return linear(torch.cat([linear(part, weight) for part, weight in parts], dim=-1), t[f"{name}.wo_b.weight"])


def feed(t: Tensors, name: str, x: Tensor, c: dict[str, Any]) -> Tensor:
    limit = c["swiglu_limit"]

    def mlp(t: Tensors, name: str, y: Tensor) -> Tensor:
        gate = linear(y, t[f"{name}.w1.weight"]).clamp(max=limit)
        return linear(silu(gate) * linear(y, t[f"{name}.w3.weight"]).clamp(-limit, limit), t[f"{name}.w2.weight"])

    scores = softplus(linear(x, t[f"{name}.gate.weight"])).sqrt()
    chosen = choose(scores, c["num_experts_per_tok"], scores + t[f"{name}.gate.bias"])
    weights = chosen / chosen.sum(-1, keepdim=True) * c["routed_scaling_factor"]
    return experts(t, f"{name}.experts", x, weights, mlp) + mlp(t, f"{name}.shared_experts", x)


def mixing(t: Tensors, name: str, streams: Tensor, c: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Of one row's streams [n, hidden]: their shares in the input [n], in the output [n], in each other [n, n]."""
    n, eps = c["hc_mult"], c["hc_eps"]
    mixes = t[f"{name}_fn"] @ unweighted(streams.flatten(), c["rms_norm_eps"])
    scale, base = t[f"{name}_scale"], t[f"{name}_base"]
    pre = (mixes[:n] * scale[0] + base[:n]).sigmoid() + eps
    post = 2 * (mixes[n : 2 * n] * scale[1] + base[n : 2 * n]).sigmoid()
    comb = softmax((mixes[2 * n :] * scale[2] + base[2 * n :]).view(n, n), dim=1) + eps
    for turn_ in range(2 * c["hc_sinkhorn_iters"] - 1):  # columns first, and columns last
        comb = comb / (comb.sum(turn_ % 2, keepdim=True) + eps)
    return pre, post, comb


def mixed(t: Tensors, name: str, kind: str, streams: Tensor, c: dict[str, Any], run: Any) -> Tensor:
    """streams [seq, n, hidden] with what `run` makes of their sum added to each."""
    parts = [mixing(t, f"{name}.hc_{kind}", row, c) for row in streams]
    given = torch.stack([pre @ row for (pre, _, _), row in zip(parts, streams, strict=True)])
    made = run(rms(given, t[f"{name}.{kind}_norm.weight"], c["rms_norm_eps"]))
    rows = zip(parts, streams, made, strict=True)
    return torch.stack([torch.outer(post, new) + comb.T @ row for (_, post, comb), row, new in rows])


def deepseek_v4(t: Tensors, c: dict[str, Any], e: Tensor, h: Tensor, i: int) -> Result:
    """States h [seq, n * hidden] are streams side by side, and are fed back so."""
    name, eps, n = f"mtp.{i}", c["rms_norm_eps"], c["hc_mult"]
    normed = rms(h.unflatten(-1, (n, -1)), t[f"{name}.hnorm.weight"], eps)
    token = linear(rms(e, t[f"{name}.enorm.weight"], eps), t[f"{name}.e_proj.weight"])
    x = linear(normed, t[f"{name}.h_proj.weight"]) + token[:, None]
    x = mixed(t, name, "attn", x, c, lambda y: attention(t, f"{name}.attn", y, c))
    x = mixed(t, name, "ffn", x, c, lambda y: feed(t, f"{name}.ffn", y, c))
    mixes = linear(unweighted(x.flatten(1), eps), t[f"{name}.hc_head_fn"])
    shares = (mixes * t[f"{name}.hc_head_scale"] + t[f"{name}.hc_head_base"]).sigmoid() + c["hc_eps"]
    summed = (shares[..., None] * x).sum(1)
    return rms(summed, t[f"{name}.norm.weight"], eps), x.flatten(1)
