"""Going on from a written head on other shards: what it knew is kept, and so is what its draft ids mean."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from spectrain.extract.shards import ShardSet
from spectrain.heads.base import HeadError
from spectrain.heads.folder import load_head
from spectrain.recipes.loader import load_recipe
from spectrain.tests.models import succ_llama
from spectrain.tests.shard_folders import make_document, write_shards
from spectrain.tests.train.runs import Recorder
from spectrain.train.assembly import assemble, continued_head, draft_vocabulary
from spectrain.train.run import FitRequest, fit

SETTINGS = (
    "head.draft_vocab_size=8",
    "head.num_heads=2",
    "optimizer.warmup_steps=5",
    "data.sequence_length=32",
    "data.batch_size=3",
    "data.validation_share=0",
    "stopping.max_steps=1",
)


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Shards of two texts that have some tokens in common."""
    folder, model = tmp_path_factory.mktemp("stages"), succ_llama()
    found = []
    for name, first in (("first", 0), ("second", 4)):
        documents = [
            make_document(model, torch.arange(10) + first, torch.arange(10) >= 2, row, (2,)) for row in range(4)
        ]
        found.append(write_shards(folder / name, model=model, documents=documents, layers=(2,)))
    return found[0], found[1]


def train(recipe: str, shards: Path, out: Path, *changes: str, start_from: Path | None = None) -> Path:
    loaded = load_recipe(recipe, [*SETTINGS, *changes])
    fit(FitRequest(recipe=loaded, shards=(shards,), out=out, start_from=start_from, device="cpu"), Recorder())
    return out


def test_a_second_stage_goes_on_from_the_first_and_keeps_its_vocabulary(stages: tuple[Path, Path], tmp_path: Path):
    first = train("mlp_speculator", stages[0], tmp_path / "first")
    second = train("mlp_speculator_stage2", stages[1], tmp_path / "second", "optimizer.lr=1e-12", start_from=first)
    before, after = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    recipe = load_recipe("mlp_speculator_stage2", SETTINGS)
    shards = ShardSet.open((stages[1],))
    anew = draft_vocabulary(assemble(recipe, shards).config, shards)
    assert anew is not None and not torch.equal(anew.token_ids, before["token_map"])
    record = json.loads((second / "spectrain.json").read_text())
    assert record["draft_vocabulary"]["coverage"] < 1  # of the second text, said plainly


def test_the_second_stage_begins_where_the_first_ends_and_falls_to_a_hundredth():
    first, second = (load_recipe(name).section("optimizer") for name in ("mlp_speculator", "mlp_speculator_stage2"))
    assert second["lr"] == pytest.approx(first["lr"] * first["final_lr_share"])
    assert second["lr"] * second["final_lr_share"] == pytest.approx(0.01 * first["lr"])


def test_float32_weights_are_taken_bit_for_bit(stages: tuple[Path, Path], tmp_path: Path):
    first = train("mlp_speculator", stages[0], tmp_path / "first")
    file = first / "model.safetensors"
    tensors = {name: t.float() + 1e-6 if t.is_floating_point() else t for name, t in load_file(file).items()}
    save_file(tensors, file)
    assembly = assemble(load_recipe("mlp_speculator", SETTINGS), ShardSet.open((stages[1],)))
    for name, tensor in continued_head(assembly, first).state_dict().items():
        assert torch.equal(tensor, tensors[name])
    assert load_head(first).head.config == assembly.config


def test_another_head_is_refused_with_what_differs(stages: tuple[Path, Path], tmp_path: Path):
    first = train("mlp_speculator", stages[0], tmp_path / "first")
    with pytest.raises(HeadError, match=r"head.num_heads = 2, this recipe says 3"):
        train("mlp_speculator", stages[1], tmp_path / "a", "head.num_heads=3", start_from=first)
    with pytest.raises(HeadError, match="this recipe says"):
        train("medusa", stages[1], tmp_path / "b", start_from=first)
    with pytest.raises(HeadError, match="no folder at"):
        train("mlp_speculator", stages[1], tmp_path / "c", start_from=tmp_path / "nowhere")
    assert not (tmp_path / "a" / "config.json").exists()
