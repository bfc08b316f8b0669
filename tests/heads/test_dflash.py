"""DFlash's config and folder: layers, sizes, what other engines are told, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from spectrain.heads.base import HeadError
from spectrain.heads.dflash import DFlashConfig, DFlashHead, spread_layer_ids
from spectrain.heads.folder import load_head, save_head
from spectrain.infer.target import Target
from spectrain.tests.fresh import loud_head
from spectrain.tests.heads.published import QWEN3_4B
from spectrain.tests.models import rand_llama
from spectrain.tests.train.blocks import block_config
from spectrain.tests.train.toys import random_target


def test_defaults_are_the_published_ones() -> None:
    config = DFlashConfig.derive(QWEN3_4B, {"mask_token_id": 151669})
    assert config.layer_ids == (2, 10, 18, 26, 34)  # outputs of layers 1, 9, 17, 25, 33
    assert (config.num_layers, config.block_size, config.num_drafts) == (5, 16, 15)
    assert not (config.causal or config.sample_from_anchor or config.sliding_window)
    assert DFlashConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("num_layers", range(1, 70))
def test_layers_are_distinct_ascending_and_of_this_target(num_layers: int) -> None:
    ids = spread_layer_ids(num_layers)
    assert list(ids) == sorted(set(ids)) and ids[0] == 2
    if num_layers >= 4:
        assert ids[-1] == max(num_layers - 2, 2) < num_layers
    if num_layers >= 8:
        assert [i - 1 for i in ids] == [round(1 + i * (num_layers - 4) / 4) for i in range(5)] and len(ids) == 5


def test_training_starts_between_the_targets_ends() -> None:
    target = random_target(16, 16)
    heads = []
    for _ in range(2):
        head = DFlashHead(block_config(num_layers=2))
        with pytest.raises(HeadError, match="every parameter must be finite"):
            head.assert_filled()
        head.initialise(target, torch.Generator().manual_seed(3))
        head.assert_filled()
        heads.append(head)
    for name, parameter in heads[0].named_parameters():
        assert torch.equal(parameter, heads[1].get_parameter(name)), name
        if name == "norm.weight":
            assert torch.equal(parameter, target.norm.weight)
        elif parameter.dim() == 1:
            assert (parameter == 1).all(), name
        else:
            assert 0.015 < float(parameter.detach().std()) < 0.025, name


def test_the_serving_config_spells_out_what_engines_would_guess() -> None:
    config = DFlashConfig.derive(QWEN3_4B, {"mask_token_id": 151669}).serving_config()
    assert config["architectures"] == ["DFlashDraftModel"] and config["model_type"] == "qwen3"
    assert config["block_size"] == 16 and config["is_causal"] is False and config["vocab_size"] == 151936
    assert "layer_types" not in config  # "sliding_attention" there would make blocks causal
    assert config["dflash_config"] == {
        "mask_token_id": 151669,
        "target_layer_ids": [1, 9, 17, 25, 33],
        "causal": False,
        "sample_from_anchor": False,
    }
    windowed = DFlashConfig.derive(QWEN3_4B, {"mask_token_id": 0, "sliding_window": 2048, "causal": True})
    assert windowed.serving_config()["is_causal"] is True
    assert windowed.serving_config()["dflash_config"].items() >= {"use_swa": True, "swa_window_size": 2048}.items()


@pytest.mark.parametrize("settings", [{"sample_from_anchor": True}, {"layer_ids": (0, 10)}])
def test_what_vllm_would_serve_wrongly_has_a_name_it_refuses(settings: dict) -> None:
    [name] = DFlashConfig.derive(QWEN3_4B, {"mask_token_id": 1, **settings}).serving_config()["architectures"]
    assert not name.startswith("DFlash") and not name.endswith("DFlash") and f"DFlash{name}" != "DFlashDraftModel"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mask_token_id": 151936}, "mask_token_id must be one of the target's 151936 rows, found 151936"),
        ({"mask_token_id": -1}, "mask_token_id must be one of"),
        ({"block_size": 1}, "block_size must leave room"),
        ({"block_size": 0, "sample_from_anchor": True}, "block_size must leave room"),
        ({"sliding_window": 15}, "sliding_window must hold a block of 16, found 15"),
        ({"draft_vocab_size": 32000}, "draft_vocab_size 32000; set it to null"),
        ({"layer_ids": ()}, "at least one aux layer"),
        ({"layer_ids": (3, 2)}, "ascending and distinct"),
        ({"num_layers": 0}, "num_layers must be 1 or more"),
    ],
)
def test_wrong_settings_are_named(settings: dict, message: str) -> None:
    with pytest.raises(HeadError, match=message):
        DFlashConfig.derive(QWEN3_4B, {"mask_token_id": 0, **settings})


def test_a_head_without_a_mask_token_is_refused() -> None:
    with pytest.raises(HeadError, match="needs a mask token"):
        DFlashHead(block_config(mask_token_id=None))


def test_a_block_is_its_anchor_and_masks() -> None:
    head = loud_head(block_config(), random_target(16, 16))
    assert head.block_ids(torch.tensor([[3, 4], [5, 6]]), 3).tolist() == [
        [[3, 15, 15], [4, 15, 15]],
        [[5, 15, 15], [6, 15, 15]],
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    target = Target.from_model(rand_llama())
    settings = {"mask_token_id": 0, "num_layers": 2, "block_size": 4, "sample_from_anchor": True, "sliding_window": 9}
    head = loud_head(DFlashConfig.derive(target.facts, settings), target.tensors())
    save_head(tmp_path / "head", head, {"metrics": {}}, torch.float32)
    loaded = load_head(tmp_path / "head")
    assert loaded.head.config == head.config and loaded.head.config.sample_from_anchor
    for name, tensor in head.state_dict().items():
        assert torch.equal(loaded.head.state_dict()[name], tensor), name
    return tmp_path / "head"


def test_a_saved_head_loads_and_holds_the_checkpoints_names(folder: Path) -> None:
    names = set(load_file(folder / "model.safetensors"))
    layer = [f"self_attn.{p}.weight" for p in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    layer += [f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")]
    layer += ["input_layernorm.weight", "post_attention_layernorm.weight"]
    expected = {f"layers.{i}.{name}" for i in range(2) for name in layer}
    assert names == expected | {"fc.weight", "hidden_norm.weight", "norm.weight"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("layers.1.self_attn.k_norm.weight"), "missing layers.1.self_attn.k_norm.weight"),
        (lambda t: t.update({"fc.bias": torch.zeros(32)}), "unknown fc.bias"),
        (lambda t: t.update({"mask_hidden": torch.zeros(32)}), "unknown mask_hidden"),
        (lambda t: t.update({"hidden_norm.weight": torch.ones(31)}), "hidden_norm.weight has shape"),
    ],
    ids=["missing", "bias", "unknown", "mis-shaped"],
)
def test_wrong_tensors_are_named(folder: Path, change, words: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(HeadError, match=words):
        load_head(folder)
