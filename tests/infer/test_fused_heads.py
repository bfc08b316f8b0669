"""A head by fused kernels says what its own code says, and its own code still is what the trainer runs."""

import copy

import pytest
import torch

from spectrain.heads.base import DraftHead, DraftRows
from spectrain.heads.decoder import LayerParts
from spectrain.heads.layers import Linear, RMSNorm, SwiGLU
from spectrain.infer import fused_heads
from spectrain.infer.config import EngineConfig
from spectrain.infer.engine import Engine
from spectrain.infer.fused_heads import FusedMix, fuse_head
from spectrain.infer.proposers.base import Drafts, DraftStep
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
    """Every draft logit of a few requests, rejections and a preemption among them; 0 for drafts that had no room."""
    proposer = proposer_of(head, target, K)
    found: list[torch.Tensor] = []
    logits, propose = head.logits, proposer.propose

    def noting(*arguments: object) -> torch.Tensor:
        found.append(logits(*arguments))  # pyright: ignore[reportArgumentType]
        return found[-1]

    def proposing(step: DraftStep) -> Drafts:
        first = len(found)
        drafts = propose(step)
        for k, new in enumerate(found[first:]):  # [batch, vocab] of draft k, or [batch, k, vocab] of all
            draft = torch.arange(new.shape[1], device=new.device) if new.dim() == 3 else torch.tensor(k)
            found[first + k] = new * (draft.to(new.device) < drafts.lengths.view(-1, *[1] * draft.dim()))[..., None]
        return drafts

    vars(head)["logits"], vars(proposer)["propose"] = noting, proposing
    # eager: a recorded call would write all its logits to one place
    config = EngineConfig(num_blocks=24, block_size=4, num_draft_tokens=K, max_batch_tokens=32, eager=True)
    engine = Engine(target, proposer, config)
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
    monkeypatch.setattr("spectrain.infer.proposers.head.fuse_head", lambda head: None)
    own, plain = drafted(head, target)
    assert not any(isinstance(vars(part).get("mix"), FusedMix) for part in head.modules())
    assert engine.statistics.accepted_per_position == plain.statistics.accepted_per_position
    assert len(fused) == len(own) > 0
    for one, other in zip(fused, own, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-4)


# an eps of the size of what is normed shows where it is left out
@pytest.mark.parametrize(
    "settings", [{"layer_style": "qwen3", "rms_norm_eps": 0.5}, {"num_layers": 2}, {"norm_before_fc": True}]
)
def test_layers_of_other_styles(settings, target, monkeypatch) -> None:
    head = head_of("eagle3", target, **settings)
    fused, _ = drafted(copy.deepcopy(head), target)
    monkeypatch.setattr("spectrain.infer.proposers.head.fuse_head", lambda head: None)
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
    assert (vars(layer)["mix"].packed.qkv_weight[: layer.self_attn.q_proj.out_features] == 2.0).all()


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
def test_weights_put_elsewhere_are_served_and_packed_again(name, target) -> None:
    head = head_of("eagle3", target)
    drafted(head, target)
    layer = head.get_submodule("layers.0")
    first = vars(layer)["mix"]
    linear = layer.get_submodule(f"self_attn.{name}")
    linear.weight = torch.nn.Parameter(linear.weight.detach() * -3.0)
    expected, _ = drafted(copy.deepcopy(head), target)
    assert not first.is_current
    served, _ = drafted(head, target)
    assert vars(layer)["mix"] is not first
    assert all(torch.equal(one, other) for one, other in zip(served, expected, strict=True))


def test_a_running_engine_never_drafts_with_weights_that_the_head_no_longer_has(target) -> None:
    head = head_of("eagle3", target)
    proposer = proposer_of(head, target, K)
    changed = {name: tensor * -0.5 for name, tensor in head.state_dict().items() if name.endswith("weight")}
    fresh = copy.deepcopy(head)
    for one in (head, fresh):
        one.load_state_dict(changed, strict=False, assign=True)
    expected = proposer_of(fresh, target, K)
    config = EngineConfig(num_blocks=24, block_size=4, num_draft_tokens=K, max_batch_tokens=32)
    found = []
    for one in (proposer, expected):
        logits: list[torch.Tensor] = []
        own = one.head.logits
        vars(one.head)["logits"] = lambda *a, own=own, logits=logits: (logits.append(own(*a)), logits[-1])[1]
        Engine(target, one, config).generate([[5, 6, 7, 8]], [SamplingParams(max_tokens=8, ignore_eos=True)])
        del vars(one.head)["logits"]
        found.append(torch.cat(logits))
    torch.testing.assert_close(*found, rtol=1e-4, atol=2e-4)


class Halving(LayerParts):
    """Another way to mix."""

    def mix(self, residual, x, cos, sin, attend):
        return super().mix(residual, x, cos, sin, attend) / 2


class Gelu(SwiGLU):
    """Another gate."""

    def forward(self, x):
        return self.down_proj(torch.nn.functional.gelu(self.gate_proj(x)) * self.up_proj(x))


class Shifted(RMSNorm):
    """Another norm."""

    def forward(self, x):
        return super().forward(x) + 1


class Doubled(Linear):
    """A projection that does more than multiply."""

    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ("layers.1", Halving),
        ("layers.1.mlp", Gelu),
        ("layers.1.self_attn.v_proj", Doubled),
        ("layers.1.self_attn.o_proj", Doubled),
        ("layers.1.self_attn.k_norm", Shifted),
        ("", None),
    ],
)
def test_what_a_head_does_otherwise_is_served_as_it_does_it(part, kind, target, monkeypatch) -> None:
    head = head_of("eagle3", target, num_layers=2, layer_style="qwen3")
    plain, _ = drafted(copy.deepcopy(head), target)
    module = head.get_submodule(part)
    if kind is None:
        kind = type("Capped", (type(head),), {"project": lambda self, *factors: DraftHead.project(*factors) / 7})
    elif kind is Halving:
        kind = type("HalvingLayer", (Halving, type(module)), {})
    module.__class__ = kind
    fused, _ = drafted(copy.deepcopy(head), target)
    monkeypatch.setattr("spectrain.infer.proposers.head.fuse_head", lambda head: None)
    own, _ = drafted(head, target)
    torch.testing.assert_close(torch.cat(fused), torch.cat(own), rtol=1e-4, atol=2e-4)
    assert not torch.equal(own[0], plain[0])
    fuse_head(head)
    assert isinstance(vars(head.get_submodule("layers.0"))["mix"], FusedMix)


def test_a_head_that_served_still_learns_where_kernels_have_no_gradient(target, monkeypatch) -> None:
    head = head_of("eagle3", target)
    drafted(head, target)
    for name in ("rms_norm", "linear", "gated_linear"):
        kernel = getattr(fused_heads.dispatch, name)
        monkeypatch.setattr(fused_heads.dispatch, name, lambda *a, kernel=kernel, **k: kernel(*a, **k).detach())
    hidden = head.config.target.hidden_size
    rows = DraftRows(torch.randn(2, 5, hidden), torch.randn(2, 5, hidden), torch.arange(5).expand(2, 5))
    output = head(rows, lambda layer, q, k, v: q)
    head.logits(output.logits_states, target.tensors()).sum().backward()
    for name, parameter in head.named_parameters():
        if not any(part in name for part in ("fc.", "k_proj", "v_proj")):
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
