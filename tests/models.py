"""Tiny random target models shared by the tests: `from spectrain.tests.models import rand_llama`.

Each is built on CPU from its seed without touching the global generator. Projections have a standard deviation of 0.25,
far more than at a real start, so that a mistake in attention shows in the logits; norm weights are drawn from 0.1..2.1,
so that a norm left out or applied twice shows too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@contextmanager
def own_generator(seed: int) -> Iterator[None]:
    """Seeds the global generator inside and leaves it as it was: transformers initialises from it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@torch.no_grad()
def randomise(model: nn.Module, seed: int, std: float = 0.25) -> None:
    """Redraws every parameter in place: vectors of norms from 0.1..2.1 (as stored), everything else N(0, std)."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        if "norm" in name.lower() or ".ln_" in name:
            if name.endswith("bias"):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.copy_(0.1 + 2.0 * torch.rand(parameter.shape, generator=generator))
        else:
            parameter.copy_(std * torch.randn(parameter.shape, generator=generator))


def build(family: str, *, seed: int = 0, std: float = 0.25, head: float = 1.0, **config: Any) -> PreTrainedModel:
    """`family` as in transformers' class names: "Llama" builds a Llama, float32, in eval mode."""
    config_class = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    with own_generator(seed):
        model = AutoModelForCausalLM.from_config(
            config_class(**config), dtype=torch.float32, attn_implementation="eager"
        )
    randomise(model, seed, std)
    if head != 1.0:
        model.get_output_embeddings().weight.data.mul_(head)
    return model.eval().requires_grad_(False)


def rand_llama(num_layers: int = 6, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """RAND: Llama, 97 ids, hidden 32, 6 layers, 4 heads over 2, 64 positions; a head 5 times larger for clear winners.

    Any depth gives SHALLOW, `tie_word_embeddings=True` with 2 layers TIED.
    """
    head = 1.0 if changes.get("tie_word_embeddings") else 5.0
    return build("Llama", seed=seed, head=head, **{**COMMON, "num_hidden_layers": num_layers, **changes})


@torch.no_grad()
def succ_llama(num_layers: int = 2, *, vocab_size: int = 41) -> PreTrainedModel:
    """SUCC: the greedy token after t is always t + 1 (mod 41), whatever came before. Needs vocab_size <= 64."""
    model = build(
        "Llama",
        **{
            **COMMON,
            "vocab_size": vocab_size,
            "hidden_size": 64,
            "num_hidden_layers": num_layers,
            "max_position_embeddings": 256,
            "eos_token_id": None,
        },
    )
    orthonormal, _ = torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))
    embeddings = orthonormal[:vocab_size]
    decoder = model.get_decoder()
    decoder.embed_tokens.weight.copy_(embeddings)
    decoder.norm.weight.fill_(1.0)
    for layer in decoder.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    model.get_output_embeddings().weight.copy_(embeddings.roll(1, dims=0))
    return model


def gpt2_tiny(**changes: Any) -> PreTrainedModel:
    """GPT2TINY: 97 ids, 64 learned positions, 4 layers."""
    return build(
        "GPT2",
        **{"vocab_size": 97, "n_positions": 64, "n_embd": 32, "n_layer": 4, "n_head": 4, **_ends(), **changes},
    )


def qwen3_widehead(**changes: Any) -> PreTrainedModel:
    """WIDEHEAD: Qwen3 whose 4 heads of 16 are wider than its hidden size of 40."""
    return build("Qwen3", **{**COMMON, "hidden_size": 40, "head_dim": 16, **changes})


def gemma3(**changes: Any) -> PreTrainedModel:
    """Gemma-3 text: sliding windows of 5 on every layer but the last, (1 + w) norms, tied and scaled embeddings."""
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    return build(
        "Gemma3",
        **{**COMMON, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 5, "layer_types": kinds, **changes},
    )


@torch.no_grad()
def soften_queries(model: PreTrainedModel) -> PreTrainedModel:
    """Makes queries of attention that does not scale them so small that more than one key counts."""
    for name, parameter in model.named_parameters():
        if name.endswith("q_norm.weight"):
            parameter.mul_(0.2)
    return model


def gemma4(**changes: Any) -> PreTrainedModel:
    """Gemma-4 text: windows of 5 on every second layer, whose heads are half as wide; no layer shares its keys."""
    kinds = ["sliding_attention", "full_attention"] * 2
    model = build(
        "Gemma4",
        **{
            **COMMON,
            "head_dim": 8,
            "global_head_dim": 16,
            "sliding_window": 5,
            "layer_types": kinds,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            **changes,
        },
    )
    return soften_queries(model)


def gemma4_composite(**changes: Any) -> PreTrainedModel:
    """The same text model inside the one that also sees, which is what released checkpoints hold."""
    text = gemma4(**changes).config.to_dict()
    vision = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = transformers.Gemma4Config(text_config=text, vision_config=vision, audio_config=None)
    with own_generator(0):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    randomise(model, 0)
    return soften_queries(model).eval().requires_grad_(False)


def mixtral(**changes: Any) -> PreTrainedModel:
    """Mixtral, 4 experts of which 2 act."""
    return build("Mixtral", **{**COMMON, "num_local_experts": 4, "num_experts_per_tok": 2, **changes})


def deepseek_v3(**changes: Any) -> PreTrainedModel:
    """DeepSeek-V3: latent attention, keys 24 wide and values 12, one dense layer before the experts."""
    return build(
        "DeepseekV3",
        **{
            **COMMON,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "head_dim": 8,
            **changes,
        },
    )


TARGETS = {
    "llama": rand_llama,
    "qwen3": qwen3_widehead,
    "gemma3": gemma3,
    "gpt2": gpt2_tiny,
    "mixtral": mixtral,
    "deepseek_v3": deepseek_v3,
}
"""The six families every part is tested on."""


@torch.no_grad()
def hybrid(family: str, **config: Any) -> PreTrainedModel:
    """A model with recurrent layers, some of whose heads remember tens of tokens and some hardly one."""
    model = build(family, std=0.1, head=5.0, **{**COMMON, "max_position_embeddings": 128, "head_dim": 8, **config})
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            spread = torch.linspace(-5.0, 0.5, parameter.numel())
            parameter.copy_(spread if parameter.dim() == 1 else spread.view(parameter.shape[::-1]).T)
    return model


DELTA_NET = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
QWEN_EXPERTS = {
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
SSM = {"mamba_d_head": 8, "mamba_n_heads": 8, "mamba_d_state": 6, "mamba_n_groups": 2, "mamba_chunk_size": 8}


def qwen3_next(**changes: Any) -> PreTrainedModel:
    """Qwen3-Next: gated delta nets whose q, k, v and z stand together by key head, gated attention, experts."""
    return hybrid("Qwen3Next", **DELTA_NET, **QWEN_EXPERTS, **changes)


def qwen3_5(**changes: Any) -> PreTrainedModel:
    """Qwen3.5, dense."""
    return hybrid("Qwen3_5", **DELTA_NET, **changes)


def nemotron_h(**changes: Any) -> PreTrainedModel:
    """Nemotron-H: every layer is one of Mamba-2, attention and MLP."""
    sizes = {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 6, "n_groups": 2, "chunk_size": 8}
    return hybrid("NemotronH", layers_block_type=["mamba", "mlp", "attention", "mamba"], **sizes, **changes)


HYBRIDS = {
    "qwen3_next": qwen3_next,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": lambda: hybrid("Qwen3_5Moe", **DELTA_NET, **QWEN_EXPERTS),
    "olmo_hybrid": lambda: hybrid("OlmoHybrid", **DELTA_NET),
    "nemotron_h": nemotron_h,
    "bamba": lambda: hybrid("Bamba", attn_layer_indices=[1], **SSM),
    "granite_moe_hybrid": lambda: hybrid(
        "GraniteMoeHybrid",
        layer_types=["mamba", "attention"] * 2,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=16,
        **SSM,
    ),
    "falcon_h1": lambda: hybrid(
        "FalconH1",
        mamba_d_ssm=64,
        ssm_in_multiplier=0.7,
        ssm_multipliers=[0.5, 0.8, 1.2, 0.9, 1.5],
        mamba_rms_norm=False,
        **SSM,
    ),
    "jamba": lambda: hybrid(
        "Jamba", attn_layer_period=2, attn_layer_offset=1, mamba_dt_rank=4, mamba_d_state=6, num_experts=2
    ),
    "lfm2": lambda: hybrid("Lfm2", layer_types=["conv", "full_attention"] * 2),
}
"""Families with recurrent layers."""


@torch.no_grad()
def lone_forward(model: PreTrainedModel, token_ids: list[int] | Tensor) -> tuple[Tensor, list[Tensor]]:
    """The oracle: one request alone through the model as the library runs it, no cache.

    Returns logits [seq, vocab] and L + 1 states [seq, hidden]: id i entering layer i as the library itself reports it,
    id L the raw output of the last layer. Call it on a model no `Target` has taken over.
    """
    ids = torch.as_tensor(token_ids)[None]
    out = model(input_ids=ids, use_cache=False, output_hidden_states=True)
    states = [state[0] for state in out.hidden_states]
    raw: list[Tensor] = []
    layers = next(
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) == model.config.get_text_config().num_hidden_layers
    )
    handle = layers[-1].register_forward_hook(
        lambda module, args, output: raw.append(output[0] if isinstance(output, tuple) else output)
    )
    model(input_ids=ids, use_cache=False)
    handle.remove()
    return out.logits[0].float(), [*states[:-1], raw[0][0]]


def _ends() -> dict[str, int]:
    return {name: COMMON[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
