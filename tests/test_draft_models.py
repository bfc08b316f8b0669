"""Draft models from extraction to the engine: what `fit` trained is what is served, by us and by transformers."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

from spectrain import cli
from spectrain.commands.fit import fit
from spectrain.heads.base import HeadError
from spectrain.heads.draft_model import DraftModel
from spectrain.heads.folder import load_head, read_record
from spectrain.heads.pard import Pard
from spectrain.infer.engine import Engine, EngineConfig
from spectrain.infer.proposers.draft_model import DraftModelProposer
from spectrain.infer.proposers.none import NoneProposer
from spectrain.infer.proposers.pard import PardProposer
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.target import Target
from spectrain.recipes.loader import load_recipe
from spectrain.tests.chats import PLAIN, VOCABULARY, word_tokenizer
from spectrain.tests.language_models import parallel_logits
from spectrain.tests.loop import RECIPES, SETTINGS, extract_and_fit
from spectrain.tests.models import rand_llama, succ_llama
from spectrain.tests.shard_folders import make_document, write_shards
from spectrain.tests.test_train_equals_serve import STEPS, TOLERANCE, Steered
from spectrain.tests.train.runs import Recorder
from spectrain.train.batch import TrainBatch
from spectrain.train.objectives.draft_model import DraftModelObjective, DraftModelSettings
from spectrain.train.objectives.pard import PardObjective, PardSettings
from spectrain.train.run import FitRequest
from spectrain.train.run import fit as run_fit


class SteeredDraftModel(Steered, DraftModelProposer):
    pass


class SteeredPard(Steered, PardProposer):
    pass


class World(NamedTuple):
    """A target, greedy texts, and the head folder that was fitted to the target by one recipe."""

    target: Target
    prompts: list[list[int]]
    texts: list[list[int]]
    method: str
    folder: Path


@pytest.fixture(scope="module")
def decoded() -> tuple[Target, list[list[int]], list[list[int]]]:
    target = Target.from_model(rand_llama(max_position_embeddings=128))
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 97, (n,), generator=generator).tolist() for n in (1, 9, 30)]
    engine = Engine(target, NoneProposer(), EngineConfig(num_blocks=200, block_size=4))
    outputs = engine.generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True))
    return target, prompts, [p + o.token_ids for p, o in zip(prompts, outputs, strict=True)]


@pytest.fixture(scope="module", params=["draft_model", "pard"])
def world(request, decoded, tmp_path_factory) -> World:
    folder = tmp_path_factory.mktemp("loop")
    extract_and_fit(rand_llama(max_position_embeddings=128), folder, recipe=request.param)
    return World(*decoded, request.param, folder)


def trainer_logits(head: DraftModel, target: Target, text: list[int]) -> torch.Tensor:
    """[steps, row, vocab]: the trainer's own forward over one document."""
    batch = TrainBatch(
        token_ids=torch.tensor([text]),
        positions=torch.arange(len(text))[None],
        document_ids=torch.zeros(1, len(text), dtype=torch.int32),
        loss_mask=torch.ones(1, len(text), dtype=torch.bool),
        target_argmax=torch.zeros(1, len(text), dtype=torch.int64),
        aux_states=torch.zeros(1, len(text), 0, 1),
        final_states=None,
        denominators=torch.ones(STEPS),
    )
    rows = torch.arange(len(text))
    with torch.no_grad():
        if isinstance(head, Pard):
            # STEPS is more than the 3 it was trained for
            objective = PardObjective(head.config, PardSettings(steps=STEPS))
            states = objective.unroll(head, target.tensors(), batch, [rows] * STEPS)
            return head.logits(states, target.tensors()).unflatten(0, (STEPS, len(text)))
        objective = DraftModelObjective(head.config, DraftModelSettings())
        logits = head.logits(objective.unroll(head, target.tensors(), batch, [rows]), target.tensors())
        return torch.stack([logits.roll(-k, dims=0) for k in range(STEPS)])


@pytest.mark.parametrize(("spoil", "num_blocks"), [(0.0, 200), (0.3, 22), (1.0, 200)])
def test_every_draft_logit_of_the_engine_is_the_trainers(world: World, spoil: float, num_blocks: int):
    """With drafts accepted, rejected at any place, and requests preempted in between."""
    target, prompts, texts, method, folder = world
    head = load_head(folder / "head", dtype=torch.float32).head
    assert isinstance(head, DraftModel)
    kind = SteeredPard if method == "pard" else SteeredDraftModel
    proposer = kind(head, target.tensors(), dict(enumerate(texts)), spoil)
    config = EngineConfig(num_draft_tokens=STEPS, num_blocks=num_blocks, block_size=4, max_batch_tokens=13)
    engine = Engine(target, proposer, config)
    outputs = engine.generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True))
    assert [o.prompt_token_ids + o.token_ids for o in outputs] == texts
    assert (engine.statistics.num_preemptions > 0) == (num_blocks == 22)
    if spoil:
        assert engine.statistics.accepted_tokens < engine.statistics.draft_tokens
    compared = 0
    for request, text in enumerate(texts):
        expected = trainer_logits(head, target, text)
        for (owner, row, step), logits in proposer.logits.items():
            if owner == request:
                # a draft starts from the newest token, one ahead of the row that feature heads count from
                torch.testing.assert_close(logits, expected[step, row + 1], atol=TOLERANCE, rtol=1e-4)
                compared += 1
    assert compared > 60


def test_one_row_off_would_be_seen(world: World):
    target, _, texts, _, folder = world
    head = load_head(folder / "head", dtype=torch.float32).head
    assert isinstance(head, DraftModel)
    logits = trainer_logits(head, target, texts[0])
    for step, rows in enumerate(logits):
        assert rows[: len(texts[0]) - step].diff(dim=0).abs().amax(-1).min() > 50 * TOLERANCE


def test_the_folder_serves_in_transformers_what_the_engine_drafts(world: World):
    target, prompts, texts, method, folder = world
    head = load_head(folder / "head", dtype=torch.float32).head
    assert isinstance(head, DraftModel)
    model = AutoModelForCausalLM.from_pretrained(folder / "head", dtype=torch.float32).eval()
    expected = trainer_logits(head, target, texts[1])
    if isinstance(head, Pard):
        found = torch.stack([parallel_logits(model, texts[1][:n], head.mask_token_id, STEPS) for n in (3, 20)], dim=1)
        torch.testing.assert_close(found, expected[:, [2, 19]], atol=TOLERANCE, rtol=1e-4)
    else:
        with torch.no_grad():
            found = model(input_ids=torch.tensor([texts[1]])).logits[0]
        torch.testing.assert_close(found, expected[0], atol=TOLERANCE, rtol=1e-4)


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
    shared = ("--model", world.folder / "target", "--prompts", prompts, "--max-new-tokens", 12, "--ignore-eos")
    code, _ = run_eval(capsys, *shared, "--head", world.folder / "head", "--out", tmp_path / "own")
    report = json.loads((tmp_path / "own" / "report.json").read_text())
    assert code == 0 and report["method"] == world.method and report["lossless"]["passed"]
    whole = ("--head", world.folder / "target", "--method", "draft_model", "--num-draft-tokens", 3)
    code, _ = run_eval(capsys, *shared, *whole, "--out", tmp_path / "self")
    report = json.loads((tmp_path / "self" / "report.json").read_text())
    assert code == 0 and report["method"] == "draft_model" and report["draft_acceptance_rate"] == 1.0

    swapped = [*VOCABULARY]
    swapped[9], swapped[12] = swapped[12], swapped[9]
    rand_llama(2).save_pretrained(tmp_path / "small")
    word_tokenizer(PLAIN, words=swapped).save_pretrained(tmp_path / "small")
    arguments = ("--head", tmp_path / "small", "--method", "draft_model", "--out", tmp_path / "small-report")
    code, shown = run_eval(capsys, *shared, *arguments)
    assert code == 2 and "must share one tokenizer, found id 9" in shown


@pytest.mark.parametrize("method", ["draft_model", "pard"])
def test_a_drafter_trained_on_a_target_that_counts_drafts_nothing_wrong(method: str, tmp_path: Path):
    """A small random model, trained by `fit` on SUCC's text; labels one off anywhere would leave no draft right."""
    model, layers = succ_llama(4, vocab_size=42), (4,)
    walks = [torch.arange(20) + row for row in range(21)]
    documents = [make_document(model, walk, torch.arange(20) >= 1, i, layers) for i, walk in enumerate(walks)]
    shards = write_shards(tmp_path / "shards", model=model, documents=documents, layers=layers)
    small = rand_llama(2, vocab_size=42, hidden_size=48, tie_word_embeddings=True, max_position_embeddings=256)
    small.save_pretrained(tmp_path / "small")
    changes = ["optimizer.lr=3e-3", "optimizer.schedule=cosine", "data.batch_size=4", "stopping.epochs=40"]
    changes += ["objective.steps=3", "head.mask_token_id=41"] if method == "pard" else []
    fit(
        recipe=method,
        shards=[shards],
        out=tmp_path / "head",
        model=str(tmp_path / "small"),
        overrides=[*changes, "data.sequence_length=64", "stopping.eval_every=500", "stopping.save_every=500"],
        device="cpu",
    )
    head = load_head(tmp_path / "head", dtype=torch.float32).head
    assert isinstance(head, DraftModel)
    target = Target.from_model(succ_llama(4, vocab_size=42))
    proposer = (PardProposer if isinstance(head, Pard) else DraftModelProposer)(head, target.tensors(), 3)
    engine = Engine(target, proposer, EngineConfig(num_draft_tokens=3, num_blocks=200, block_size=4))
    prompts = [[start, start + 1] for start in (1, 7, 15)]
    engine.generate(prompts, SamplingParams(max_tokens=17, ignore_eos=True))
    assert engine.statistics.accepted_tokens == engine.statistics.draft_tokens > 0
