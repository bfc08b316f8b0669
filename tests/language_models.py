"""Draft models of tiny targets: `from spectrain.tests.language_models import random_draft_model`."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from spectrain.heads.base import DraftHead, TargetFacts
from spectrain.heads.draft_model import DraftModel, DraftModelConfig
from spectrain.heads.folder import save_head
from spectrain.heads.pard import PardConfig
from spectrain.heads.target_tensors import FinalNorm, TargetTensors
from spectrain.tests.fresh import loud_head

MASK = 96
SHAPE = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
}


def no_target(facts: TargetFacts) -> TargetTensors:
    """Target tensors of another width than the draft model's, so that it takes nothing from them."""
    rows = torch.zeros(facts.vocab_size, facts.hidden_size)
    return TargetTensors(rows, rows, None, FinalNorm("none", None, None, 0.0))


def draft_model_config(facts: TargetFacts, *, parallel: bool = False, **settings: object) -> DraftModelConfig:
    """Of a draft model no wider than it needs to be; with `parallel`, of a PARD."""
    shape = {**SHAPE, "source_layers": (0,) * int(str(settings.get("num_layers", SHAPE["num_layers"]))), **settings}
    if parallel:
        return PardConfig.derive(facts, {"mask_token_id": min(MASK, facts.vocab_size - 1), **shape})
    return DraftModelConfig.derive(facts, shape)


def random_draft_model(facts: TargetFacts, *, parallel: bool = False, seed: int = 0, **settings: object) -> DraftHead:
    """A draft model every path of which shows in its logits; with `parallel`, a PARD."""
    config = draft_model_config(facts, parallel=parallel, **settings)
    return loud_head(config, no_target(facts), seed, random_norms=True)


def in_transformers(head: DraftModel, folder: Path) -> PreTrainedModel:
    """The head as transformers loads its folder: an implementation that shares no code with ours."""
    save_head(folder, head, {}, dtype=torch.float32)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def parallel_logits(model: PreTrainedModel, token_ids: list[int], mask_token_id: int, k: int) -> Tensor:
    """Logits [k, vocab] of the k drafts after a text: the text and k - 1 masks, read at its end and at every mask."""
    ids = torch.tensor([token_ids + [mask_token_id] * (k - 1)])
    return model(input_ids=ids, use_cache=False).logits[0, len(token_ids) - 1 :].float()


@torch.no_grad()
def chain_drafts(model: PreTrainedModel, token_ids: list[int], k: int) -> list[int]:
    """k greedy tokens after a text, each from a forward over all before it."""
    text = list(token_ids)
    for _ in range(k):
        text.append(int(model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(token_ids) :]
