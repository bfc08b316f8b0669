"""Draft models on disk: what they take from a model, what transformers loads of them, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from spectrain.heads.base import HeadError, TargetFacts
from spectrain.heads.draft_model import DraftModel, DraftModelConfig, TokenRows, spread_layers
from spectrain.heads.folder import load_head, save_head
from spectrain.heads.model_folder import ModelFolder, check_same_tokens
from spectrain.heads.pard import Pard, PardConfig
from spectrain.heads.target_tensors import FinalNorm, TargetTensors
from spectrain.tests.chats import VOCABULARY, word_tokenizer
from spectrain.tests.language_models import in_transformers, random_draft_model
from spectrain.tests.models import COMMON, build, gemma3, lone_forward, mixtral, rand_llama

FACTS = TargetFacts.from_config(rand_llama().config)
TEXT = [5, 17, 3, 42, 8, 96, 11]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def causal(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    group = q.shape[-2] // k.shape[-2]
    q, k, v = q.transpose(0, 1), k.repeat_interleave(group, 1).transpose(0, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.transpose(1, 2)) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def own_logits(head: DraftModel, text: list[int]) -> torch.Tensor:
    empty = torch.zeros(1, 1)
    target = TargetTensors(empty, empty, None, FinalNorm("none", None, None, 0.0))
    with torch.no_grad():
        rows = TokenRows(head.embed(torch.tensor(text), target), torch.arange(len(text)))
        return head.logits(head(rows, causal), target)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tie_word_embeddings": True},
        {"family": "qwen3"},
        {"family": "qwen2"},
        {"rope_parameters": LLAMA3_ROPE},
    ],
    ids=["llama", "tied", "qwen3", "qwen2", "llama3 rope"],
)
@pytest.mark.parametrize("parallel", [False, True], ids=["draft_model", "pard"])
def test_the_folder_is_an_ordinary_model_to_transformers(tmp_path: Path, settings: dict, parallel: bool):
    head = random_draft_model(FACTS, parallel=parallel, **settings)
    theirs = in_transformers(head, tmp_path)
    logits = theirs(input_ids=torch.tensor([TEXT])).logits[0]
    torch.testing.assert_close(own_logits(head, TEXT), logits, atol=2e-5, rtol=1e-4)
    loaded = load_head(tmp_path).head
    assert loaded.config == head.config and type(loaded) is type(head)
    assert torch.equal(own_logits(loaded, TEXT), own_logits(head, TEXT))  # pyright: ignore[reportArgumentType]
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["vocab_size"] == FACTS.vocab_size and config.get("pard_token") == (96 if parallel else None)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) == (not head.config.tie_word_embeddings)


def test_missing_and_foreign_tensors_are_named(tmp_path: Path):
    save_head(tmp_path, random_draft_model(FACTS), {})
    path = tmp_path / "model.safetensors"
    from safetensors.torch import save_file

    tensors = load_file(path)
    del tensors["model.layers.1.self_attn.o_proj.weight"]
    save_file({**tensors, "extra": torch.zeros(1)}, path)
    with pytest.raises(HeadError, match=r"missing model.layers.1.self_attn.o_proj.weight; unknown extra"):
        load_head(tmp_path)


def test_parameter_counts_are_those_of_the_published_small_models():
    """Llama-3.2-1B and Qwen3-0.6B, both tied, from their configs."""
    cases = {
        1_235_814_400: ("llama", 128256, 2048, 8192, 16, 32, 8, 64),
        596_049_920: ("qwen3", 151936, 1024, 3072, 28, 16, 8, 128),
    }
    for parameters, (family, vocab, hidden, intermediate, layers, heads, kv_heads, head_dim) in cases.items():
        shape = {
            "family": family,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_layers": layers,
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
            "tie_word_embeddings": True,
            "source_layers": tuple(range(layers)),
        }
        facts = TargetFacts(**{**vars(FACTS), "vocab_size": vocab})
        with torch.device("meta"):
            head = DraftModel(DraftModelConfig.derive(facts, shape))
        assert sum(p.numel() for p in head.parameters()) == parameters


class TestStart:
    """What a fresh draft model takes from the model it starts from."""

    @pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
    def test_all_layers_make_the_same_model(self, family: str, tmp_path: Path):
        model = build(family, **{**COMMON, "head_dim": 8})
        head = started(model, tmp_path, num_layers=4)
        torch.testing.assert_close(own_logits(head, TEXT), lone_forward(model, TEXT)[0], atol=1e-4, rtol=1e-4)

    def test_fewer_layers_are_the_model_without_the_others(self, tmp_path: Path):
        model = rand_llama(6)
        head = started(model, tmp_path, num_layers=3)
        assert head.config.source_layers == (0, 2, 5)
        layers = model.get_decoder().layers
        model.get_decoder().layers = torch.nn.ModuleList(layers[i] for i in head.config.source_layers)
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0]
        torch.testing.assert_close(own_logits(head, TEXT), expected, atol=1e-4, rtol=1e-4)

    def test_of_the_target_a_sixth_is_taken_and_all_of_a_smaller_model(self, tmp_path: Path):
        rand_llama(12).save_pretrained(tmp_path / "target")
        facts = TargetFacts.from_config(rand_llama(12).config)
        target, small = ModelFolder(tmp_path / "target"), ModelFolder(saved(rand_llama(3), tmp_path / "small"))
        assert DraftModelConfig.derive_from(facts, {}, target).source_layers == (0, 11)
        assert DraftModelConfig.derive_from(facts, {}, small).source_layers == (0, 1, 2)
        assert DraftModelConfig.derive_from(facts, {"source_layers": (1,)}, small).num_layers == 1

    def test_tied_embeddings_stay_one_matrix(self, tmp_path: Path):
        head = started(rand_llama(2, tie_word_embeddings=True), tmp_path, num_layers=2)
        assert head.config.tie_word_embeddings and not hasattr(head, "lm_head")

    def test_another_width_and_vocabulary_padding_are_taken_as_they_are(self, tmp_path: Path):
        """A smaller model of the tokenizer whose matrix was padded to fewer rows: the missing ones are the mean row."""
        small = rand_llama(2, vocab_size=90, hidden_size=16, intermediate_size=24, num_attention_heads=2)
        head = started(small, tmp_path)
        assert head.config.hidden_size == 16 and head.config.vocab_size == 97
        embeds = small.get_input_embeddings().weight
        torch.testing.assert_close(head.model.embed_tokens.weight[:90], embeds)
        torch.testing.assert_close(head.model.embed_tokens.weight[90:], embeds.mean(0).expand(7, -1))
        torch.testing.assert_close(own_logits(head, [5, 6])[:, :90], lone_forward(small, [5, 6])[0])

    @pytest.mark.parametrize(
        ("model", "message"),
        [
            (gemma3, "a draft model is a Llama or Qwen of full attention"),
            (mixtral, "found mixtral"),
            (lambda: rand_llama(2, attention_bias=True), "biases in every projection"),
            (lambda: rand_llama(2, hidden_act="gelu"), "activation gelu"),
            (lambda: build("Mistral", **COMMON, sliding_window=8), "sliding windows"),
        ],
        ids=["gemma", "mixtral", "biases", "activation", "window"],
    )
    def test_other_shapes_are_refused_by_what_differs(self, model, message: str, tmp_path: Path):
        folder = saved(model(), tmp_path)
        with pytest.raises(HeadError, match=message):
            DraftModelConfig.derive_from(FACTS, {}, ModelFolder(folder))

    def test_layers_of_another_family_and_wrong_sizes_are_named(self, tmp_path: Path):
        folder = ModelFolder(saved(rand_llama(2), tmp_path))
        for settings, message in (
            ({"family": "qwen3"}, "self_attn.k_norm.weight, self_attn.q_norm.weight to differ"),
            ({"intermediate_size": 50}, r"gate_proj.weight must have shape \[50, 32\], found \[48, 32\]"),
        ):
            head = DraftModel(DraftModelConfig.derive_from(FACTS, settings, folder))
            with pytest.raises(HeadError, match=message):
                head.start_from(folder)

    def test_a_healed_draft_model_starts_a_parallel_one(self, tmp_path: Path):
        healed = random_draft_model(FACTS)
        save_head(tmp_path, healed, {}, torch.float32)
        folder = ModelFolder(tmp_path)
        head = Pard(PardConfig.derive_from(FACTS, {"mask_token_id": 95}, folder))
        head.start_from(folder)
        assert torch.equal(own_logits(head, TEXT), own_logits(healed, TEXT))

    def test_a_parallel_draft_keeps_its_mask_token_when_trained_again(self, tmp_path: Path):
        save_head(tmp_path, random_draft_model(FACTS, parallel=True), {})
        folder = ModelFolder(tmp_path)
        assert PardConfig.derive_from(FACTS, {}, folder).mask_token_id == 96
        assert PardConfig.derive_from(FACTS, {"mask_token_id": 50}, folder).mask_token_id == 50


def saved(model, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def started(model, folder: Path, **settings) -> DraftModel:
    source = ModelFolder(saved(model, folder))
    head = DraftModel(DraftModelConfig.derive_from(FACTS, settings, source))
    head.start_from(source)
    head.assert_filled()
    return head


def test_models_that_cannot_be_read_are_one_line(tmp_path: Path):
    with pytest.raises(HeadError, match="found no folder"):
        ModelFolder(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(HeadError, match="no usable model config"):
        ModelFolder(tmp_path / "empty")
    rand_llama(2).config.save_pretrained(tmp_path / "empty")
    with pytest.raises(HeadError, match="expected weights as safetensors"):
        ModelFolder(tmp_path / "empty")


def test_weights_in_several_files_are_found(tmp_path: Path):
    model = rand_llama(3)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    name = "model.layers.2.mlp.up_proj.weight"
    assert torch.equal(ModelFolder(tmp_path).tensor(name), model.state_dict()[name])


def test_another_tokenizer_is_refused_with_the_first_id_that_differs():
    swapped = [*VOCABULARY]
    swapped[9], swapped[12] = swapped[12], swapped[9]
    ours, theirs = word_tokenizer(None), word_tokenizer(None, words=swapped)
    check_same_tokens(ours, word_tokenizer(None), ("the target", "the draft"))
    with pytest.raises(
        HeadError, match="the target and the draft must share one tokenizer, found id 9 to be 'c' and 'f'"
    ):
        check_same_tokens(ours, theirs, ("the target", "the draft"))
    with pytest.raises(HeadError, match="found id 33 to be 'think' and None"):
        check_same_tokens(ours, word_tokenizer(None, words=VOCABULARY[:-1]), ("the target", "the draft"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layer_ids": (1,)}, "sees tokens alone"),
        ({"draft_vocab_size": 50}, "drafts over the whole vocabulary of 97"),
        ({"num_layers": 2, "source_layers": (0, 1, 2)}, "must name one layer for each of the 2"),
        ({"num_layers": 7}, "between 1 and the model's 6"),
        ({"mask_token_id": 97}, "one of the target's 97 rows"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(settings: dict, message: str):
    with pytest.raises(HeadError, match=message):
        PardConfig.derive(FACTS, settings)


def test_a_target_of_any_family_can_be_extracted_for_a_smaller_model_of_its_tokenizer():
    facts = TargetFacts.from_config(mixtral().config)
    assert DraftModelConfig.derive(facts, {}).layer_ids == ()


def test_a_parallel_draft_without_mask_token_is_not_built():
    with pytest.raises(HeadError, match="set head.mask_token_id"):
        Pard(PardConfig.derive(FACTS, {}))


def test_layers_are_spread_from_first_to_last():
    assert spread_layers(30, 5) == (0, 7, 14, 22, 29)
    assert spread_layers(6, 6) == (0, 1, 2, 3, 4, 5) and spread_layers(6, 1) == (0,)
    for depth in range(1, 40):
        for count in range(2, depth + 1):
            layers = spread_layers(depth, count)
            assert len(set(layers)) == count and layers[0] == 0 and layers[-1] == depth - 1


def test_random_starts_are_finite_reproducible_and_take_the_targets_ends_where_they_fit():
    target = TargetTensors(
        torch.randn(97, 32), torch.randn(97, 32), None, FinalNorm("rms", torch.rand(32) + 0.5, None, 1e-6)
    )
    heads = []
    for shape in ({}, {}, {"hidden_size": 24}):
        head = DraftModel(DraftModelConfig.derive(FACTS, {"family": "qwen2", **shape}))
        head.initialise(target, torch.Generator().manual_seed(3))
        head.assert_filled()
        heads.append(head)
    assert all(torch.equal(a, b) for a, b in zip(heads[0].parameters(), heads[1].parameters(), strict=True))
    assert torch.equal(heads[0].lm_head.weight, target.lm_head)
    assert heads[2].model.embed_tokens.weight.std() < 0.03
