"""Draft heads and proposers for tiny targets, each built in one way: `from spectrain.tests.fresh import fresh_head`."""

import json
import typing

import torch
from torch import Tensor

from spectrain.heads.base import DraftHead, HeadConfig, TargetFacts
from spectrain.heads.resolve import resolve
from spectrain.heads.target_tensors import TargetTensors
from spectrain.infer.proposers.base import Proposer
from spectrain.infer.target import Target
from spectrain.recipes.loader import load_recipe, recipe_names
from spectrain.train.assembly import head_config
from spectrain.train.objectives.base import Objective

BLOCK = {"mask_token_id": 0, "num_layers": 1}
TINY: dict[str, dict[str, object]] = {
    "dflash": {**BLOCK, "block_size": 6},
    "dspark": {**BLOCK, "block_size": 5, "markov_rank": 6},
    "eagle3": {"draft_vocab_size": None},
    "pard": {"mask_token_id": 0, "num_layers": 2, "source_layers": [0, 0]},
    "draft_model": {"num_layers": 2, "source_layers": [0, 0]},
    "peagle": {"draft_vocab_size": None, "mask_token_id": 0, "num_layers": 2},
}
"""What a recipe's `head` section needs on a tiny target, where the published size does not fit."""


def head_recipes() -> list[str]:
    """The recipes in recipes/ that stand for a head each; the others are settings of one of these."""
    return [name for name in recipe_names() if load_recipe(name).origins["head.config"] == f"{name}.yaml"]


def tiny_head_config(recipe: str, facts: TargetFacts, **settings: object) -> HeadConfig:
    """The config a recipe derives for a tiny target; `settings` win over all else."""
    changes = {**TINY.get(recipe, {}), **settings}
    loaded = load_recipe(recipe, [f"head.{key}={json.dumps(value)}" for key, value in changes.items()])
    return head_config(loaded, facts, ())


def fresh_head(
    config: HeadConfig, target: TargetTensors, seed: int = 0, *, draft_vocab: Tensor | None = None
) -> DraftHead:
    """A head as `fit` starts it; of a reduced vocabulary it has `draft_vocab`, or random tokens."""
    return _fresh(config, target, torch.Generator().manual_seed(seed), draft_vocab)


@torch.no_grad()
def loud_head(
    config: HeadConfig,
    target: TargetTensors,
    seed: int = 0,
    random_norms: bool = False,
    *,
    draft_vocab: Tensor | None = None,
) -> DraftHead:
    """A head whose weights are so large that every path matters; with `random_norms` no vector is all ones either."""
    generator = torch.Generator().manual_seed(seed)
    head = _fresh(config, target, generator, draft_vocab)
    for name, parameter in head.named_parameters():
        if parameter.dim() == 1 and random_norms:
            if name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
            else:
                parameter.copy_(torch.rand(parameter.shape, generator=generator) * 2 + 0.1)
        elif parameter.dim() == 2:
            whole = len(parameter) == 1 or name.endswith("embed_tokens.weight")
            scale = 1.0 if whole else parameter.shape[1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return head


def objective_of(config: HeadConfig, **settings: object) -> Objective:
    """The objective that a head's config names."""
    kind = resolve(config.objective)
    return kind(config, typing.get_type_hints(kind.__init__)["settings"](**settings))


def proposer_of(head: DraftHead, target: Target, k: int, sampling: str = "greedy") -> Proposer:
    """The proposer that a head's config names, where the target is."""
    return resolve(head.config.proposer)(head.to(target.device), target.tensors(), k, sampling)


def fresh_proposer(recipe: str, target: Target, k: int, sampling: str = "greedy", **settings: object) -> Proposer:
    """A recipe's head as `fit` starts it, in the engine."""
    return proposer_of(
        fresh_head(tiny_head_config(recipe, target.facts, **settings), target.tensors()), target, k, sampling
    )


def loud_proposer(recipe: str, target: Target, k: int, sampling: str = "greedy", **settings: object) -> Proposer:
    """As `fresh_proposer`, every path of whose drafts matters."""
    config = tiny_head_config(recipe, target.facts, **settings)
    return proposer_of(loud_head(config, target.tensors(), random_norms=True), target, k, sampling)


def _fresh(
    config: HeadConfig, target: TargetTensors, generator: torch.Generator, draft_vocab: Tensor | None
) -> DraftHead:
    head = resolve(config.network)(config)
    if config.draft_vocab_size < config.vocab_size:
        chosen = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size]
        head.set_draft_vocab(chosen.sort().values if draft_vocab is None else draft_vocab)
    head.initialise(target, generator)
    return head
