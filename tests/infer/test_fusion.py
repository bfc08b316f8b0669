"""Fused decoder layers against the model's own code, for families that have such layers, only seem to, or do not."""

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from spectrain.infer import fusion
from spectrain.infer.parity import packed_batch
from spectrain.infer.planes import Planes
from spectrain.infer.target import Target
from spectrain.kernels import dispatch, reference
from spectrain.tests.infer.packed import compare
from spectrain.tests.kernels.twins import refuse_twins
from spectrain.tests.models import (
    COMMON,
    build,
    deepseek_v3,
    gemma3,
    gpt2_tiny,
    lone_forward,
    mixtral,
    qwen3_widehead,
    rand_llama,
)

TOLERANCE = 1e-4  # float32, logits up to 36 and states up to tens in size; see test_target.py
HALF_SLIDING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2}
NINE_HEADS = {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3}
GRANITE = {"logits_scaling": 8.0, "attention_multiplier": 0.3}

FUSED = {
    "llama": rand_llama,
    "llama_tied": lambda: rand_llama(2, tie_word_embeddings=True),
    "llama_biases": lambda: rand_llama(attention_bias=True, mlp_bias=True),
    "llama_nine_heads": lambda: rand_llama(**NINE_HEADS),
    "qwen2": lambda: build("Qwen2", **COMMON),
    "qwen2_half_sliding": lambda: build("Qwen2", **COMMON, **HALF_SLIDING, use_sliding_window=True),
    "qwen3": qwen3_widehead,
    "mistral_sliding": lambda: build("Mistral", **COMMON, sliding_window=5),
    "granite_scaled_attention": lambda: build("Granite", **COMMON, **GRANITE, residual_multiplier=1.0),
}
REFUSED = {
    "gemma3": (gemma3, "not gated by SiLU"),
    "gpt2": (gpt2_tiny, "not made of"),
    "mixtral": (mixtral, "not made of"),
    "deepseek_v3": (deepseek_v3, "not made of"),
    "olmo2": (lambda: build("Olmo2", **COMMON), "q_norm that is no RMS norm over 8"),
    "cohere": (lambda: build("Cohere", **COMMON), "input_layernorm that is no RMS norm"),
    "hunyuan": (lambda: build("HunYuanDenseV1", **COMMON, head_dim=8), "holds self_attn.query_layernorm.weight"),
    # made of the same parts, but computing something else:
    "granite": (lambda: build("Granite", **COMMON, **GRANITE, residual_multiplier=0.9), "layer 0 is off by"),
    "helium_interleaved_rope": (lambda: build("Helium", **COMMON, head_dim=8), "layer 0 is off by"),
    "smollm3_layer_without_rope": (lambda: build("SmolLM3", **COMMON, no_rope_layers=[1, 0, 1, 1]), "layer 1 is off"),
}


def fused(model: PreTrainedModel) -> Target:
    target = Target.from_model(model)
    target.capture(range(target.num_layers + 1))
    assert target.fuse() is None
    return target


def logits_of(target: Target, rows: int = 7) -> Tensor:
    target.bind(Planes(target.plane_specs, 8, 4, target.device))
    tokens = torch.arange(3, 3 + rows).tolist()
    return target.forward(packed_batch([tokens], [0], [[2, 5, 1]], 4, target.device)).logits


@pytest.mark.parametrize("family", FUSED)
def test_fused_rows_equal_each_request_alone(family: str) -> None:
    """Chunks, decode and verification rows, states at every layer: the scenario of test_target.py."""
    model = FUSED[family]()
    oracle = copy.deepcopy(model)
    target = fused(model)
    assert all(isinstance(layer.forward, fusion.FusedLayer) for layer in model.get_decoder().layers)
    assert isinstance(model.get_decoder().norm.forward, fusion.Norm)
    assert isinstance(model.get_output_embeddings().forward, fusion.FusedHead)
    errors = compare(target, oracle)
    assert errors.logits < TOLERANCE
    assert errors.states < TOLERANCE


def test_in_float64_the_difference_is_rounding() -> None:
    model = qwen3_widehead().double()
    oracle = copy.deepcopy(model)
    oracle.set_attn_implementation("sdpa")  # the eager one computes its softmax in float32
    errors = compare(fused(model), oracle)
    assert errors.logits < 1e-5  # logits are handed over in float32
    assert errors.states < 1e-5  # norms are float32 in every dtype


@pytest.mark.parametrize("family", REFUSED)
def test_other_layers_are_refused_by_reason_and_left_alone(family: str) -> None:
    make, reason = REFUSED[family]
    target = Target.from_model(make())
    before, state = logits_of(target), {k: v.clone() for k, v in target.model.state_dict().items()}
    found = target.fuse()
    assert found is not None and reason in found and "\n" not in found
    assert not any("forward" in module.__dict__ for module in target.model.modules())
    assert all(torch.equal(v, state[k]) for k, v in target.model.state_dict().items())
    assert torch.equal(logits_of(target), before)


class FarLayer(LlamaDecoderLayer):
    """Grows with the position, like scales that set in beyond the context a model was trained for."""

    def forward(self, hidden_states: Tensor, *args, position_ids: Tensor, **kwargs) -> Tensor:
        out = super().forward(hidden_states, *args, position_ids=position_ids, **kwargs)
        return out * (1 + 0.05 * (position_ids > 50)[..., None])


def test_what_shows_only_at_far_positions_is_found() -> None:
    model = rand_llama()
    model.get_decoder().layers[3].__class__ = FarLayer
    assert "layer 3 is off by" in (Target.from_model(model).fuse() or "")


@pytest.mark.parametrize("op", ["linear", "gated_linear", "rms_norm", "rope_store"])
def test_a_wrong_kernel_ends_in_the_models_own_code(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target.from_model(qwen3_widehead())
    before, right = logits_of(target), getattr(dispatch, op)
    monkeypatch.setattr(dispatch, op, lambda *args, **options: right(*args, **options) * 1.02)
    assert target.fuse() is not None
    assert torch.equal(logits_of(target), before)


def test_hooks_inside_a_layer_refuse_it() -> None:
    model = rand_llama()
    model.get_decoder().layers[1].mlp.up_proj.register_forward_hook(lambda module, args, output: 2 * output)
    target = Target.from_model(model)
    assert "hooks" in (target.fuse() or "")


def test_weights_are_packed_without_a_second_copy() -> None:
    model = rand_llama(attention_bias=True)
    target = fused(model)
    for layer in model.get_decoder().layers:
        attention, mlp = layer.self_attn, layer.mlp
        for group in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
            assert len({linear.weight.untyped_storage().data_ptr() for linear in group}) == 1
            assert group[0].weight.untyped_storage().nbytes() == sum(linear.weight.nbytes for linear in group)
        assert layer.forward.packed.qkv_weight.data_ptr() == attention.q_proj.weight.data_ptr()
    with torch.no_grad():
        before = logits_of(target)
        model.get_decoder().layers[0].self_attn.v_proj.weight.zero_()
        assert not torch.equal(logits_of(target), before)


def test_unfuse_restores_the_model() -> None:
    model = rand_llama()
    target = Target.from_model(model)
    before, state = logits_of(target), {k: v.clone() for k, v in model.state_dict().items()}
    for _ in range(2):
        assert target.fuse() is None
        assert target.fuse() is None, "doing it again changes nothing"
        target.unfuse()
        target.unfuse()
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert torch.equal(logits_of(target), before)
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key])
        assert value.untyped_storage().nbytes() == value.nbytes, f"{key} still shares its storage"


def test_planes_bound_before_stay_bound() -> None:
    target = Target.from_model(rand_llama())
    planes = Planes(target.plane_specs, 8, 4, target.device)
    target.bind(planes)
    assert target.fuse() is None
    target.forward(packed_batch([[5, 6, 7]], [0], [[2]], 4, target.device))
    assert bool(planes["target.5"].k[2, :3].any()) and not bool(planes["target.5"].k[3].any())


def test_a_second_target_of_a_fused_model_starts_from_its_own_code() -> None:
    model = rand_llama()
    oracle = copy.deepcopy(model)
    fused(model)
    second = Target.from_model(model)
    assert not fusion.is_fused(model)
    assert (logits_of(second) - lone_forward(oracle, list(range(3, 10)))[0]).abs().max() < TOLERANCE


def test_a_copy_of_a_fused_model_is_its_own() -> None:
    model = rand_llama()
    fused(model)
    twin = copy.deepcopy(model)
    for ours, theirs in zip(model.get_decoder().layers, twin.get_decoder().layers, strict=True):
        assert theirs.forward.parts.layer is theirs
        assert theirs.forward.packed.qkv_weight.data_ptr() == theirs.self_attn.q_proj.weight.data_ptr()
        assert theirs.forward.packed.qkv_weight.data_ptr() != ours.forward.packed.qkv_weight.data_ptr()


def test_a_fused_layer_outside_a_step_says_what_to_do() -> None:
    target = fused(rand_llama())
    with pytest.raises(ValueError, match="Target.forward"):
        target.model(input_ids=torch.tensor([[5, 6]]), use_cache=False)


def test_in_bfloat16_logits_are_not_rounded_on_their_way() -> None:
    model = rand_llama(2).bfloat16()
    target = Target.from_model(model)
    before = logits_of(target)
    assert target.fuse() is None
    after = logits_of(target)
    assert float((after - before).norm() / before.norm()) < 0.05
    assert torch.equal(before, before.bfloat16().float())
    assert model.get_output_embeddings()(torch.randn(1, 3, 32).bfloat16()).dtype == torch.float32


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (LlamaRMSNorm(24, eps=1e-3), (1e-3, False)),
        (Gemma3RMSNorm(24, eps=1e-5), (1e-5, True)),
        (nn.LayerNorm(24), None),
        (nn.LayerNorm(24, bias=False), None),
        (nn.Identity(), None),
        (LlamaRMSNorm(12), None),
    ],
    ids=["rms", "unit_offset", "layer", "layer_no_bias", "identity", "narrow"],
)
def test_norms_are_measured(module: nn.Module, expected: tuple[float, bool] | None) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(0.2, 2.0, generator=torch.Generator().manual_seed(0))
    found = fusion.measure_rms_norm(module, 24)
    assert (found and (found.eps, found.unit_offset)) == expected


def test_a_norm_that_hides_another_eps_is_none() -> None:
    norm = LlamaRMSNorm(24, eps=1e-3)
    norm.eps, norm.variance_epsilon = 1e-3, 2e-3
    assert fusion.measure_rms_norm(norm, 24) == fusion.Norm(norm.weight, 2e-3, False)
    del norm.variance_epsilon
    norm.forward = lambda x: reference.fused.rms_norm(x, norm.weight, 2e-3)
    assert fusion.measure_rms_norm(norm, 24) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama_nine_heads", "qwen2", "qwen3", "mistral_sliding"])
def test_on_a_gpu_no_twin_runs_and_logits_agree(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target.from_model(FUSED[family]().to("cuda", dtype))
    before = [logits_of(target, rows) for rows in (1, 7, 12)]
    refuse_twins(monkeypatch)
    assert target.fuse() is None
    for rows, expected in zip((1, 7, 12), before, strict=True):
        found = logits_of(target, rows)
        error = float((found - expected).norm() / expected.norm())
        assert error < (1e-4 if dtype == torch.float32 else 0.05)
