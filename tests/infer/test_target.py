import copy
import json

import pytest
import torch
import transformers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig, PreTrainedModel

from spectrain.infer import attention
from spectrain.infer.attention import PagedAttend
from spectrain.infer.parity import packed_batch
from spectrain.infer.planes import Planes, PlaneSpec
from spectrain.infer.target import Target, TargetError
from spectrain.tests.infer.packed import compare, run_scenario
from spectrain.tests.models import (
    COMMON,
    ROPE,
    TARGETS,
    build,
    gemma3,
    gemma4,
    gpt2_tiny,
    lone_forward,
    qwen3_widehead,
    rand_llama,
)

TOLERANCE = 1e-4  # float32, logits up to 32 and states up to tens in size; a mistake in attention costs 0.1 or more
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LONG_FACTORS = [4.0, 3.0, 2.0, 5.0]
HALF_SLIDING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
V4 = {
    "num_key_value_heads": 1,
    "head_dim": 16,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "o_lora_rank": 8,
    "o_groups": 2,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 4,
}
OPT = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "ffn_dim": 48,
    "max_position_embeddings": 64,
}


def llama4(**changes):
    return build(
        "Llama4",
        **{
            **COMMON,
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
            "attention_chunk_size": 8,
            **changes,
        },
    )


def gpt_oss():
    return build("GptOss", **COMMON, **EXPERTS, head_dim=8, sliding_window=5, rope_parameters=ROPE)


def gemma2():
    caps = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}
    return build("Gemma2", **COMMON, **caps, head_dim=8, query_pre_attn_scalar=16, sliding_window=5)


def phi3_longrope(short):
    rope = {**LONG, "short_factor": short, "long_factor": LONG_FACTORS}
    return build("Phi3", **COMMON, original_max_position_embeddings=16, sliding_window=None, rope_parameters=rope)


def gemma4_shared_keys():
    """The last layers of each kind see with keys and values of the ones before; each token adds to every layer."""
    shared = {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3}
    per_layer = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97}
    return gemma4(**shared, **per_layer, num_kv_shared_layers=2, use_double_wide_mlp=True)


def gemma4_keys_as_values():
    return gemma4(attention_k_eq_v=True, num_global_key_value_heads=1, final_logit_softcapping=5.0)


FAMILIES = {
    **TARGETS,
    "gemma2": gemma2,
    "gemma4": gemma4,
    "gemma4_shared_keys": gemma4_shared_keys,
    "gemma4_keys_as_values": gemma4_keys_as_values,
    "gpt_oss": gpt_oss,
    "llama4": llama4,
    "stablelm": lambda: build("StableLm", **COMMON),
    "opt": lambda: build("OPT", **OPT, word_embed_proj_dim=32),
    "opt_post_norm": lambda: build("OPT", **OPT, word_embed_proj_dim=16, do_layer_norm_before=False),
    "cohere": lambda: build("Cohere", **COMMON, logit_scale=0.0625),
    "granite": lambda: build(
        "Granite", **COMMON, logits_scaling=8.0, attention_multiplier=0.3, residual_multiplier=0.5
    ),
    "qwen2_sliding": lambda: build("Qwen2", **COMMON, **HALF_SLIDING, use_sliding_window=True),
    "phimoe_sliding": lambda: build("Phimoe", **COMMON, **EXPERTS, sliding_window=5, rope_parameters=ROPE),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_equal_each_request_alone(family):
    errors = run_scenario(FAMILIES[family]())
    assert errors.logits < TOLERANCE
    assert errors.states < TOLERANCE


def test_states_and_logits_in_float64_are_exact_to_rounding():
    model = rand_llama().double()
    oracle = copy.deepcopy(model)
    oracle.set_attn_implementation("sdpa")  # the eager one computes its softmax in float32
    errors = run_scenario(model, oracle=oracle)
    assert errors.logits < 1e-5  # logits are handed over in float32
    assert errors.states < 1e-11


def test_long_rope_is_pinned_to_the_longest_request():
    errors = run_scenario(phi3_longrope([1.0] * 4), oracle=phi3_longrope(LONG_FACTORS))
    assert errors.logits < TOLERANCE


def test_long_rope_stays_short_where_no_request_can_be_long():
    model = phi3_longrope([1.0] * 4)
    oracle = copy.deepcopy(model)
    target = Target.from_model(model, max_length=16)
    target.bind(Planes(target.plane_specs, 4, 16, target.device))
    batch = packed_batch([[5, 6, 7], list(range(20, 36))], [0, 0], [[1], [2]], 16, target.device)
    expected = torch.cat([lone_forward(oracle, [5, 6, 7])[0], lone_forward(oracle, list(range(20, 36)))[0]])
    torch.testing.assert_close(target.forward(batch).logits, expected, atol=TOLERANCE, rtol=0)


def test_pinned_rope_follows_a_second_target_of_the_same_model():
    model, oracle = phi3_longrope([1.0] * 4), phi3_longrope(LONG_FACTORS)
    Target.from_model(model, max_length=16)
    target = Target.from_model(model)
    target.capture(range(5))
    assert compare(target, oracle).logits < TOLERANCE


def test_dynamic_rope_is_pinned_to_the_longest_request():
    factor, dim, length = 4.0, 8, 64
    theta = 10000.0 * ((factor * length / 16) - (factor - 1)) ** (dim / (dim - 2))
    changes = {"num_layers": 4, "max_position_embeddings": 16}
    model = rand_llama(**changes, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": factor})
    oracle = rand_llama(**changes, rope_parameters={"rope_type": "default", "rope_theta": theta})
    assert run_scenario(model, oracle=oracle).logits < TOLERANCE


@pytest.mark.parametrize(
    ("family", "ignored"),
    [
        (gemma3, {"window": 0}),
        (gemma3, {"window": 6}),
        (llama4, {"chunk": 0}),
        (gemma2, {"softcap": 0.0}),
        (gpt_oss, {"sinks": None}),
        (rand_llama, {"scale": 1.0}),
    ],
)
def test_scenario_sees_an_ignored_attention_argument(monkeypatch, family, ignored):
    model = family()
    oracle = copy.deepcopy(model)
    target = Target.from_model(model)
    honest = attention.attend
    monkeypatch.setattr(attention, "attend", lambda *a, **given: honest(*a, **{**given, **ignored}))
    assert compare(target, oracle).logits > 100 * TOLERANCE


def test_parity_check_refuses_a_target_whose_attention_is_computed_wrongly(monkeypatch):
    honest = attention.attend
    monkeypatch.setattr(attention, "attend", lambda *a, **given: honest(*a, **{**given, "scale": 1.0}))
    with pytest.raises(TargetError, match="packed with another request its logits are off"):
        Target.from_model(rand_llama())
    with pytest.raises(TargetError, match="packed with another request its logits are off"):
        Target.from_model(rand_llama().bfloat16())


REFUSED = {
    "bloom": (lambda: build("Bloom", vocab_size=97, hidden_size=32, n_layer=4, n_head=4), "eager only"),
    "falcon": (
        lambda: build("Falcon", vocab_size=97, hidden_size=32, num_hidden_layers=4, num_attention_heads=4),
        "eager only",
    ),
    "minimax": (
        lambda: build("MiniMax", **COMMON, layer_types=["linear_attention", "full_attention"] * 2, num_local_experts=2),
        "2 of its 4 layers .first: 0. call no attention and carry a state of MiniMaxLightningAttention of no",
    ),
    "deepseek_v4": (lambda: build("DeepseekV4", **{**COMMON, **V4}), "more than attention over cached keys"),
    "diffllama": (lambda: build("DiffLlama", **COMMON), "calls attention 2 times a step"),
    "doge": (lambda: build("Doge", **COMMON), "more than attention over cached keys"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_refuses_in_one_line_what_would_be_wrong_packed(family):
    factory, reason = REFUSED[family]
    model = factory()
    before = model.config._attn_implementation
    with pytest.raises(TargetError, match=reason) as error:
        Target.from_model(model)
    assert type(model).__name__ in str(error.value)
    assert "\n" not in str(error.value)
    assert model.config._attn_implementation == before


def test_several_residual_streams_run_but_give_no_states():
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    small = {"vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8, "laurel_rank": 4, "head_dim": 8}
    shared = {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0] * 4, "sliding_window": 5}
    model = build("Gemma3n", **COMMON, **small, **shared, layer_types=kinds)
    assert run_scenario(model, capture=False).logits < TOLERANCE
    target = Target.from_model(model)
    with pytest.raises(TargetError, match=r"\[4, 1, 9, 32\]"):
        target.capture((1,))
    with pytest.raises(TargetError, match="several residual streams"):
        target.tensors()


def test_planes_have_the_widths_attention_really_uses():
    deepseek = Target.from_model(TARGETS["deepseek_v3"]())
    assert deepseek.plane_specs[0] == PlaneSpec("target.0", 4, 24, 12, torch.float32)
    assert [spec.name for spec in deepseek.plane_specs] == [f"target.{i}" for i in range(4)]
    wide = Target.from_model(qwen3_widehead().bfloat16())
    assert wide.plane_specs[0] == PlaneSpec("target.0", 2, 16, 16, torch.bfloat16)
    assert wide.facts.head_dim == 16


def test_learned_positions_count_from_each_request():
    model = gpt2_tiny()
    oracle = copy.deepcopy(model)
    target = Target.from_model(model)
    target.capture(range(5))
    target.bind(Planes(target.plane_specs, 8, 4, target.device))
    pieces = [[5, 6, 7, 8, 9], [20, 21, 22, 23, 24, 25, 26, 27, 28]]
    batch = packed_batch(pieces, [0, 0], [[3, 1], [2, 5, 4]], 4, target.device)
    states = target.forward(batch).states
    expected = torch.cat([torch.stack(lone_forward(oracle, piece)[1], dim=1) for piece in pieces])
    torch.testing.assert_close(states, expected, atol=5e-5, rtol=0)


class OuterConfig(PretrainedConfig):
    model_type = "spectrain_outer"
    sub_configs = {"text_config": LlamaConfig}

    def __init__(self, text_config=None, **kwargs):
        self.text_config = LlamaConfig() if text_config is None else text_config
        super().__init__(**kwargs)


class Outer(PreTrainedModel):
    """A language model one level down, beside a tower of as many layers."""

    config_class = OuterConfig

    def __init__(self, inner: LlamaForCausalLM) -> None:
        super().__init__(OuterConfig(inner.config))
        self.vision = nn.ModuleList([nn.Linear(4, 4) for _ in range(inner.config.num_hidden_layers)])
        self.language_model = inner

    def forward(self, **inputs):
        return self.language_model(**inputs)


def test_target_in_an_outer_module_equals_the_bare_one():
    bare = rand_llama()
    outer = Outer(copy.deepcopy(bare)).eval()
    target = Target.from_model(outer)
    target.capture(range(7))
    errors = compare(target, bare)
    assert errors.logits < TOLERANCE
    assert errors.states < TOLERANCE
    tensors = target.tensors()
    assert torch.equal(tensors.lm_head, bare.lm_head.weight)
    assert torch.equal(tensors.embed_tokens, bare.model.embed_tokens.weight)
    assert target.facts.hidden_size == 32


def test_states_come_without_output_hidden_states_and_without_a_cache(monkeypatch):
    model = rand_llama()
    oracle = copy.deepcopy(model)
    expected = lone_forward(oracle, [5, 6, 7])
    honest = type(model.model).forward

    def guarded(self, *args, **kwargs):
        assert not kwargs.get("output_hidden_states")
        return honest(self, *args, **kwargs)

    def no_cache(self, *args, **kwargs):
        raise AssertionError("a transformers cache was made")

    monkeypatch.setattr(type(model.model), "forward", guarded)
    monkeypatch.setattr(transformers.DynamicCache, "__init__", no_cache)
    target = Target.from_model(model)
    target.capture((6, 0, 3))
    assert target.layer_ids == (0, 3, 6)
    target.bind(Planes(target.plane_specs, 2, 16, target.device))
    output = target.forward(packed_batch([[5, 6, 7]], [0], [[1]], 16, target.device))
    torch.testing.assert_close(output.logits, expected[0], atol=TOLERANCE, rtol=0)
    for column, layer_id in enumerate((0, 3, 6)):
        torch.testing.assert_close(output.states[:, column], expected[1][layer_id], atol=TOLERANCE, rtol=0)


def test_logits_only_for_the_asked_rows_and_states_for_all():
    target = Target.from_model(rand_llama().bfloat16())
    target.capture((1, 6))
    target.bind(Planes(target.plane_specs, 2, 16, target.device))
    batch = packed_batch([[5, 6, 7, 8]], [0], [[1]], 16, target.device)
    everything = target.forward(batch)
    some = target.forward(batch._replace(logits_rows=torch.tensor([3, 1])))
    assert some.logits.dtype == torch.float32
    assert torch.equal(some.logits, everything.logits[[3, 1]])
    assert some.states.shape == (4, 2, 32) and some.states.dtype == torch.bfloat16
    assert torch.equal(some.states, everything.states)
    none = target.forward(batch._replace(logits_rows=torch.tensor([], dtype=torch.int64)))
    assert none.logits.shape == (0, 97)


def test_results_outlive_the_next_step():
    target = Target.from_model(rand_llama())
    target.capture((2,))
    target.bind(Planes(target.plane_specs, 3, 16, target.device))
    first = target.forward(packed_batch([[5, 6, 7]], [0], [[1]], 16, target.device))
    kept = first.states.clone()
    target.forward(packed_batch([[8, 9, 10]], [0], [[2]], 16, target.device))
    assert torch.equal(first.states, kept)


def test_capture_refuses_ids_outside_the_target():
    target = Target.from_model(rand_llama())
    with pytest.raises(TargetError, match=r"between 0 \(embeddings\) and 6 .* found -1, 7"):
        target.capture((-1, 3, 7))
    target.capture((3,))
    target.capture(())
    target.bind(Planes(target.plane_specs, 2, 16, target.device))
    assert target.forward(packed_batch([[5]], [0], [[1]], 16, target.device)).states is None


def test_forward_without_planes_and_a_replaced_target_are_refused():
    model = rand_llama()
    old = Target.from_model(model)
    batch = packed_batch([[5]], [0], [[1]], 16, old.device)
    with pytest.raises(TargetError, match="bind"):
        old.forward(batch)
    new = Target.from_model(model)
    with pytest.raises(TargetError, match="taken over"):
        old.forward(batch)
    with pytest.raises(ValueError, match="Target.forward"):
        model(input_ids=torch.tensor([[5]]))
    new.bind(Planes(new.plane_specs, 2, 16, new.device))
    assert new.forward(batch).logits.shape == (1, 97)


def test_max_length_is_bounded_by_the_positions_of_the_model():
    assert Target.from_model(gpt2_tiny()).max_length == 64
    assert Target.from_model(gpt2_tiny(), max_length=20).max_length == 20
    with pytest.raises(TargetError, match="between 1 and the 64 positions .* found 65"):
        Target.from_model(gpt2_tiny(), max_length=65)


def test_a_config_with_a_wrong_value_is_one_line_that_names_it(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": "many"}')
    with pytest.raises(
        TargetError, match=r"no usable model config in .* 'hidden_size'.* expected int, got str"
    ) as error:
        Target.load(tmp_path)
    assert "\n" not in str(error.value)


def test_end_tokens_are_the_union_of_both_configs():
    model = rand_llama(eos_token_id=[2, 5])
    model.generation_config.eos_token_id = 7
    assert Target.from_model(model).eos_token_ids == {2, 5, 7}


def test_fingerprint_separates_shape_from_weights():
    model = rand_llama()
    first = Target.from_model(copy.deepcopy(model)).fingerprint()
    assert json.loads(json.dumps(first)) == first
    assert Target.from_model(copy.deepcopy(model).bfloat16()).fingerprint() == first
    other = Target.from_model(rand_llama(seed=1)).fingerprint()
    assert other["shape"] == first["shape"] and other["weights"] != first["weights"]
    assert Target.from_model(rand_llama(3)).fingerprint()["shape"] != first["shape"]


def test_load_gives_the_saved_target(tmp_path):
    model = rand_llama(2, tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "tied")
    target = Target.load(tmp_path / "tied", dtype=torch.float32)
    assert target.name == "tied" and target.tokenizer is None
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (2, 32, 97)
    target.capture(range(3))
    errors = compare(target, model)
    assert max(errors.logits, errors.states) < TOLERANCE
    tensors = target.tensors()
    assert tensors.lm_head.data_ptr() == tensors.embed_tokens.data_ptr()
    assert Target.load(str(tmp_path / "tied")).dtype == torch.bfloat16


def test_load_says_in_one_line_what_is_wrong(tmp_path):
    model = rand_llama(2)
    cases = {}
    cases["missing"] = (tmp_path / "missing", "found no folder")
    (tmp_path / "empty").mkdir()
    cases["empty"] = (tmp_path / "empty", "found none in")
    (tmp_path / "unknown").mkdir()
    (tmp_path / "unknown" / "config.json").write_text('{"model_type": "nobody_knows"}')
    cases["unknown"] = (tmp_path / "unknown", "nobody_knows")
    model.save_pretrained(tmp_path / "cut")
    weights = transformers.utils.SAFE_WEIGHTS_NAME
    state = {name: t for name, t in model.state_dict().items() if "layers.1.mlp" not in name}
    model.save_pretrained(tmp_path / "cut", state_dict=state)
    assert (tmp_path / "cut" / weights).is_file()
    cases["cut"] = (tmp_path / "cut", r"3 missing or mis-shaped \(first: model.layers.1.mlp.down_proj.weight\)")
    for folder, reason in cases.values():
        with pytest.raises(TargetError, match=reason) as error:
            Target.load(folder)
        assert "\n" not in str(error.value)


def test_draft_attention_over_planes_equals_dense_attention():
    generator = torch.Generator().manual_seed(0)
    spec = PlaneSpec("draft.0", 2, 8, 8, torch.float32)
    planes = Planes([spec, PlaneSpec("draft.1", 2, 8, 8, torch.float32)], 6, 4, torch.device("cpu"))
    q = torch.randn(11, 4, 8, generator=generator)
    k, v = (torch.randn(11, 2, 8, generator=generator) for _ in range(2))
    tables = [[5, 2], [1]]
    rows = [list(range(7)), list(range(7, 11))]
    out = torch.empty_like(q)
    for cut in (slice(0, 3), slice(3, None)):
        pieces = [row[cut] for row in rows]
        index = torch.tensor([i for piece in pieces for i in piece])
        batch = packed_batch(pieces, [cut.start] * 2, tables, 4, torch.device("cpu"))
        out[index] = PagedAttend(planes, ("draft.1",), batch)(0, q[index], k[index], v[index])
    for row in rows:
        dense = nn.functional.scaled_dot_product_attention(
            q[row].transpose(0, 1), k[row].transpose(0, 1), v[row].transpose(0, 1), is_causal=True, enable_gqa=True
        )
        torch.testing.assert_close(out[row], dense.transpose(0, 1))
    assert not planes["draft.0"].k.any()
