"""MTP layers read from a checkpoint: every family's step is what an independent computation of it gives."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from spectrain.heads import mtp_block
from spectrain.heads.base import DraftRows, HeadError, TargetFacts
from spectrain.heads.model_folder import Checkpoint
from spectrain.heads.mtp import MtpConfig, MtpHead
from spectrain.heads.mtp_layouts import LAYOUTS
from spectrain.heads.target_tensors import FinalNorm, TargetTensors
from spectrain.tests.models import lone_forward, own_generator, randomise
from spectrain.tests.mtp_families import BASE, FAMILIES, LAYERS, H, draw, write_checkpoint

FACTS = TargetFacts(
    model_type="any",
    hidden_size=H,
    intermediate_size=48,
    num_layers=LAYERS,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=97,
    rms_norm_eps=1e-5,
    max_position_embeddings=128,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
)


def read(folder: Path, **settings: object) -> MtpHead:
    found = Checkpoint(folder)
    head = MtpHead(MtpConfig.derive_from(FACTS, settings, found))
    head.start_from(found)
    head.assert_filled()
    return head.eval()


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int = 0, sinks: Tensor | None = None) -> Tensor:
    """`attend` over whole texts [batch, seq, heads, dim]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    row = torch.arange(q.shape[2])
    seen = row[None] <= row[:, None]
    if window:
        seen = seen & (row[None] > row[:, None] - window)
    scores = (q @ k.transpose(2, 3) * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    return (scores.softmax(-1)[..., : k.shape[2]] @ v).transpose(1, 2)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_step_is_the_familys(name: str, tmp_path: Path):
    """Row 0 included: its embedding is a real token's."""
    family, generator = FAMILIES[name], torch.Generator().manual_seed(1)
    tensors = draw(family.shapes)
    head = read(write_checkpoint(tmp_path, family, tensors))
    assert len(head.layers) == family.layers
    embeds, given = torch.randn(3, 11, H, generator=generator), torch.randn(11, family.state_width, generator=generator)
    ours = theirs = given
    for step in range(3):
        rows = DraftRows(embeds[step][None], ours[None], torch.arange(11)[None] + step, step)
        output = head(rows, causal)
        expected, theirs = family.reference(tensors, family.config, embeds[step], theirs, step % family.layers)
        torch.testing.assert_close(output.logits_states[0], expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(output.feedback[0], theirs, atol=1e-5, rtol=1e-5)
        ours = output.feedback[0]


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.state_width == H])
@torch.no_grad()
def test_what_is_fed_back_may_be_chosen(name: str, tmp_path: Path):
    """Logits stay the same; the one choice is the other behind the layer's last norm. A head folder keeps it."""
    generator, family = torch.Generator().manual_seed(1), FAMILIES[name]
    folder = write_checkpoint(tmp_path, family, draw(family.shapes))
    embeds, states = (torch.randn(1, 7, H, generator=generator) for _ in range(2))
    outputs = {}
    for feedback in ("normed", "raw"):
        head = read(folder, feedback=feedback)
        outputs[feedback] = head(DraftRows(embeds, states, torch.arange(7)[None], 0), causal)
        assert MtpConfig.from_dict(head.config.to_dict()) == head.config
    normed, raw = outputs["normed"], outputs["raw"]
    assert normed.feedback is normed.logits_states and torch.equal(normed.logits_states, raw.logits_states)
    assert torch.equal(read(folder).of_step(0).final_norm(raw.feedback), normed.feedback)
    assert not torch.allclose(raw.feedback, normed.feedback)
    own = read(folder).config
    assert own.feedback == LAYOUTS[own.layout].feedback


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
@torch.no_grad()
def test_logits_are_those_of_the_librarys_own_mtp_model(name: str, tmp_path: Path):
    """Which reads the same files by itself; two layers, the second fed by the first, of any family behind its norm."""
    family, seq = FAMILIES[name], 12
    head = read(write_checkpoint(tmp_path, family, draw(family.shapes)), feedback="normed")
    config = AutoConfig.from_pretrained(tmp_path)
    with own_generator(0):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    randomise(model, 0)
    model.config.name_or_path, model.config.dtype = str(tmp_path), torch.float32
    # by itself the library looks for the layer numbers of the published depth
    model._keys_to_ignore_on_load_unexpected = [rf"model.layers.[{LAYERS}{LAYERS + 1}]."]
    oracle = MtpModel.from_pretrained(model).eval()
    tokens = torch.randint(3, 97, (1, seq + 3), generator=torch.Generator().manual_seed(1))
    theirs = model(input_ids=tokens[:, :seq], output_hidden_states=True).hidden_states[-1]
    cache = MtpCache(config=model.config.get_mtp_config())
    target = target_tensors(model)
    ours = head.combine(lone_forward(model, tokens[0, :seq])[1][-1][None, :, None], target)
    for step in range(2):
        following, positions = tokens[:, 1 + step : 1 + step + seq], torch.arange(seq)[None] + step
        theirs = oracle.forward_layer(step, theirs, positions + 1, cache, input_ids=following)
        output = head(DraftRows(head.embed(following, target), ours, positions, step), causal)
        expected = oracle._project_to_logits(theirs)
        torch.testing.assert_close(head.logits(output.logits_states, target, step), expected, atol=1e-5, rtol=1e-5)
        ours = output.feedback


def target_tensors(model: PreTrainedModel) -> TargetTensors:
    embed, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    norm = FinalNorm("rms", model.get_decoder().norm.weight, None, model.config.rms_norm_eps)
    return TargetTensors(embed, head, None, norm)


@pytest.mark.parametrize("scaling", [None, 0.11])
def test_a_familys_own_scale_of_scores_is_kept(scaling: float | None):
    """`attend` divides by the root of the width whatever the family does."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 5, 8, generator=generator) for heads in (4, 2, 2))
    module = torch.nn.Module()
    setattr(module, mtp_block.CALL, mtp_block.AttentionCall(attend=causal))
    setattr(module, mtp_block.NUMBER, 0)
    out, _ = mtp_block._attention_forward(module, q, k, v, scaling=scaling)
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    expected = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
    torch.testing.assert_close(out, expected.transpose(1, 2))


def test_ernie_is_given_the_state_before_the_targets_last_norm(tmp_path: Path):
    """And the norm behind its layer is the target's own, which training leaves alone."""
    family = FAMILIES["ernie4_5_moe"]
    head = read(write_checkpoint(tmp_path, family, draw(family.shapes)))
    states = torch.randn(3, 1, H, generator=torch.Generator().manual_seed(0))
    target = TargetTensors(
        torch.zeros(97, H), torch.zeros(97, H), None, FinalNorm("rms", torch.full((H,), 0.5), None, 1e-5)
    )
    assert torch.equal(head.combine(states, target), states[:, 0])
    assert [name for name, p in head.named_parameters() if not p.requires_grad] == ["layers.0.final_norm.weight"]


def test_experts_may_lie_in_one_tensor_or_each_in_its_own(tmp_path: Path):
    family = FAMILIES["qwen3_5_moe"]
    tensors = draw(family.shapes)
    single = read(write_checkpoint(tmp_path / "single", family, tensors))
    fused = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in ("mtp.layers.0", "mtp.layers.1"):
        parts = {
            kind: torch.stack([tensors[f"{layer}.mlp.experts.{e}.{kind}_proj.weight"] for e in range(4)])
            for kind in ("gate", "up", "down")
        }
        fused[f"{layer}.mlp.experts.gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], dim=1)
        fused[f"{layer}.mlp.experts.down_proj"] = parts["down"]
    whole = read(write_checkpoint(tmp_path / "fused", family, fused))
    for (name, one), other in zip(single.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(one, other), name
    assert single.state_dict().keys() == tensors.keys() and whole.state_dict().keys() == fused.keys()
    for name, tensor in single.state_dict().items():
        assert torch.equal(tensor, tensors[name]), name


def test_what_layers_share_is_one(tmp_path: Path):
    family = FAMILIES["qwen3_5_moe"]
    head = read(write_checkpoint(tmp_path, family, draw(family.shapes)))
    assert head.layers[0].projection is head.layers[1].projection
    assert head.layers[0].blocks[0] is not head.layers[1].blocks[0]


def test_buffers_keep_their_type_in_half_precision(tmp_path: Path):
    family = FAMILIES["deepseek_v3"]
    tensors = draw(family.shapes)
    head = read(write_checkpoint(tmp_path, family, tensors)).to(torch.bfloat16)
    gate = head.layers[0].blocks[0].mlp.gate
    bias = tensors[f"model.layers.{LAYERS}.mlp.gate.e_score_correction_bias"]
    assert head.dtype == torch.bfloat16 and torch.equal(gate.e_score_correction_bias, bias)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_ids": (1,)}, "state after the target's last layer, id 4"),
        ({"draft_vocab_size": 50}, "MTP drafts with the target's output matrix over all 97 tokens"),
        ({"feedback": "both"}, "head.feedback must be normed or raw, found 'both'"),
        ({"layout": "deepseek_v4"}, "are fed their streams, which no norm stands behind"),
        ({"layout": "none"}, "head.layout must be one of llama, deepseek_v3"),
    ],
)
def test_a_config_that_cannot_be_is_refused(changes: dict[str, object], message: str):
    with pytest.raises(HeadError, match=message):
        MtpConfig.derive(FACTS, changes)


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("llama", "no MTP layers are known for models of type 'llama'"),
    ],
)
def test_a_family_without_layers_we_know_is_named(model_type: str, message: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "model_type": model_type}))
    save_file({"model.layers.0.input_layernorm.weight": torch.ones(H)}, tmp_path / "model.safetensors")
    with pytest.raises(HeadError, match=message):
        MtpConfig.derive_from(FACTS, {}, Checkpoint(tmp_path))


@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4", "openpangu"])
def test_layers_the_engine_cannot_run_say_why(name: str, tmp_path: Path):
    family = FAMILIES[name]
    config = MtpConfig.derive_from(FACTS, {}, Checkpoint(write_checkpoint(tmp_path, family, draw(family.shapes))))
    assert config.refused == LAYOUTS[name].refused is not None
