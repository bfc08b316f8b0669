"""Medusa and the MLP speculator as networks and folders: sizes, starts, names, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from spectrain.heads.base import HeadError
from spectrain.heads.folder import load_head, save_head
from spectrain.heads.medusa import MedusaConfig, MedusaHead
from spectrain.heads.mlp_speculator import MLPSpeculatorConfig
from spectrain.tests.fresh import fresh_head, loud_head
from spectrain.tests.heads.published import LLAMA_7B
from spectrain.tests.train.formulas import normed
from spectrain.tests.train.per_step import STYLES, make_config
from spectrain.tests.train.toys import random_target, tiny_config


def test_the_embeddings_weight_is_the_published_constant():
    assert MLPSpeculatorConfig.derive(LLAMA_7B, {}).embedding_weight == pytest.approx(23.072024, abs=1e-6)
    assert pytest.approx(20.554837, abs=1e-5) == 23.072024 * 0.890899


@pytest.mark.parametrize("style", ["medusa", "medusa, two blocks", "medusa, shared lm_head", "medusa, no bias"])
def test_every_medusa_head_starts_as_the_targets_own_output(style: str):
    target = random_target(16, 16)
    head = fresh_head(make_config(style), target)
    states = target.norm(torch.randn(7, 16, generator=torch.Generator().manual_seed(0)))
    expected = target.logits_of_normed(states)
    for step in range(3):
        logits_states, feedback = head(states, torch.zeros(7, dtype=torch.int64), step)
        assert torch.equal(head.logits(logits_states, target, step), expected)
        assert feedback is states


def test_a_reduced_medusa_head_starts_as_the_targets_rows():
    target = random_target(16, 16)
    head = fresh_head(make_config("medusa, token map"), target)
    ids = head.draft_to_target()
    assert ids is not None and len(ids) == 11
    for step in range(3):
        assert torch.equal(head.output_weight(target, step), target.lm_head[ids])


@pytest.mark.parametrize("style", ["medusa, two blocks", "mlp"])
def test_every_head_and_every_block_is_a_module_of_its_own(style: str):
    head = fresh_head(make_config(style, heads=4), random_target(16, 16))
    pointers = [p.data_ptr() for p in head.parameters()]
    assert len(set(pointers)) == len(pointers)
    assert len(pointers) == 4 * 5  # two weights with biases and lm_head; emb, proj, two of ln, head


def test_an_mlp_speculator_starts_random_with_plain_norms():
    config = make_config("mlp", vocab=300, hidden=64)
    head = fresh_head(config, random_target(300, 64))
    for name, parameter in head.named_parameters():
        if ".ln." in name:
            assert (parameter == (1.0 if name.endswith("weight") else 0.0)).all()
        else:
            assert float(parameter.detach().std()) == pytest.approx(64**-0.5, rel=0.05), name
    again = fresh_head(config, random_target(300, 64))
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("style", STYLES)
def test_a_saved_head_loads_to_the_same_logits(style: str, tmp_path: Path):
    """Each switch of the config survives the folder: blocks, bias, scale, tying, map."""
    target = random_target(16, 16)
    head = loud_head(make_config(style), target, random_norms=True)
    save_head(tmp_path / "head", head, {}, torch.float32)
    loaded = load_head(tmp_path / "head").head
    assert loaded.config == head.config and type(loaded) is type(head)
    states = normed(target, torch.randn(5, 16, generator=torch.Generator().manual_seed(2)))
    other, tokens = states, torch.arange(5)
    for step in range(3):
        ours, states = head(states, tokens, step)
        theirs, other = loaded(other, tokens, step)
        assert torch.equal(head.logits(ours, target, step), loaded.logits(theirs, target, step))
    with pytest.raises(HeadError, match="missing"):
        file = tmp_path / "head" / "model.safetensors"
        tensors = load_file(file)
        tensors.popitem()
        save_file(tensors, file)
        load_head(tmp_path / "head")


def test_tied_weights_are_written_once(tmp_path: Path):
    sizes = {}
    for style in ("mlp", "mlp, tied"):
        head = loud_head(make_config(style, heads=4), random_target(16, 16), random_norms=True)
        save_head(tmp_path / style, head, {}, torch.float32)
        sizes[style] = set(load_file(tmp_path / style / "model.safetensors"))
    kinds = ("emb.{}.weight", "head.{}.weight", "ln.{}.bias", "ln.{}.weight", "proj.{}.weight")
    assert sizes["mlp"] == {"speculator." + kind.format(i) for kind in kinds for i in range(4)}
    assert sizes["mlp, tied"] == {"speculator." + kind.format(0) for kind in kinds} | {"speculator.proj.1.weight"}


def test_medusa_tensors_bear_the_names_vllm_reads(tmp_path: Path):
    weights = {f"blocks.{i}.layers.0.weight" for i in range(3)}
    biases = {f"blocks.{i}.layers.0.bias" for i in range(3)}
    own = {f"lm_heads.{i}.weight" for i in range(3)}
    expected = {
        "medusa": weights | biases | own,
        "medusa, no bias": weights | own,
        "medusa, shared lm_head and token map": weights | biases | {"lm_heads.0.weight", "token_map"},
    }
    for style, names in expected.items():
        head = loud_head(make_config(style), random_target(16, 16), random_norms=True)
        save_head(tmp_path / style, head, {})
        tensors = load_file(tmp_path / style / "model.safetensors")
        assert set(tensors) == names
        ids = head.draft_to_target()
        if ids is not None:  # absolute, not offsets
            assert tensors["token_map"].dtype == torch.int64 and torch.equal(tensors["token_map"], ids)


def test_serving_configs_say_what_cannot_be_guessed(tmp_path: Path):
    def written(style: str) -> dict:
        save_head(tmp_path / style, loud_head(make_config(style), random_target(16, 16), random_norms=True), {})
        return json.loads((tmp_path / style / "config.json").read_text())

    medusa = written("medusa, two blocks")
    assert medusa["architectures"] == ["MedusaModel"] and medusa["model_type"] == "medusa"
    assert (medusa["num_heads"], medusa["num_hidden_layers"], medusa["medusa_fc_bias"]) == (3, 2, True)
    assert medusa["original_lm_head"] is False and medusa["truncated_vocab_size"] is None
    assert [key for key in medusa if "num" in key and "heads" in key] == ["num_heads"]
    assert written("medusa, shared lm_head")["original_lm_head"] is True
    reduced = written("medusa, token map")
    assert reduced["architectures"] == ["MedusaTokenMapModel"]
    assert (reduced["vocab_size"], reduced["truncated_vocab_size"]) == (16, 11)
    mlp = written("mlp, tied and scaled")
    assert mlp["architectures"] == ["MLPSpeculatorPreTrainedModel"] and mlp["model_type"] == "mlp_speculator"
    assert (mlp["emb_dim"], mlp["inner_dim"], mlp["n_predict"]) == (16, 24, 3)
    assert mlp["tie_weights"] is True and mlp["scale_input"] is True and len(mlp["top_k_tokens_per_head"]) == 3
    assert written("mlp, token map")["architectures"] == ["MLPSpeculatorTokenMapModel"]


@pytest.mark.parametrize("field", ["lm_head", "num_layers", "fc_bias"])
def test_a_config_without_its_layout_is_refused_not_guessed(field: str, tmp_path: Path):
    save_head(tmp_path / "head", loud_head(make_config("medusa"), random_target(16, 16), random_norms=True), {})
    record = json.loads((tmp_path / "head" / "spectrain.json").read_text())
    del record["config"][field]
    (tmp_path / "head" / "spectrain.json").write_text(json.dumps(record))
    with pytest.raises(HeadError, match=field):
        load_head(tmp_path / "head")


@pytest.mark.parametrize(
    ("style", "settings", "words"),
    [
        ("medusa", {"layer_ids": [1, 2]}, "remove head.layer_ids"),
        ("medusa", {"num_heads": 0}, "head.num_heads must be 1 or more"),
        ("medusa", {"lm_head": "tied"}, "own or shared"),
        ("medusa", {"lm_head": "shared", "num_layers": 0}, "at least 1 where all heads share"),
        ("mlp", {"emb_dim": 17}, "head.emb_dim must be 16"),
        ("mlp", {"tie_weights": True, "num_heads": 1}, "ties several heads"),
        ("mlp", {"inner_dim": -1}, "head.inner_dim must be 1 or more"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(style: str, settings: dict, words: str):
    with pytest.raises(HeadError, match=words):
        STYLES[style][0].derive(tiny_config().target, settings)


def test_an_inner_width_of_nought_is_the_targets():
    for settings in ({}, {"inner_dim": 0}, {"inner_dim": None}):
        assert MLPSpeculatorConfig.derive(tiny_config().target, settings).inner_dim == 16


def test_a_map_nobody_set_or_of_another_size_is_refused():
    head = MedusaHead(MedusaConfig.derive(tiny_config().target, {"draft_vocab_size": 4}))
    for ids in ([0, 1, 2], [0, 2, 1, 3], [0, 1, 2, 16]):
        with pytest.raises(HeadError, match="4 ascending target ids"):
            head.set_draft_vocab(torch.tensor(ids))
    used = torch.tensor([3, 5, 6, 9])
    head.set_draft_vocab(used)
    assert head.state_dict()["token_map"].tolist() == [3, 5, 6, 9]
