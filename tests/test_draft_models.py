"""Draft models from extraction to the engine: what `fit` trained is what is served, by us and by transformers."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

from spectrain import cli
from spectrain.heads.base import HeadError
from spectrain.heads.folder import load_head, read_record
from spectrain.heads.pard import Pard
from spectrain.infer.target import Target
from spectrain.recipes.loader import load_recipe
from spectrain.tests.chats import PLAIN, VOCABULARY, word_tokenizer
from spectrain.tests.language_models import parallel_logits
from spectrain.tests.loop import RECIPES, SETTINGS, extract_and_fit
from spectrain.tests.models import rand_llama
from spectrain.tests.steering import TOLERANCE, trainer_logits
from spectrain.tests.train.runs import Recorder
from spectrain.train.run import FitRequest
from spectrain.train.run import fit as run_fit

DRAFTS = 4


class World(NamedTuple):
    """The folders of a target, its shards and the head that one recipe made of it."""

    method: str
    folder: Path


@pytest.fixture(scope="module", params=["draft_model", "pard"])
def world(request, tmp_path_factory) -> World:
    folder = tmp_path_factory.mktemp("loop")
    extract_and_fit(rand_llama(max_position_embeddings=128), folder, recipe=request.param)
    return World(request.param, folder)


def test_the_folder_serves_in_transformers_what_the_engine_drafts(world: World):
    """Row by row what the trainer computes, which is what the engine drafts from."""
    head = load_head(world.folder / "head", dtype=torch.float32).head
    model = AutoModelForCausalLM.from_pretrained(world.folder / "head", dtype=torch.float32).eval()
    text = torch.randint(3, 97, (30,), generator=torch.Generator().manual_seed(3)).tolist()
    own = rand_llama(max_position_embeddings=128)
    expected = trainer_logits(head, Target.from_model(rand_llama(max_position_embeddings=128)), own, text, DRAFTS)
    if isinstance(head, Pard):
        found = torch.stack([parallel_logits(model, text[:n], head.mask_token_id, DRAFTS) for n in (3, 20)], dim=1)
        torch.testing.assert_close(found, expected[:, [1, 18]], atol=TOLERANCE, rtol=1e-4)
    else:
        with torch.no_grad():
            found = model(input_ids=torch.tensor([text])).logits[0]
        torch.testing.assert_close(found[1:], expected[0, :-1], atol=TOLERANCE, rtol=1e-4)


def test_the_record_says_what_the_head_started_from(world: World):
    record = read_record(world.folder / "head")
    assert record["started_from"] == "target"
    assert record["config"]["source_layers"] == [0, 5] and record["config"]["family"] == "llama"
    assert str(world.folder) not in json.dumps(record)


def fit_again(world: World, out: Path, recipe: str, model: Path | None) -> Recorder:
    listener = Recorder()
    changes = [*SETTINGS, *RECIPES[recipe], "stopping.max_steps=2"]
    request = FitRequest(
        recipe=load_recipe(recipe, changes),
        shards=(world.folder / "shards",),
        out=out,
        device="cpu",
        model=None if model is None else str(model),
    )
    run_fit(request, listener)
    return listener


def test_a_model_is_asked_for_in_one_line(world: World, tmp_path: Path):
    with pytest.raises(HeadError, match=f"recipe {world.method} starts from layers of a model, found no --model"):
        fit_again(world, tmp_path / "head", world.method, None)
    with pytest.raises(HeadError, match="recipe eagle3 starts from no model, found --model target; leave it out"):
        fit_again(world, tmp_path / "head", "eagle3", world.folder / "target")
    assert not (tmp_path / "head").exists()


def test_a_model_of_another_tokenizer_is_refused(world: World, tmp_path: Path):
    swapped = [*VOCABULARY]
    swapped[9], swapped[12] = swapped[12], swapped[9]
    rand_llama(2).save_pretrained(tmp_path / "small")
    word_tokenizer(PLAIN, words=swapped).save_pretrained(tmp_path / "small")
    with pytest.raises(HeadError, match="must share one tokenizer, found id 9 to be 'c' and 'f'"):
        fit_again(world, tmp_path / "head", world.method, tmp_path / "small")


def test_a_healed_draft_model_becomes_a_parallel_one(world: World, tmp_path: Path):
    listener = fit_again(world, tmp_path / "head", "pard", world.folder / "head")
    head = load_head(tmp_path / "head").head
    assert isinstance(head, Pard) and head.config.source_layers == (0, 1)
    # rows behind the tokenizer's 34 tokens are of no text
    assert head.mask_token_id == 34 and any("mask token is id 34" in note for note in listener.notes)


def run_eval(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    with pytest.raises(SystemExit) as leaving:
        cli.main(["eval", "--device", "cpu", *map(str, arguments)])
    return int(leaving.value.code or 0), capsys.readouterr().err


def test_eval_measures_the_head_and_any_model_of_the_tokenizer(world: World, tmp_path: Path, capsys):
    """The head by its own record; the target as its own draft model, all of whose drafts are right."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("a b c", "k", "x y z a b")))
    settings = ("--prompts", prompts, "--max-new-tokens", 12, "--ignore-eos")
    shared = ("--model", world.folder / "target", *settings)
    code, _ = run_eval(capsys, *shared, "--head", world.folder / "head", "--out", tmp_path / "own")
    report = json.loads((tmp_path / "own" / "report.json").read_text())
    assert code == 0 and report["method"] == world.method and report["lossless"]["passed"]
    # a target that says nothing but its tokenizer's tokens: no others are drafted
    rand_llama(2, vocab_size=len(VOCABULARY), max_position_embeddings=128).save_pretrained(tmp_path / "whole")
    word_tokenizer(PLAIN).save_pretrained(tmp_path / "whole")
    whole = ("--model", tmp_path / "whole", "--draft-model", tmp_path / "whole", "--num-draft-tokens", 3)
    code, _ = run_eval(capsys, *settings, *whole, "--out", tmp_path / "self")
    report = json.loads((tmp_path / "self" / "report.json").read_text())
    assert code == 0 and report["method"] == "draft_model" and report["draft_acceptance_rate"] == 1.0

    swapped = [*VOCABULARY]
    swapped[9], swapped[12] = swapped[12], swapped[9]
    rand_llama(2).save_pretrained(tmp_path / "small")
    word_tokenizer(PLAIN, words=swapped).save_pretrained(tmp_path / "small")
    for method, refusal in (("pard", "must share one tokenizer"), ("draft_model", "do not share one tokenizer")):
        arguments = ("--head", tmp_path / "small", "--method", method, "--out", tmp_path / "small-report")
        code, shown = run_eval(capsys, *shared, *arguments)
        assert code == 2 and f"{refusal}, found id 9 to be 'c' and 'f'" in shown


def test_a_model_without_a_mask_token_is_no_parallel_draft(tmp_path: Path, capsys):
    prompts, model = tmp_path / "prompts.jsonl", tmp_path / "whole"
    prompts.write_text(json.dumps({"prompt": "a b"}) + "\n")
    rand_llama(2, max_position_embeddings=128).save_pretrained(model)
    word_tokenizer(PLAIN).save_pretrained(model)
    whole = ("--model", model, "--draft-model", model, "--method", "pard")
    code, shown = run_eval(capsys, *whole, "--prompts", prompts, "--out", tmp_path / "r")
    assert code == 2 and f"no pard_token in the config.json of {model}" in shown and "--method draft_model" in shown
    assert "head.mask_token_id" not in shown and not (tmp_path / "r").exists()
