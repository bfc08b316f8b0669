"""The head folder: what is written loads to the same head, and what does not belong is named."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spectrain.heads.base import HeadError, TargetFacts, default_aux_layer_ids
from spectrain.heads.eagle3 import Eagle3Config, Eagle3Head
from spectrain.heads.folder import load_head, save_head
from spectrain.infer.target import Target
from spectrain.tests.fresh import tiny_head_config
from spectrain.tests.heads.published import LLAMA_8B
from spectrain.tests.models import rand_llama


@pytest.fixture
def head() -> Eagle3Head:
    target = Target.from_model(rand_llama())
    head = Eagle3Head(Eagle3Config.derive(target.facts, {"draft_vocab_size": 40}))
    head.set_draft_vocab(torch.arange(0, 80, 2))
    head.initialise(target.tensors(), torch.Generator().manual_seed(0))
    return head


@pytest.fixture
def folder(head: Eagle3Head, tmp_path: Path) -> Path:
    save_head(tmp_path / "head", head, {"metrics": {}}, torch.float32)
    return tmp_path / "head"


def test_a_saved_head_loads_bit_for_bit(head: Eagle3Head, folder: Path) -> None:
    loaded = load_head(folder)
    assert loaded.head.config == head.config
    for name, tensor in head.state_dict().items():
        assert torch.equal(loaded.head.state_dict()[name], tensor), name
    assert torch.equal(loaded.head.draft_to_target(), torch.arange(0, 80, 2))


def test_the_serving_config_says_what_cannot_be_guessed(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4] and config["num_aux_hidden_states"] == 3
    # SGLang adds one to what it reads
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert config["norm_before_residual"] is False and config["vocab_size"] == 97 and config["draft_vocab_size"] == 40
    tensors = load_file(folder / "model.safetensors")
    assert tensors["d2t"].tolist() == list(range(40))  # offsets: target id = draft id + d2t
    assert tensors["t2d"].nonzero().flatten().tolist() == list(range(0, 80, 2))


@pytest.mark.parametrize(
    ("recipe", "model_type", "settings", "found"),
    [
        ("eagle3", "llama", {"layer_ids": [1, 9, 31]}, [0, 8, 30]),
        ("eagle3", "llama", {"layer_ids": [0, 9, 31]}, "SGLang: no: it captures states between"),
        ("eagle3", "llama", {"layer_ids": [1, 9, 32]}, "SGLang: no: it captures states between"),
        ("eagle3", "llama", {"num_layers": 2}, "SGLang: no: it norms"),
        ("eagle3", "llama", {"norm_before_residual": True}, "SGLang: no: it adds"),
        ("eagle3", "deepseek_v3", {"layer_ids": [2, 9, 31]}, [1, 8, 30]),
        ("eagle3", "deepseek_v3", {"layer_ids": [1, 9, 31]}, "SGLang: no: it guesses"),
        ("eagle3", "deepseek_v3", {"layer_ids": [3, 9, 31]}, "SGLang: no: it guesses"),
        ("eagle3", "qwen3", {"layer_style": "qwen3"}, "SGLang: no: it has Llama"),
        ("peagle", "llama", {"num_layers": 1}, "SGLang: no: it drafts one token"),
    ],
)
def test_sglang_reads_its_own_layer_numbers_or_none(
    recipe: str, model_type: str, settings: dict[str, Any], found: list[int] | str
) -> None:
    """Words where it expects numbers stop it at once; vLLM takes the ids of the top level, which stay as they are."""
    config = tiny_head_config(recipe, dataclasses.replace(LLAMA_8B, model_type=model_type), **settings)
    serving = config.serving_config()
    read = serving["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert read == found if isinstance(found, list) else read.startswith(found)
    assert serving["eagle_aux_hidden_state_layer_ids"] == list(config.layer_ids)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("fc.weight"), "missing fc.weight"),
        (lambda t: t.update(extra=torch.zeros(1)), "unknown extra"),
        (lambda t: t.update({"norm.weight": torch.ones(31)}), "norm.weight has shape"),
        (lambda t: t["fc.weight"].fill_(torch.nan), "fc.weight"),
        (lambda t: t.update({"fc.weight": t["fc.weight"].to(torch.int8)}), "fc.weight is of type torch.int8"),
        (lambda t: t["d2t"].fill_(-1), "40 ascending target ids from 0 to 96, found 40 from -1 to 38"),
        (lambda t: t["d2t"].copy_(torch.arange(0, 80, 2)), "from 0 to 96, found 40 from 0 to 117"),
        (lambda t: t["d2t"].fill_(1), "d2t and t2d must name the same target ids"),
    ],
    ids=[
        "missing",
        "unknown",
        "mis-shaped",
        "never filled",
        "whole numbers",
        "map nobody set",
        "ids for offsets",
        "another map",
    ],
)
def test_wrong_tensors_are_named(folder: Path, change: Callable, words: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(HeadError, match=words):
        load_head(folder)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"num_layers": 0}, "head.num_layers must be 1 or more, found 0"),
        ({"num_kv_heads": 0}, "head.num_kv_heads must be 1 or more, found 0"),
        ({"num_heads": -4}, "head.num_heads must be 1 or more, found -4"),
        ({"intermediate_size": 0}, "head.intermediate_size must be 1 or more, found 0"),
        ({"max_position_embeddings": -5}, "head.max_position_embeddings must be 1 or more"),
        ({"rms_norm_eps": -1.0}, "head.rms_norm_eps must be above 0"),
        ({"head_dim": 3}, "head.head_dim must be even, found 3"),
        ({"rope_parameters": {}}, "must hold rope_theta, found"),
        (
            {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}},
            "rope_type must be one of .*'spiral'",
        ),
    ],
)
def test_shapes_that_cannot_be_are_named(wrong: dict[str, Any], words: str) -> None:
    facts = Target.from_model(rand_llama()).facts
    with pytest.raises(HeadError, match=words):
        Eagle3Head(Eagle3Config.derive(facts, {"draft_vocab_size": 40, **wrong}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_layers": "2"}, "a field of Eagle3Config is of a wrong type"),
        ({"layer_ids": None}, "a field of Eagle3Config is of a wrong type"),
        ({"target": None}, "a field of Eagle3Config is of a wrong type"),
        ({"layer_style": "gemma"}, "head.layer_style must be llama or qwen3, found 'gemma'"),
    ],
)
def test_a_record_that_was_tampered_with_is_one_line(folder: Path, change: dict[str, Any], words: str) -> None:
    record = json.loads((folder / "spectrain.json").read_text())
    record["config"] |= change
    (folder / "spectrain.json").write_text(json.dumps(record))
    with pytest.raises(HeadError, match=words):
        load_head(folder)


def test_whoever_may_read_the_config_may_read_the_weights(folder: Path) -> None:
    modes = {path.name: path.stat().st_mode for path in folder.iterdir()}
    assert modes["model.safetensors"] == modes["config.json"] == modes["spectrain.json"]


def test_a_head_nobody_filled_is_not_written(tmp_path: Path) -> None:
    config = Eagle3Config.derive(TargetFacts.from_config(rand_llama().config), {})
    with pytest.raises(HeadError, match="every parameter must be finite"):
        save_head(tmp_path / "head", Eagle3Head(config), {})
    assert not (tmp_path / "head").exists()


def test_a_foreign_class_is_not_imported(folder: Path) -> None:
    record = json.loads((folder / "spectrain.json").read_text())
    record["config_class"] = "os:system"
    (folder / "spectrain.json").write_text(json.dumps(record))
    with pytest.raises(HeadError, match="--allow-package os"):
        load_head(folder)


@pytest.mark.parametrize("num_layers", range(3, 40))
def test_default_layers_are_distinct_ascending_and_below_the_last(num_layers: int) -> None:
    ids = default_aux_layer_ids(num_layers)
    assert len(set(ids)) == 3 and list(ids) == sorted(ids) and ids[0] >= 0 and ids[-1] < num_layers
    if num_layers >= 7:
        assert ids == (2, num_layers // 2, num_layers - 3)


def test_too_shallow_a_target_is_told_which_option_to_set() -> None:
    with pytest.raises(HeadError, match="--layers"):
        default_aux_layer_ids(2)
