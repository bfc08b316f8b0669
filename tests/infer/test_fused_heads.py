"""A head by fused kernels says what its own code says, and its own code still is what the trainer runs."""

import copy

import pytest
import torch

from spectrain.heads.base import DraftHead
from spectrain.heads.decoder import LayerParts
from spectrain.heads.layers import RMSNorm
from spectrain.infer import fused_heads
from spectrain.infer.engine import Engine, EngineConfig
from spectrain.infer.fused_heads import FusedMix, fuse_head
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.target import Target
from spectrain.tests.fresh import head_recipes, loud_head, proposer_of, tiny_head_config
from spectrain.tests.models import rand_llama

K = 3
SETTINGS = {"medusa": {"num_heads": K}, "mlp_speculator": {"num_heads": K}}


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.from_model(rand_llama(4, max_position_embeddings=96))


def head_of(recipe: str, target: Target, **settings: object) -> DraftHead:
    config = tiny_head_config(recipe, target.facts, **SETTINGS.get(recipe, {}), **settings)
    return loud_head(config, target.tensors(), random_norms=True)


def drafted(head: DraftHead, target: Target) -> tuple[list[torch.Tensor], Engine]:
    """Every draft logit of a few requests, rejections and a preemption among them."""
    proposer = proposer_of(head, target, K)
    found: list[torch.Tensor] = []
    logits = head.logits

    def noting(*arguments: object) -> torch.Tensor:
        found.append(logits(*arguments))  # pyright: ignore[reportArgumentType]
        return found[-1]

    vars(head)["logits"] = noting
    engine = Engine(
        target, proposer, EngineConfig(num_blocks=24, block_size=4, num_draft_tokens=K, max_batch_tokens=32)
    )
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 97, (n,), generator=generator).tolist() for n in (2, 5, 11, 17)]
    engine.generate(prompts, [SamplingParams(max_tokens=14, ignore_eos=True)] * len(prompts))
    del vars(head)["logits"]
    return found, engine


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", head_recipes())
def test_fused_says_what_the_own_code_says_on_a_gpu(recipe, monkeypatch) -> None:
    target = Target.from_model(rand_llama(4, max_position_embeddings=96).cuda())
    test_fused_says_what_the_own_code_says(recipe, target, monkeypatch)


@pytest.mark.parametrize("recipe", head_recipes())
def test_fused_says_what_the_own_code_says(recipe, target, monkeypatch) -> None:
    head = head_of(recipe, target)
    fused, engine = drafted(copy.deepcopy(head), target)
    for module in ("feature", "dflash", "last_state"):
        monkeypatch.setattr(f"spectrain.infer.proposers.{module}.fuse_head", lambda head: None)
    own, plain = drafted(head, target)
    assert not any(isinstance(vars(part).get("mix"), FusedMix) for part in head.modules())
    assert engine.statistics.accepted_per_position == plain.statistics.accepted_per_position
    assert len(fused) == len(own) > 0
    for one, other in zip(fused, own, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("settings", [{"layer_style": "qwen3"}, {"num_layers": 2}, {"norm_before_fc": True}])
def test_layers_of_other_styles(settings, target, monkeypatch) -> None:
    head = head_of("eagle3", target, **settings)
    fused, _ = drafted(copy.deepcopy(head), target)
    monkeypatch.setattr("spectrain.infer.proposers.feature.fuse_head", lambda head: None)
    own, _ = drafted(head, target)
    torch.testing.assert_close(torch.cat(fused), torch.cat(own), rtol=1e-4, atol=2e-4)


def test_layers_are_fused_and_only_over_paged_planes(target, monkeypatch) -> None:
    head = head_of("eagle3", target)
    calls: list[str] = []
    rope_store = fused_heads.dispatch.rope_store
    monkeypatch.setattr(fused_heads.dispatch, "rope_store", lambda *a: (calls.append("fused"), rope_store(*a))[1])
    drafted(head, target)
    layers = [part for part in head.modules() if isinstance(part, LayerParts)]
    assert calls and all(isinstance(vars(layer)["mix"], FusedMix) for layer in layers)
    calls.clear()
    hidden = head.config.target.hidden_size
    embeds, states = torch.randn(2, 5, hidden), torch.randn(2, 5, hidden, requires_grad=True)
    cos, sin = head.get_submodule("rotary")(torch.arange(5).expand(2, 5))
    layers[0](embeds, states, cos, sin, lambda layer, q, k, v: q).sum().backward()
    assert not calls and states.grad is not None and states.grad.abs().sum() > 0


@pytest.mark.parametrize("recipe", head_recipes())
def test_a_head_that_served_trains_on_by_its_own_code(recipe, target, monkeypatch) -> None:
    head = head_of(recipe, target)
    drafted(head, target)

    def refuse(*arguments: object) -> None:
        raise AssertionError("a kernel without a gradient")

    for name in ("linear", "gated_linear", "rms_norm", "rope_store"):
        monkeypatch.setattr(fused_heads.dispatch, name, refuse)
    hidden = head.config.target.hidden_size
    states = torch.randn(3, hidden, requires_grad=True)
    norms = [part for part in head.modules() if isinstance(part, RMSNorm) and len(part.weight) == hidden]
    for norm in norms:
        states = norm(states)
    weight = torch.randn(7, hidden)
    head.project(states, weight).sum().backward()
    assert all(norm.weight.grad is not None for norm in norms)


def test_what_was_fused_is_not_packed_again_unless_its_weights_moved(target) -> None:
    head = head_of("draft_model", target)
    layer = next(part for part in head.modules() if isinstance(part, LayerParts))
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    fuse_head(head)
    first = vars(layer)["mix"]
    fuse_head(head)
    assert vars(layer)["mix"] is first, "graphs may hold its weights"
    layer.self_attn.q_proj.weight.data = layer.self_attn.q_proj.weight.data.clone()
    fuse_head(head)
    assert vars(layer)["mix"] is not first
    assert head.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in head.state_dict().items())
    with torch.no_grad():
        layer.self_attn.q_proj.weight.fill_(2.0)
    assert (vars(layer)["mix"].qkv_weight[: layer.self_attn.q_proj.out_features] == 2.0).all()
