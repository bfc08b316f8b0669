"""A tiny checkpoint of each family with MTP layers: `from spectrain.tests.mtp_families import FAMILIES`.

Names, those of published checkpoints, and shapes are written out here, apart from the table of layouts.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from spectrain.tests.reference import mtp_layers as reference
from spectrain.tests.reference.mtp_streams import deepseek_v4

H, INTER, MOE, HEADS, KV, WIDTH, LAYERS, VOCAB = 32, 48, 16, 4, 2, 8, 4, 97
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": H,
    "intermediate_size": INTER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": WIDTH,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
NEXTN = {"num_nextn_predict_layers": 2}
LATENT = {
    "num_key_value_heads": HEADS,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
}
SIGMOID_EXPERTS = {
    "moe_intermediate_size": MOE,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.7,
}
Shapes = dict[str, tuple[int, ...]]


def gqa(name: str, *, kv: int = KV, qk_norm: bool = False, bias: bool = False, gated: bool = False) -> Shapes:
    shapes: Shapes = {
        f"{name}.q_proj.weight": (HEADS * WIDTH * (2 if gated else 1), H),
        f"{name}.k_proj.weight": (kv * WIDTH, H),
        f"{name}.v_proj.weight": (kv * WIDTH, H),
        f"{name}.o_proj.weight": (H, HEADS * WIDTH),
    }
    if qk_norm:
        shapes |= {f"{name}.{kind}_norm.weight": (WIDTH,) for kind in "qk"}
    if bias:
        shapes |= {f"{name}.{kind}_proj.bias": (count * WIDTH,) for kind, count in (("q", HEADS), ("k", kv), ("v", kv))}
    return shapes


def mla(name: str) -> Shapes:
    return {
        f"{name}.q_a_proj.weight": (24, H),
        f"{name}.q_a_layernorm.weight": (24,),
        f"{name}.q_b_proj.weight": (HEADS * 24, 24),
        f"{name}.kv_a_proj_with_mqa.weight": (16 + 8, H),
        f"{name}.kv_a_layernorm.weight": (16,),
        f"{name}.kv_b_proj.weight": (HEADS * (16 + 12), 16),
        f"{name}.o_proj.weight": (H, HEADS * 12),
    }


def mlp(name: str, width: int = INTER) -> Shapes:
    return {
        f"{name}.gate_proj.weight": (width, H),
        f"{name}.up_proj.weight": (width, H),
        f"{name}.down_proj.weight": (H, width),
    }


def sigmoid_experts(name: str) -> Shapes:
    shapes: Shapes = {f"{name}.gate.weight": (4, H), f"{name}.gate.e_score_correction_bias": (4,)}
    for e in range(4):
        shapes |= mlp(f"{name}.experts.{e}", MOE)
    return shapes | mlp(f"{name}.shared_experts", MOE)


def norms(name: str, *kinds: str) -> Shapes:
    return {f"{name}.{kind}.weight": (H,) for kind in kinds}


PRE_NORM = ("input_layernorm", "post_attention_layernorm")


def deepseek(block: Callable[[str], Shapes], final: str = "shared_head.norm", prefix: str = "model.") -> Shapes:
    shapes: Shapes = {}
    for i in range(2):
        name = f"{prefix}layers.{LAYERS + i}"
        shapes |= norms(name, "enorm", "hnorm", final) | {f"{name}.eh_proj.weight": (H, 2 * H)} | block(name)
    return shapes


def qwen(block: Callable[[str], Shapes], count: int = 1) -> Shapes:
    shapes = norms("mtp", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm") | {"mtp.fc.weight": (H, 2 * H)}
    for i in range(count):
        shapes |= block(f"mtp.layers.{i}")
    return shapes


def softmax_experts(name: str) -> Shapes:
    shapes: Shapes = {f"{name}.gate.weight": (4, H), f"{name}.shared_expert_gate.weight": (1, H)}
    for e in range(4):
        shapes |= mlp(f"{name}.experts.{e}", MOE)
    return shapes | mlp(f"{name}.shared_expert", MOE)


def gated_layer(name: str) -> Shapes:
    return norms(name, *PRE_NORM) | gqa(f"{name}.self_attn", qk_norm=True, gated=True)


def pre_norm(name: str, attention: Shapes, feed: Shapes) -> Shapes:
    return norms(name, *PRE_NORM) | attention | feed


@dataclass(frozen=True)
class Family:
    """A published shape of config.json and of the MTP tensors beside it."""

    config: dict[str, Any]
    shapes: Shapes
    reference: Callable[..., tuple[Tensor, Tensor]]
    layers: int = 1
    outer: dict[str, Any] | None = None  # what the language model's config lies in
    prefix: str = "model."
    state_width: int = H


STREAMS = 3
SOFTMAX_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": MOE,
    "shared_expert_intermediate_size": MOE,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "partial_rotary_factor": 0.5,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}


def _indexer(name: str) -> Shapes:
    return {
        f"{name}.indexer.wq_b.weight": (2 * 16, 24),
        f"{name}.indexer.wk.weight": (16, H),
        f"{name}.indexer.weights_proj.weight": (2, H),
    }


def _mimo() -> Shapes:
    name = "model.mtp_layers.0"
    own = norms(name, "token_layernorm", "hidden_layernorm", "final_layernorm") | {
        f"{name}.input_proj.weight": (H, 2 * H)
    }
    return own | pre_norm(name, gqa(f"{name}.self_attn", bias=True), mlp(f"{name}.mlp"))


def _mimo_v2() -> Shapes:
    name = "model.mtp.layers.0"
    own = norms(name, "enorm", "hnorm", "final_layernorm", "input_layernorm", "pre_mlp_layernorm")
    attention: Shapes = {
        f"{name}.self_attn.q_proj.weight": (HEADS * WIDTH, H),
        f"{name}.self_attn.k_proj.weight": (2 * KV * WIDTH, H),
        f"{name}.self_attn.v_proj.weight": (2 * KV * 6, H),
        f"{name}.self_attn.o_proj.weight": (H, HEADS * 6),
        f"{name}.self_attn.attention_sink_bias": (HEADS,),
    }
    return own | {f"{name}.eh_proj.weight": (H, 2 * H)} | attention | mlp(f"{name}.mlp")


def _ernie() -> Shapes:
    shapes: Shapes = {"model.norm.weight": (H,)}
    for i in range(2):
        shapes |= {f"model.mtp_{kind}_norm.{i}.weight": (H,) for kind in ("emb", "hidden")}
        shapes[f"model.mtp_linear_proj.{i}.weight"] = (H, 2 * H)
        name = f"model.mtp_block.{i}"
        shapes |= pre_norm(name, gqa(f"{name}.self_attn"), mlp(f"{name}.mlp"))
    return shapes


def _nemotron() -> Shapes:
    first, second = "mtp.layers.0", "mtp.layers.1"
    shapes = norms(first, "enorm", "hnorm", "norm") | {f"{first}.eh_proj.weight": (H, 2 * H)} | gqa(f"{first}.mixer")
    shapes |= norms(second, "norm", "final_layernorm")
    shapes |= {f"{second}.mixer.gate.weight": (4, H), f"{second}.mixer.gate.e_score_correction_bias": (4,)}
    for e in range(4):
        shapes |= {
            f"{second}.mixer.experts.{e}.up_proj.weight": (MOE, H),
            f"{second}.mixer.experts.{e}.down_proj.weight": (H, MOE),
        }
    shared = f"{second}.mixer.shared_experts"
    return shapes | {f"{shared}.up_proj.weight": (INTER, H), f"{shared}.down_proj.weight": (H, INTER)}


def _longcat() -> Shapes:
    name = "model.mtp.layers.0"
    own: Shapes = {f"{name}.{kind}.m.weight": (H,) for kind in ("enorm", "hnorm")}
    own |= {
        f"{name}.eh_proj.weight": (H, 2 * H),
        "model.mtp.norm.weight": (H,),
        "model.mtp.embed_tokens.weight": (VOCAB, H),
    }
    return own | pre_norm(name, mla(f"{name}.self_attn"), mlp(f"{name}.transformer_layer.mlp"))


def _hy_experts(name: str) -> Shapes:
    shapes: Shapes = {f"{name}.router.gate.weight": (4, H), f"{name}.expert_bias": (4,)}
    for e in range(4):
        shapes |= mlp(f"{name}.experts.{e}", MOE)
    return shapes | mlp(f"{name}.shared_mlp", MOE)


def _glm_ocr(name: str) -> Shapes:
    own = norms(name, *PRE_NORM, "post_self_attn_layernorm", "post_mlp_layernorm") | gqa(f"{name}.self_attn")
    return own | {f"{name}.mlp.gate_up_proj.weight": (2 * INTER, H), f"{name}.mlp.down_proj.weight": (H, INTER)}


def _step() -> Shapes:
    shapes: Shapes = {}
    for i, count in enumerate((6, 6, HEADS)):
        name = f"model.layers.{LAYERS + i}"
        shapes |= norms(name, "enorm", "hnorm", "transformer.shared_head.norm", *PRE_NORM) | mlp(f"{name}.mlp")
        shapes |= {f"{name}.eh_proj.weight": (H, 2 * H), f"{name}.transformer.shared_head.output.weight": (VOCAB, H)}
        shapes |= gqa(f"{name}.self_attn", qk_norm=True)
        shapes |= {
            f"{name}.self_attn.q_proj.weight": (count * WIDTH, H),
            f"{name}.self_attn.o_proj.weight": (H, count * WIDTH),
            f"{name}.self_attn.g_proj.weight": (count, H),
        }
    return shapes


def _post_norm(name: str) -> Shapes:
    own = norms(name, "post_attention_layernorm", "post_feedforward_layernorm")
    return own | gqa(f"{name}.self_attn", qk_norm=True) | mlp(f"{name}.mlp")


def _streams() -> Shapes:
    shapes: Shapes = {}
    for i in range(2):
        name, n = f"mtp.{i}", STREAMS
        shapes |= norms(name, "enorm", "hnorm", "norm", "attn_norm", "ffn_norm")
        shapes |= {f"{name}.{kind}_proj.weight": (H, H) for kind in "eh"}
        shapes |= {f"{name}.hc_head_fn": (n, n * H), f"{name}.hc_head_base": (n,), f"{name}.hc_head_scale": (1,)}
        for kind in ("attn", "ffn"):
            rows = (2 + n) * n
            shapes |= {f"{name}.hc_{kind}_fn": (rows, n * H), f"{name}.hc_{kind}_base": (rows,)}
            shapes[f"{name}.hc_{kind}_scale"] = (3,)
        shapes |= {
            f"{name}.attn.wq_a.weight": (24, H),
            f"{name}.attn.q_norm.weight": (24,),
            f"{name}.attn.wq_b.weight": (HEADS * 16, 24),
            f"{name}.attn.wkv.weight": (16, H),
            f"{name}.attn.kv_norm.weight": (16,),
            f"{name}.attn.wo_a.weight": (2 * 8, HEADS * 16 // 2),
            f"{name}.attn.wo_b.weight": (H, 2 * 8),
            f"{name}.attn.attn_sink": (HEADS,),
            f"{name}.ffn.gate.weight": (4, H),
            f"{name}.ffn.gate.bias": (4,),
        }
        for expert in (*(f"experts.{e}" for e in range(4)), "shared_experts"):
            shapes |= {f"{name}.ffn.{expert}.w{j}.weight": (H, MOE) if j == 2 else (MOE, H) for j in (1, 2, 3)}
    return shapes


_STEP_TYPES = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
_DEEPSEEK_V3 = {**BASE, **LATENT, **SIGMOID_EXPERTS, "n_group": 2, "model_type": "deepseek_v3", **NEXTN}
_WINDOWED = {"sliding_window": 5, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}

FAMILIES: dict[str, Family] = {
    "deepseek_v3": Family(
        _DEEPSEEK_V3,
        deepseek(lambda n: pre_norm(n, mla(f"{n}.self_attn"), sigmoid_experts(f"{n}.mlp"))),
        reference.deepseek_v3,
        layers=2,
    ),
    "deepseek_v32": Family(
        {**_DEEPSEEK_V3, "model_type": "deepseek_v32", "index_topk": 64, "index_n_heads": 2, "index_head_dim": 16},
        deepseek(
            lambda n: pre_norm(n, mla(f"{n}.self_attn") | _indexer(f"{n}.self_attn"), sigmoid_experts(f"{n}.mlp"))
        ),
        reference.deepseek_v3,
        layers=2,
    ),
    "deepseek_v4": Family(
        {
            **{key: value for key, value in BASE.items() if key != "intermediate_size"},
            "model_type": "deepseek_v4",
            "moe_intermediate_size": MOE,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "qk_rope_head_dim": 8,
            "q_lora_rank": 24,
            "num_experts_per_tok": 2,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.7,
            "scoring_func": "sqrtsoftplus",
            "swiglu_limit": 0.5,
            "hc_mult": STREAMS,
            "hc_sinkhorn_iters": 3,
            "hc_eps": 1e-6,
            "o_groups": 2,
            "o_lora_rank": 8,
            "index_n_heads": 2,
            "index_head_dim": 8,
            "index_topk": 4,
            "sliding_window": 5,
            "compress_ratios": [0, 0, 4, 4, 0, 0],
            "compress_rope_theta": 160000.0,
            **NEXTN,
        },
        _streams(),
        deepseek_v4,
        layers=2,
        prefix="",
        state_width=STREAMS * H,
    ),
    "openpangu": Family(
        {**_DEEPSEEK_V3, "model_type": "pangu_ultra_moe", "sandwich_norm": True},
        deepseek(
            lambda n: (
                pre_norm(n, mla(f"{n}.self_attn"), sigmoid_experts(f"{n}.mlp"))
                | norms(n, "pre_mlp_layernorm", "post_mlp_layernorm")
            )
        ),
        reference.openpangu,
        layers=2,
    ),
    "glm4_moe": Family(
        {
            **BASE,
            **SIGMOID_EXPERTS,
            "use_qk_norm": True,
            "partial_rotary_factor": 0.5,
            "model_type": "glm4_moe",
            **NEXTN,
        },
        deepseek(lambda n: pre_norm(n, gqa(f"{n}.self_attn", qk_norm=True), sigmoid_experts(f"{n}.mlp"))),
        reference.glm4_moe,
        layers=2,
    ),
    "glm4_moe_lite": Family(
        {**_DEEPSEEK_V3, "model_type": "glm4_moe_lite", "n_group": 1},
        deepseek(lambda n: pre_norm(n, mla(f"{n}.self_attn"), sigmoid_experts(f"{n}.mlp"))),
        reference.glm4_moe_lite,
        layers=2,
    ),
    "glm_ocr": Family(
        {**BASE, "model_type": "glm_ocr_text", "rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]}, **NEXTN},
        deepseek(_glm_ocr, prefix="model.language_model."),
        reference.glm_ocr,
        layers=2,
        outer={"model_type": "glm_ocr"},
        prefix="model.language_model.",
    ),
    "mimo": Family({**BASE, "model_type": "mimo", "num_nextn_predict_layers": 1}, _mimo(), reference.mimo),
    "mimo_v2": Family(
        {
            **BASE,
            **_WINDOWED,
            "model_type": "mimo_v2_flash",
            "v_head_dim": 6,
            "partial_rotary_factor": 0.5,
            "rope_parameters": {
                "full_attention": {**ROPE, "rope_theta": 5e6, "partial_rotary_factor": 0.5},
                "sliding_attention": {**ROPE, "partial_rotary_factor": 0.5},
            },
            "attention_value_scale": 0.7,
            "moe_intermediate_size": MOE,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "num_nextn_predict_layers": 3,
        },
        _mimo_v2(),
        reference.mimo_v2,
    ),
    "qwen3_next": Family(
        {**BASE, **SOFTMAX_EXPERTS, "model_type": "qwen3_next", "num_nextn_predict_layers": 1},
        qwen(lambda n: gated_layer(n) | softmax_experts(f"{n}.mlp")),
        reference.qwen3_next,
    ),
    "qwen3_5": Family(
        {
            **BASE,
            "model_type": "qwen3_5_text",
            "mtp_num_hidden_layers": 1,
            "partial_rotary_factor": 0.5,
            "layer_types": SOFTMAX_EXPERTS["layer_types"],
        },
        qwen(lambda n: gated_layer(n) | mlp(f"{n}.mlp")),
        reference.qwen3_next,
        outer={"model_type": "qwen3_5"},
        prefix="model.language_model.",
    ),
    "qwen3_5_moe": Family(
        {**BASE, **SOFTMAX_EXPERTS, "model_type": "qwen3_5_moe_text", "mtp_num_hidden_layers": 2},
        qwen(lambda n: gated_layer(n) | softmax_experts(f"{n}.mlp"), 2),
        reference.qwen3_next,
        layers=2,
        outer={"model_type": "qwen3_5_moe"},
        prefix="model.language_model.",
    ),
    "ernie4_5_moe": Family(
        {
            **BASE,
            "model_type": "ernie4_5_moe",
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": MOE,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 3,
            "use_bias": False,
            **NEXTN,
        },
        _ernie(),
        reference.ernie4_5_moe,
        layers=2,
    ),
    "nemotron_h": Family(
        {
            **BASE,
            **SIGMOID_EXPERTS,
            "model_type": "nemotron_h",
            "layer_norm_epsilon": 1e-5,
            "moe_shared_expert_intermediate_size": INTER,
            "mlp_hidden_act": "relu2",
            "hybrid_override_pattern": "M*ME",
            "mtp_hybrid_override_pattern": "*E",
            "num_nextn_predict_layers": 1,
        },
        _nemotron(),
        reference.nemotron_h,
        prefix="backbone.",
    ),
    "exaone_moe": Family(
        {
            **BASE,
            **_WINDOWED,
            "model_type": "exaone_moe",
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": MOE,
            "num_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "mtp_layer_types": ["full_attention"],
            "num_nextn_predict_layers": 1,
        },
        qwen(lambda n: pre_norm(n, gqa(f"{n}.self_attn", qk_norm=True), mlp(f"{n}.mlp"))),
        reference.exaone_moe,
    ),
    "exaone4_5": Family(
        {**BASE, **_WINDOWED, "model_type": "exaone4"},
        qwen(_post_norm),
        reference.exaone4_5,
        outer={"model_type": "exaone4_5", "num_nextn_predict_layers": 1},
        prefix="model.language_model.",
    ),
    "longcat_flash": Family(
        {
            **BASE,
            **LATENT,
            "model_type": "longcat_flash",
            "num_layers": LAYERS,
            "ffn_hidden_size": INTER,
            "expert_ffn_hidden_size": MOE,
            "n_routed_experts": 4,
            "moe_topk": 2,
            "zero_expert_num": 2,
        },
        _longcat(),
        reference.longcat_flash,
    ),
    "hy_v3": Family(
        {
            **BASE,
            "model_type": "hy_v3",
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
            "moe_intermediate_size": MOE,
            "router_scaling_factor": 1.7,
            "enable_moe_fp32_combine": False,
            "first_k_dense_replace": 1,
            **NEXTN,
        },
        deepseek(
            lambda n: pre_norm(n, gqa(f"{n}.self_attn", qk_norm=True), _hy_experts(f"{n}.mlp")), "final_layernorm"
        ),
        reference.hy_v3,
        layers=2,
    ),
    "step3p5": Family(
        {
            **BASE,
            "model_type": "step3p5",
            "num_nextn_predict_layers": 3,
            "layer_types": [*_STEP_TYPES, "sliding_attention", "sliding_attention", "full_attention"],
            "moe_layers_enum": "1,2,3",
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "moe_intermediate_size": MOE,
            "share_expert_dim": MOE,
            "sliding_window": 5,
            "attention_other_setting": {"num_attention_heads": 6},
            "rope_theta": [1e6, 1e4, 1e4, 1e6, 1e4, 1e4, 1e6],
            "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 1.0, 1.0, 0.5],
        },
        _step(),
        reference.step3p5,
        layers=3,
    ),
}

FAMILIES["step3p7"] = replace(FAMILIES["step3p5"], outer={"model_type": "step3p7"})
FAMILIES["intern_s2"] = replace(FAMILIES["qwen3_5_moe"], outer={"model_type": "intern_s2_preview"})


def draw(shapes: Shapes, seed: int = 0) -> dict[str, Tensor]:
    """Norms from 0.1..2.1, everything else N(0, 0.15)."""
    generator = torch.Generator().manual_seed(seed)

    def one(name: str, shape: tuple[int, ...]) -> Tensor:
        if "norm" in name:
            return 0.1 + 2.0 * torch.rand(shape, generator=generator)
        return 0.15 * torch.randn(shape, generator=generator)

    return {name: one(name, shape) for name, shape in shapes.items()}


def write_checkpoint(folder: Path, family: Family, tensors: dict[str, Tensor]) -> Path:
    """config.json and model.safetensors, of the target only so much that its layers' prefix shows."""
    folder.mkdir(parents=True, exist_ok=True)
    config = family.config if family.outer is None else {**family.outer, "text_config": family.config}
    (folder / "config.json").write_text(json.dumps(config))
    some = {f"{family.prefix}layers.0.input_layernorm.weight": torch.ones(H)}
    save_file({**some, **tensors}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
