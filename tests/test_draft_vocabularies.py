"""Draft models whose vocabulary is not the target's, from their folder to the engine: padded otherwise, or another."""

import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from spectrain import cli
from spectrain.commands.draft_models import load_model
from spectrain.heads.draft_model import DraftModel
from spectrain.heads.folder import LoadedHead
from spectrain.heads.model_folder import shared_vocabulary
from spectrain.infer.config import EngineConfig
from spectrain.infer.engine import Engine
from spectrain.infer.proposers.none import NoneProposer
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.target import Target
from spectrain.tests.chats import VOCABULARY, word_tokenizer
from spectrain.tests.fresh import proposer_of
from spectrain.tests.infer import test_engine_law as law
from spectrain.tests.infer.proposers import keep_drafts
from spectrain.tests.models import COMMON, build, rand_llama
from spectrain.tests.reciters import reciter
from spectrain.tests.text_tokenizers import LINES, TOKENIZERS

CONFIG = EngineConfig(num_draft_tokens=3, num_blocks=200, block_size=4, max_batch_tokens=64, max_batch_size=8)
GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)
WORDS = [*VOCABULARY, *(f"word{i}" for i in range(len(VOCABULARY), 240))]


def tokenizer(count: int = 240):
    return word_tokenizer(None, words=WORDS[:count])


def as_draft(model: PreTrainedModel, folder: Path, target: Target, method: str = "draft_model") -> LoadedHead:
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return load_model(folder, method, target, "the target")


@pytest.mark.parametrize(("rows", "draft_rows"), [(256, 250), (250, 256), (240, 256), (256, 236)])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("sampling", ["greedy", "probabilistic"])
def test_rows_of_padding_are_read_and_never_drafted(
    rows: int, draft_rows: int, tied: bool, sampling: str, tmp_path: Path
):
    """240 tokens, a target and a draft model that pad them otherwise; random ones say rows of padding as any other."""
    target = Target.from_model(rand_llama(3, vocab_size=rows, max_position_embeddings=128), tokenizer())
    small = rand_llama(2, seed=3, vocab_size=draft_rows, tie_word_embeddings=tied, max_position_embeddings=128)
    head = as_draft(small, tmp_path, target).head
    prompts = [[5, 6, 7], [rows - 1, rows - 2, 9], [239, 1]]
    plain = Engine(target, NoneProposer(), CONFIG).generate(prompts, GREEDY)
    made = proposer_of(head, target, 3, sampling)
    drafts = keep_drafts(made)
    engine = Engine(target, made, CONFIG)
    assert [o.token_ids for o in engine.generate(prompts, GREEDY)] == [o.token_ids for o in plain]
    drafted = {token for tokens in drafts.values() for token in tokens}
    assert len(drafted) > 10 and max(drafted) < min(240, rows, draft_rows)


@pytest.mark.parametrize("draft_rows", [4, 7])
def test_a_law_over_fewer_or_more_rows_leaves_the_targets_own(draft_rows: int, tmp_path: Path):
    """Five target tokens; drafts are drawn from a law over the first four of them, or of a draft of seven rows."""
    target = Target.from_model(law.model())
    words = tokenizer(4 if draft_rows == 4 else law.VOCAB)
    small = build("Llama", seed=4, **{**COMMON, "num_hidden_layers": 2, "vocab_size": draft_rows})
    small.save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    target.tokenizer = words
    head = load_model(tmp_path, "draft_model", target, "the target").head
    assert head.config.draft_vocab_size == min(draft_rows, law.VOCAB)
    engine, samples = Engine(target, proposer_of(head, target, 3, "probabilistic"), law.CONFIG), 1500
    each = [SamplingParams(max_tokens=law.DEPTH + 1, seed=i, temperature=1.0) for i in range(samples)]
    outputs = engine.generate([law.PROMPT] * samples, each)
    counts = Counter(tuple(output.token_ids[: law.DEPTH]) for output in outputs)
    assert law.chi_square_p(counts, law.exact_law(each[0]), samples) > 1e-4
    assert engine.statistics.accepted_tokens > 0.03 * engine.statistics.draft_tokens > 100


@pytest.mark.parametrize(("rows", "draft_rows"), [(152_064, 151_936), (151_936, 152_064)])
def test_the_widths_of_real_vocabularies(rows: int, draft_rows: int, tmp_path: Path):
    """Qwen's: models of one tokenizer whose matrices have different numbers of rows."""
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    target = Target.from_model(rand_llama(1, vocab_size=rows, **shape), None)
    small = rand_llama(1, seed=2, vocab_size=draft_rows, **shape)
    head = as_draft(small, tmp_path, target).head
    assert head.config.draft_vocab_size == 151_936
    made = proposer_of(head, target, 2)
    drafts = keep_drafts(made)
    prompt = [rows - 1, 151_935, 5]
    engine = Engine(target, made, dataclasses.replace(CONFIG, num_draft_tokens=2))
    engine.generate([prompt], SamplingParams(max_tokens=2, ignore_eos=True))
    assert drafts and all(token < 151_936 for tokens in drafts.values() for token in tokens)


def test_a_parallel_draft_model_is_padded_alike(tmp_path: Path):
    target = Target.from_model(rand_llama(2, vocab_size=250), tokenizer())
    small = rand_llama(2, vocab_size=256)
    small.config.pard_token = 245
    head = as_draft(small, tmp_path, target, "pard").head
    assert (head.config.vocab_size, head.config.draft_vocab_size) == (250, 240)
    Engine(target, proposer_of(head, target, 3), CONFIG).generate([[5, 249]], GREEDY)


def test_what_two_tokenizers_share():
    assert shared_vocabulary(tokenizer(), tokenizer()) == 240
    assert shared_vocabulary(tokenizer(), tokenizer(236)) == shared_vocabulary(tokenizer(236), tokenizer()) == 236
    swapped = [*WORDS[:238], WORDS[239], WORDS[238]]
    assert shared_vocabulary(tokenizer(), word_tokenizer(None, words=swapped)) is None


def run_eval(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    with pytest.raises(SystemExit) as leaving:
        cli.main(["eval", "--device", "cpu", "--max-new-tokens", "30", *map(str, arguments)])
    return int(leaving.value.code or 0), " ".join(capsys.readouterr().err.split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A target `gpt`, a draft model `qwen` of another tokenizer, and prompts."""
    folder = tmp_path_factory.mktemp("pair")
    for name in ("gpt", "qwen"):
        reciter(name).save_pretrained(folder / name)
        TOKENIZERS[name]().save_pretrained(folder / name)
    rows = [{"prompt": " ".join(line.split(" ")[:3])} for line in LINES]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("temperature", [0, 1])
def test_eval_drafts_with_a_model_of_another_tokenizer(folder: Path, temperature: int, tmp_path: Path, capsys):
    both = ("--model", folder / "gpt", "--prompts", folder / "prompts.jsonl", "--draft-model", folder / "qwen")
    settings = ("--temperature", temperature, "--out", tmp_path, "--batch-size", 3, "--num-draft-tokens", 4)
    code, shown = run_eval(capsys, *both, *settings)
    report = json.loads((tmp_path / "report.json").read_text())
    assert code == 0 and report["lossless"]["passed"] and report["method"] == "draft_model"
    assert report["draft_acceptance_rate"] > (0.3 if temperature else 0.7)
    assert "has another tokenizer, found id " in shown and "it drafts through text" in shown


def refused(capsys, folder: Path, *arguments: object) -> str:
    shared = ("--model", folder / "gpt", "--prompts", folder / "prompts.jsonl", "--out", folder / "nowhere")
    code, shown = run_eval(capsys, *shared, *arguments)
    assert code == 2 and "Traceback" not in shown
    return shown.rpartition("spectrain: error: ")[2]


def test_draft_models_that_do_not_serve_are_refused_in_one_line(folder: Path, tmp_path: Path, capsys):
    draft = ("--draft-model", folder / "qwen")
    for arguments, expected in (
        (("--draft-model", tmp_path), f"--draft-model must be a model's folder, found no config.json in {tmp_path}"),
        ((*draft, "--head", folder / "gpt"), "one of --head and --draft-model drafts"),
        ((*draft, "--draft-sampling", "probabilistic"), "drafts its likeliest text, found --draft-sampling"),
        ((*draft, "--method", "pard"), "must share one tokenizer, found id 0"),
        ((*draft, "--method", "ngram"), "drafts need no head"),
    ):
        assert expected in refused(capsys, folder, *arguments), arguments
    reciter("qwen").save_pretrained(tmp_path / "bare")
    shown = refused(capsys, folder, "--draft-model", tmp_path / "bare")
    assert f"found no tokenizer in {tmp_path / 'bare'}; copy its own into it" in shown
    tokenizer().save_pretrained(tmp_path / "bare")
    shown = refused(capsys, folder, "--draft-model", tmp_path / "bare")
    assert "do not share one tokenizer" in shown and "needs byte-level or metaspace tokenizers" in shown


@pytest.mark.parametrize("option", ["--tensor-parallel-size", "--draft-tensor-parallel-size"])
def test_tensor_parallelism_is_refused_by_name(folder: Path, option: str, tmp_path: Path, capsys):
    shown = refused(capsys, folder, "--method", "none", option, "2")
    assert shown.startswith("tensor parallelism is not supported") and f"found {option} 2" in shown
    shared = ("--model", folder / "gpt", "--prompts", folder / "prompts.jsonl", "--out", tmp_path)
    assert run_eval(capsys, *shared, "--method", "none", option, "1")[0] == 0


def test_a_head_of_the_models_own_rows_is_what_the_model_says(tmp_path: Path):
    """The draft model's logits over the tokens both know are the library's."""
    target = Target.from_model(rand_llama(2, vocab_size=256), tokenizer())
    small = rand_llama(2, seed=7, vocab_size=250)
    head = as_draft(small, tmp_path, target).head
    assert isinstance(head, DraftModel)
    states = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    expected = small.get_output_embeddings()(states)[:, :240]
    torch.testing.assert_close(head.logits(states, target.tensors()), expected)
