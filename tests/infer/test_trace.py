import copy

import pytest
import torch
from torch import nn

from spectrain.heads.target_tensors import TargetTensors
from spectrain.infer import trace
from spectrain.infer.target import Target, TargetError
from spectrain.tests.models import COMMON, TARGETS, build, gpt2_tiny, lone_forward, rand_llama

MINICPM3 = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "dim_model_base": 16,
}
CAPPED = {"head_dim": 8, "query_pre_attn_scalar": 16, "sliding_window": 5}
# factory, logit scale, softcap, whether the head has a bias
HEADS = {
    **{family: (factory, 1.0, None, False) for family, factory in TARGETS.items()},
    "tied": (lambda: rand_llama(2, tie_word_embeddings=True), 1.0, None, False),
    "bias": (lambda: build("Phi", **COMMON), 1.0, None, True),
    "multiplied": (lambda: build("Cohere", **COMMON, logit_scale=0.3), 0.3, None, False),
    "divided": (lambda: build("Granite", **COMMON, logits_scaling=8.0), 0.125, None, False),
    "scaled_before_the_head": (lambda: build("MiniCPM3", **{**COMMON, **MINICPM3}), 0.5, None, False),
    "softcap": (lambda: build("Gemma2", **COMMON, **CAPPED, final_logit_softcapping=5.0), 1.0, 5.0, False),
    "loose_softcap": (lambda: build("Gemma2", **COMMON, **CAPPED, final_logit_softcapping=3e3), 1.0, 3e3, False),
}


@pytest.mark.parametrize("family", HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_record_rebuilds_the_logits_of_the_model(family, dtype):
    factory, scale, softcap, has_bias = HEADS[family]
    model = factory().to(dtype)
    oracle = copy.deepcopy(model)
    tensors = Target.from_model(model).tensors()
    assert tensors.logit_scale == pytest.approx(scale, rel=1e-5)
    assert (tensors.softcap is None) == (softcap is None)
    if softcap is not None:
        assert tensors.softcap == pytest.approx(softcap, rel=1e-5)
    assert (tensors.lm_head_bias is not None) == has_bias
    logits, states = lone_forward(oracle, [5, 6, 7, 8, 9, 40, 41])
    rebuilt = tensors.logits(states[-1])
    bound = (1e-5 if dtype == torch.float32 else 2e-2) * logits.abs().max().item()
    assert (rebuilt - logits).abs().max().item() <= bound


def test_one_plus_w_norms_are_stored_as_what_multiplies():
    model = TARGETS["gemma3"]()
    stored = model.model.norm.weight.clone()
    norm = Target.from_model(model).tensors().norm
    torch.testing.assert_close(norm.weight, 1.0 + stored, rtol=1e-5, atol=0)
    llama = rand_llama()
    stored = llama.model.norm.weight.clone()
    torch.testing.assert_close(Target.from_model(llama).tensors().norm.weight, stored, rtol=1e-5, atol=0)


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 3e-4, 1e-12])
def test_eps_is_measured(eps):
    tensors = Target.from_model(rand_llama(1, rms_norm_eps=eps)).tensors()
    assert tensors.norm.eps == pytest.approx(eps, rel=2e-2) or eps < 1e-11 and tensors.norm.eps < 1e-11
    assert tensors.norm.kind == "rms"


def test_layer_norm_keeps_its_bias():
    model = gpt2_tiny()
    norm = Target.from_model(model).tensors().norm
    assert norm.kind == "layer"
    torch.testing.assert_close(norm.weight, model.transformer.ln_f.weight.data, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(norm.bias, model.transformer.ln_f.bias.data, rtol=1e-5, atol=1e-6)


def test_a_wrong_norm_would_be_seen():
    model = rand_llama()
    oracle = copy.deepcopy(model)
    tensors = Target.from_model(model).tensors()
    logits, states = lone_forward(oracle, list(range(5, 30)))
    assert torch.equal(tensors.logits(states[-1]).argmax(-1), logits.argmax(-1))
    twice = tensors.logits(tensors.norm(states[-1]))
    missing = tensors.logits_of_normed(states[-1])
    assert (twice.argmax(-1) != logits.argmax(-1)).any()
    assert (missing.argmax(-1) != logits.argmax(-1)).any()


def test_record_survives_a_save(tmp_path):
    tensors = Target.from_model(TARGETS["gemma3"]()).tensors()
    tensors.save(tmp_path / "target.safetensors")
    loaded = TargetTensors.load(tmp_path / "target.safetensors")
    states = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded.logits(states), tensors.logits(states))
    assert loaded.lm_head.data_ptr() == loaded.embed_tokens.data_ptr()


def test_a_projection_or_dense_layer_before_the_head_is_refused_by_name():
    opt = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48, "vocab_size": 97}
    projected = Target.from_model(build("OPT", **opt, max_position_embeddings=64, word_embed_proj_dim=16))
    with pytest.raises(TargetError, match="embeddings are 16 .* states are 32 wide"):
        projected.tensors()
    dense = Target.from_model(build("ModernBertDecoder", **COMMON))
    with pytest.raises(TargetError, match="lm_head.dense stands between the final norm and the output head"):
        dense.tensors()


class Odd(nn.Module):
    """Looks like a norm and is none: the maximum norm."""

    def forward(self, x):
        return x / x.abs().amax(-1, keepdim=True).clamp(min=1e-6)


def test_an_unknown_norm_or_logit_transform_is_refused():
    model = rand_llama()
    model.model.norm = Odd()
    with pytest.raises(TargetError, match="model.norm .* neither an RMS nor a layer norm"):
        Target.from_model(model).tensors()

    squashed = rand_llama()
    squashed.lm_head.register_forward_hook(lambda module, args, output: output + 0.01 * output.abs().sqrt())
    with pytest.raises(TargetError, match="refused for draft heads"):
        Target.from_model(squashed).tensors()


def test_verification_catches_a_record_that_is_wrong(monkeypatch):
    monkeypatch.setattr(trace, "measure_logit_transform", lambda *args: (1.01, None))
    with pytest.raises(TargetError, match="rebuilt from norm, head, scale and softcap are off by 0.0[01]"):
        Target.from_model(rand_llama()).tensors()
