"""Where multi-token-prediction layers are in a checkpoint and what they are made of, family by family.

An MTP layer takes the token after a row and the state of that row, each normed, side by side through a projection; runs
a decoder layer of its target's own kind; norms the result and reads it through the output head. A row of the table
says only what differs: names, the order of the halves, which state goes in, which is fed back. The decoder layer itself
is the class that transformers builds the target with, or ours where it is a plain Llama layer.

Names are patterns of a module's name: `{i}` is the MTP layer, `{n}` counts on from the target's layers, `{model}` is
what stands before `layers.` in the checkpoint.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Feedback = Literal["normed", "raw"]
"""What a draft is fed of the one before it: its state behind the last norm, or before it."""


@dataclass(frozen=True, kw_only=True)
class MtpLayout:
    """One family's MTP layers."""

    model_types: tuple[str, ...]
    library: str | None = None  # `module:Prefix` of the classes in transformers.models; None: plain layers, ours
    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    blocks: tuple[str, ...]  # of the decoder layer; several where one MTP layer is made of several
    head: str | None = None  # an output matrix of its own; None: the target's
    collapse: str | None = None  # what makes one state of several streams, for families whose layers pass those on
    qkv_bias: bool = False  # of plain layers
    block_class: str = "DecoderLayer"  # behind the library's prefix, or one of ours
    rotary: bool = True  # whether attention knows positions
    count_key: str | None = "num_nextn_predict_layers"  # of the config: how many layers there are; None: always one
    first_only: bool = False  # later layers are never used; else layer k % n makes draft k
    goes_on: bool = False  # the config's lists go on over MTP layers, whose blocks are numbered behind the target's
    hidden_first: bool = False  # the projection reads [hidden ; embedding]
    raw_states: bool = False  # the target's states go in as they are before its final norm
    feedback: Feedback = "normed"  # as vLLM 0.33 serves the family
    renames: tuple[tuple[str, str], ...] = ()  # what the checkpoint says, what the classes do
    set: Mapping[str, Any] = field(default_factory=dict)  # of the config, for the blocks; lists are repeated
    refused: str | None = None  # why the engine cannot run it


_DEEPSEEK_LAYER = "{model}layers.{n}"
_DEEPSEEK: dict[str, Any] = {
    "embedding_norm": f"{_DEEPSEEK_LAYER}.enorm",
    "hidden_norm": f"{_DEEPSEEK_LAYER}.hnorm",
    "projection": f"{_DEEPSEEK_LAYER}.eh_proj",
    "final_norm": f"{_DEEPSEEK_LAYER}.shared_head.norm",
    "blocks": (_DEEPSEEK_LAYER,),
}
_QWEN: dict[str, Any] = {
    "embedding_norm": "mtp.pre_fc_norm_embedding",
    "hidden_norm": "mtp.pre_fc_norm_hidden",
    "projection": "mtp.fc",
    "final_norm": "mtp.norm",
    "blocks": ("mtp.layers.{i}",),
}
_FULL = {"layer_types": ["full_attention"]}
_SPARSE = {"first_k_dense_replace": 0}

FRESH = "llama"
"""The layout of layers that are trained from nothing, for a target that has none of its own."""

LAYOUTS: dict[str, MtpLayout] = {
    FRESH: MtpLayout(model_types=(), **_DEEPSEEK),
    "deepseek_v3": MtpLayout(model_types=("deepseek_v3",), library="deepseek_v3:DeepseekV3", set=_SPARSE, **_DEEPSEEK),
    # on texts that its indexer leaves whole its layers are DeepSeek V3's
    "deepseek_v32": MtpLayout(
        model_types=("deepseek_v32", "glm_moe_dsa"),
        library="deepseek_v3:DeepseekV3",
        set=_SPARSE,
        refused="an indexer chooses the keys that a row sees, which our cache does not serve",
        **_DEEPSEEK,
    ),
    "deepseek_v4": MtpLayout(
        model_types=("deepseek_v4",),
        library="deepseek_v4:DeepseekV4",
        embedding_norm="mtp.{i}.enorm",
        hidden_norm="mtp.{i}.hnorm",
        projection="mtp.{i}",
        final_norm="mtp.{i}.norm",
        collapse="mtp.{i}",
        blocks=("mtp.{i}",),
        raw_states=True,
        feedback="raw",
        renames=(
            ("attn.wq_a.", "self_attn.q_a_proj."),
            ("attn.q_norm.", "self_attn.q_a_norm."),
            ("attn.wq_b.", "self_attn.q_b_proj."),
            ("attn.wkv.", "self_attn.kv_proj."),
            ("attn.kv_norm.", "self_attn.kv_norm."),
            ("attn.wo_a.", "self_attn.o_a_proj."),
            ("attn.wo_b.", "self_attn.o_b_proj."),
            ("attn.attn_sink", "self_attn.sinks"),
            ("attn_norm.", "input_layernorm."),
            ("ffn.gate.bias", "mlp.gate.e_score_correction_bias"),
            ("ffn.", "mlp."),
            ("w1.", "gate_proj."),
            ("w2.", "down_proj."),
            ("w3.", "up_proj."),
            ("ffn_norm.", "post_attention_layernorm."),
            ("hc_head_", "hc_"),
            ("hc_attn_", "attn_hc."),
            ("hc_ffn_", "ffn_hc."),
        ),
        set={"layer_types": ["sliding_attention"], "mlp_layer_types": ["moe"]},
        refused="its target passes several streams of states on, where our engine serves one",
    ),
    "openpangu": MtpLayout(
        model_types=("pangu_ultra_moe",),
        library="deepseek_v3:DeepseekV3",
        block_class="SandwichBlock",
        refused="transformers builds no openPangu target",
        **_DEEPSEEK,
    ),
    "glm4_moe": MtpLayout(
        model_types=("glm4_moe",), library="glm4_moe:Glm4Moe", feedback="raw", set=_SPARSE, **_DEEPSEEK
    ),
    "glm4_moe_lite": MtpLayout(
        model_types=("glm4_moe_lite",),
        library="glm4_moe_lite:Glm4MoeLite",
        feedback="raw",
        set={"mlp_layer_types": ["sparse"]},
        **_DEEPSEEK,
    ),
    "glm_ocr": MtpLayout(
        model_types=("glm_ocr", "glm_ocr_text"), library="glm_ocr:GlmOcr", feedback="raw", **_DEEPSEEK
    ),
    "mimo": MtpLayout(
        model_types=("mimo",),
        embedding_norm="model.mtp_layers.{i}.token_layernorm",
        hidden_norm="model.mtp_layers.{i}.hidden_layernorm",
        projection="model.mtp_layers.{i}.input_proj",
        final_norm="model.mtp_layers.{i}.final_layernorm",
        blocks=("model.mtp_layers.{i}",),
        hidden_first=True,
        qkv_bias=True,
    ),
    "mimo_v2": MtpLayout(
        model_types=("mimo_v2_flash", "mimo_v2"),
        library="mimo_v2_flash:MiMoV2Flash",
        embedding_norm="model.mtp.layers.{i}.enorm",
        hidden_norm="model.mtp.layers.{i}.hnorm",
        projection="model.mtp.layers.{i}.eh_proj",
        final_norm="model.mtp.layers.{i}.final_layernorm",
        blocks=("model.mtp.layers.{i}",),
        first_only=True,
        renames=(("pre_mlp_layernorm.", "post_attention_layernorm."), ("attention_sink_bias", "sinks")),
        set={"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]},
    ),
    "qwen3_next": MtpLayout(model_types=("qwen3_next",), library="qwen3_next:Qwen3Next", set=_FULL, **_QWEN),
    "qwen3_5": MtpLayout(
        model_types=("qwen3_5", "qwen3_5_text"),
        library="qwen3_5:Qwen3_5",
        count_key="mtp_num_hidden_layers",
        set=_FULL,
        **_QWEN,
    ),
    "qwen3_5_moe": MtpLayout(
        model_types=("qwen3_5_moe", "qwen3_5_moe_text", "intern_s2_preview"),
        library="qwen3_5_moe:Qwen3_5Moe",
        count_key="mtp_num_hidden_layers",
        set=_FULL,
        **_QWEN,
    ),
    "ernie4_5_moe": MtpLayout(
        model_types=("ernie4_5_moe",),
        library="ernie4_5_moe:Ernie4_5_Moe",
        embedding_norm="model.mtp_emb_norm.{i}",
        hidden_norm="model.mtp_hidden_norm.{i}",
        projection="model.mtp_linear_proj.{i}",
        final_norm="model.norm",
        blocks=("model.mtp_block.{i}",),
        raw_states=True,
        feedback="raw",
        # its MTP layer is dense: no layer lies in the range of those with experts
        set={"moe_layer_start_index": 1 << 20, "moe_layer_end_index": 1 << 20},
    ),
    "nemotron_h": MtpLayout(
        model_types=("nemotron_h",),
        library="nemotron_h:NemotronH",
        embedding_norm="mtp.layers.0.enorm",
        hidden_norm="mtp.layers.0.hnorm",
        projection="mtp.layers.0.eh_proj",
        final_norm="mtp.layers.1.final_layernorm",
        blocks=("mtp.layers.0", "mtp.layers.1"),
        block_class="Block",
        rotary=False,
        first_only=True,
        set={"layers_block_type": ["full_attention", "moe"]},
    ),
    "exaone_moe": MtpLayout(
        model_types=("exaone_moe",),
        library="exaone_moe:ExaoneMoe",
        set={"layer_types": ["full_attention"], "mlp_layer_types": ["dense"]},
        **_QWEN,
    ),
    "exaone4_5": MtpLayout(model_types=("exaone4_5",), library="exaone4:Exaone4", **_QWEN),
    "longcat_flash": MtpLayout(
        model_types=("longcat_flash",),
        library="longcat_flash:LongcatFlash",
        embedding_norm="model.mtp.layers.{i}.enorm.m",
        hidden_norm="model.mtp.layers.{i}.hnorm.m",
        projection="model.mtp.layers.{i}.eh_proj",
        final_norm="model.mtp.norm",
        blocks=("model.mtp.layers.{i}",),
        block_class="PreNormBlock",
        count_key=None,
        first_only=True,
        renames=(("transformer_layer.mlp.", "mlp."),),
    ),
    "hy_v3": MtpLayout(
        model_types=("hy_v3",),
        library="hy_v3:HYV3",
        renames=(
            ("mlp.router.gate.", "mlp.gate."),
            ("mlp.expert_bias", "mlp.e_score_correction_bias"),
            ("mlp.shared_mlp.", "mlp.shared_experts."),
        ),
        set={"mlp_layer_types": ["sparse"], **_SPARSE},
        **{**_DEEPSEEK, "final_norm": f"{_DEEPSEEK_LAYER}.final_layernorm"},
    ),
    "step3p5": MtpLayout(
        model_types=("step3p5", "step3p7"),
        library="step3p7:Step3p7",
        goes_on=True,
        feedback="raw",
        head=f"{_DEEPSEEK_LAYER}.transformer.shared_head.output",
        **{**_DEEPSEEK, "final_norm": f"{_DEEPSEEK_LAYER}.transformer.shared_head.norm"},
    ),
}


def layout_of(model_types: Sequence[str]) -> str | None:
    """The name of the layout that serves one of these model types; None where none does."""
    return next((n for m in model_types for n, layout in LAYOUTS.items() if m in layout.model_types), None)
