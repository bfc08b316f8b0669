"""Gemma 4 assistants of tiny targets, as transformers builds, saves and runs them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from spectrain.heads.gemma4_assistant import Gemma4Assistant, load_assistant
from spectrain.infer.target import Target
from spectrain.tests.models import own_generator, randomise, soften_queries

ORDERED = {"use_ordered_embeddings": True, "num_centroids": 12, "centroid_intermediate_top_k": 3}
"""For a vocabulary of 96."""


@torch.no_grad()
def assistant_of(target_config: Any, *, seed: int = 3, kind: str = "gemma4", text: Any = None, **changes: Any) -> Any:
    """Three layers of both kinds, narrower than the target; every path shows in its logits.

    `text` changes the config of its layers, `changes` what stands beside them.
    """
    width = {"head_dim": 8, "global_head_dim": 16, "num_key_value_heads": 2, "num_attention_heads": 4}
    layers = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "sliding_window": target_config.sliding_window,
        "vocab_size": target_config.vocab_size,
        "max_position_embeddings": target_config.max_position_embeddings,
        "num_kv_shared_layers": 3,
    }
    ple = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0} if kind == "gemma4" else {}
    config = AutoConfig.for_model(
        f"{kind}_assistant",
        text_config={"model_type": f"{kind}_text", **width, **layers, **ple, **(text or {})},
        backbone_hidden_size=target_config.hidden_size,
        **changes,
    )
    with own_generator(seed):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    randomise(model, seed, std=0.15)
    soften_queries(model)
    generator = torch.Generator().manual_seed(seed)
    for layer in model.model.layers:
        layer.layer_scalar.fill_(0.3 + torch.rand((), generator=generator).item())
    if model.masked_embedding is not None:
        model.masked_embedding.token_ordering.copy_(torch.randperm(model.vocab_size, generator=generator))
    return model.eval().requires_grad_(False)


def read_by_us(assistant: PreTrainedModel, folder: Path, target: Target) -> Gemma4Assistant:
    """The assistant through the folder that transformers saves."""
    assistant.save_pretrained(folder)
    return load_assistant(folder, target.facts, target.config)


@torch.no_grad()
def reference_drafts(
    model: PreTrainedModel, assistant: PreTrainedModel, text: list[int], k: int
) -> tuple[list[int], Tensor]:
    """k greedy drafts after a text and their logits [k, vocab], out of transformers' own loop.

    The newest token has no keys yet. Of a sliding layer the assistant is given what the target's cache holds while it
    decodes: the window's last rows.
    """
    seen = torch.tensor([text[:-1]])
    out = model(seen, use_cache=False, output_hidden_states=True, return_shared_kv_states=True)
    window = model.config.get_text_config().sliding_window
    shared = {
        kind: tuple(rows[:, :, -window:] if kind == "sliding_attention" else rows for rows in kv)
        for kind, kv in out.shared_kv_states.items()
    }
    # the loop's constructor differs between versions of transformers, and some take the first row of a prompt for its
    # last unless they are told the row
    loop: Any = object.__new__(SinglePositionMultiTokenCandidateGenerator)
    loop.assistant_model, loop.target_model_input_embeddings = assistant, model.get_input_embeddings()
    loop.num_assistant_tokens, loop.main_model_max_length = k, len(text) + k + 1
    loop.is_main_model_prefill, loop.eos_token_id = False, None
    outputs: Any = SimpleNamespace(hidden_states=out.hidden_states, shared_kv_states=shared)
    ids, logits = loop.get_candidates(torch.tensor([text]), {}, outputs, False, len(text) - 2)
    return ids[0, len(text) :].tolist(), logits[0]
