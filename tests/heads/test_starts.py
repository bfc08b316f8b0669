"""How large heads are, and what training starts from."""

import pytest
import torch

from spectrain.heads.base import DraftHead, HeadConfig, HeadError, TargetFacts
from spectrain.heads.dflash import DFlashConfig
from spectrain.heads.draft_model import DraftModelConfig
from spectrain.heads.dspark import DSparkConfig
from spectrain.heads.eagle import EagleConfig
from spectrain.heads.eagle3 import Eagle3Config
from spectrain.heads.medusa import MedusaConfig
from spectrain.heads.mlp_speculator import MLPSpeculatorConfig
from spectrain.heads.peagle import PEagleConfig
from spectrain.heads.resolve import resolve
from spectrain.tests.fresh import fresh_head, head_recipes, tiny_head_config
from spectrain.tests.heads.published import LLAMA_7B, LLAMA_8B, QWEN3_4B
from spectrain.tests.train.toys import random_target, tiny_config, tiny_facts
from spectrain.train.settings import OptimizerSettings
from spectrain.train.step import make_optimizer

BLOCK = {"mask_token_id": 151669}
FIVE_LAYERS = 537_427_200
# of EAGLE-3 for Llama-3.1-8B, which a P-EAGLE of one layer is but for its stand-in of three states
EAGLE3 = 424_689_664
SIZES: dict[str, tuple[type[HeadConfig], TargetFacts, dict[str, object], int]] = {
    "eagle": (EagleConfig, LLAMA_7B, {}, 235_933_696),
    "eagle with the bias": (EagleConfig, LLAMA_7B, {"fc_bias": True}, 235_937_792),
    "eagle3": (Eagle3Config, LLAMA_8B, {"draft_vocab_size": 32000}, EAGLE3),
    "peagle": (PEagleConfig, LLAMA_8B, {"draft_vocab_size": 32000, "mask_token_id": 0}, EAGLE3 + 3 * 4096),
    "medusa": (MedusaConfig, LLAMA_7B, {}, 739_266_560),
    "medusa, shared lm_head": (MedusaConfig, LLAMA_7B, {"lm_head": "shared"}, 83_906_560),
    "mlp": (MLPSpeculatorConfig, LLAMA_7B, {}, 836_788_224),
    "mlp, tied": (MLPSpeculatorConfig, LLAMA_7B, {"tie_weights": True}, 295_706_624),
    "dflash": (DFlashConfig, QWEN3_4B, BLOCK, FIVE_LAYERS),
    "dspark": (DSparkConfig, QWEN3_4B, BLOCK, FIVE_LAYERS + 2 * 256 * 151936 + (2560 + 256 + 1)),
}


@pytest.mark.parametrize("recipe", head_recipes())
def test_every_head_has_a_size(recipe: str) -> None:
    """Those of draft models are with their own tests: they are the small models' and not the target's."""
    kind = type(tiny_head_config(recipe, tiny_facts()))
    assert issubclass(kind, DraftModelConfig) or kind in {config for config, *_ in SIZES.values()}


@pytest.mark.parametrize("case", SIZES)
def test_trained_parameters_are_as_many_as_published(case: str) -> None:
    kind, facts, settings, size = SIZES[case]
    config = kind.derive(facts, settings)
    with torch.device("meta"):
        head = resolve(config.network)(config)
    optimizer = make_optimizer(head, OptimizerSettings())
    assert sum(p.numel() for group in optimizer.param_groups for p in group["params"]) == size


@pytest.mark.parametrize("recipe", head_recipes())
def test_a_fresh_head_is_finite_and_decided_by_its_seed(recipe: str) -> None:
    target, config = random_target(16, 16), tiny_head_config(recipe, tiny_facts())
    with pytest.raises(HeadError, match="every parameter must be finite"):
        resolve(config.network)(config).assert_filled()
    heads: list[DraftHead] = [fresh_head(config, target, seed) for seed in (3, 3, 4)]
    for head in heads:
        head.assert_filled()
    first, again, other = (torch.cat([p.flatten() for p in head.parameters()]) for head in heads)
    assert torch.equal(first, again)
    # Medusa draws nothing: it starts as the target's own output
    assert torch.equal(first, other) == (recipe == "medusa")


@pytest.mark.parametrize("draft_vocab", [16, 11])
def test_eagle3_starts_between_the_targets_ends(draft_vocab: int) -> None:
    """The highest layer's state passes through, and norm and output head are the target's own."""
    target = random_target(16, 16)
    head = fresh_head(tiny_config(draft_vocab_size=draft_vocab), target)
    aux = torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(head.combine(aux, target), aux[:, -1])
    ids = head.draft_to_target()
    assert (ids is None) == (draft_vocab == 16)
    assert torch.equal(head.output_weight(target), target.lm_head if ids is None else target.lm_head[ids])
    assert target.norm.weight is not None and torch.equal(head.get_parameter("norm.weight"), target.norm.weight)
    drawn = [p for name, p in head.named_parameters() if "proj" in name]
    assert all(float(p.detach().std()) > 0 for p in drawn) and len(drawn) == 7
