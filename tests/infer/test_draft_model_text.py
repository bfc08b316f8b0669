"""Draft models of another tokenizer in the engine: lossless, kept when right, the same drafts whatever the batch."""

import copy
import dataclasses
from collections import Counter
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from spectrain.heads.draft_model import DraftModel, DraftModelConfig
from spectrain.heads.model_folder import ModelFolder
from spectrain.infer.config import EngineConfig
from spectrain.infer.engine import Engine
from spectrain.infer.proposers.draft_model_text import TextDraftModelProposer
from spectrain.infer.proposers.hybrid import HybridProposer
from spectrain.infer.proposers.none import NoneProposer
from spectrain.infer.proposers.suffix import SuffixProposer
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.target import Target
from spectrain.infer.token_text import TokenText
from spectrain.infer.translation import Reading, Translation
from spectrain.tests.infer import test_engine_law as law
from spectrain.tests.infer.proposers import keep_drafts
from spectrain.tests.models import build, rand_llama
from spectrain.tests.reciters import reciter
from spectrain.tests.suffix_package import NEEDS_SUFFIX
from spectrain.tests.text_tokenizers import LINES, TOKENIZERS

K = 4
CONFIG = EngineConfig(num_draft_tokens=K, num_blocks=300, block_size=4, max_batch_tokens=64, max_batch_size=8)
GREEDY = SamplingParams(max_tokens=40)
DRAFTS = ["llama", "qwen", "unigram", "gpt"]


def text_of(name: str) -> TokenText:
    return TokenText(TOKENIZERS[name](), name)


def loaded(model: PreTrainedModel, folder: Path, **settings) -> DraftModel:
    """A model as the commands load it for drafting through text."""
    model.save_pretrained(folder)
    found = ModelFolder(folder)
    config = DraftModelConfig.derive_from(found.facts, {"num_layers": found.facts.num_layers, **settings}, found)
    head = DraftModel(config.served_as_it_is(found.facts.vocab_size, found.facts.vocab_size))
    head.start_from(found)
    return head


def proposer(target: Target, head: DraftModel, between: Translation, config: EngineConfig = CONFIG):
    return TextDraftModelProposer(
        head,
        target.tensors(),
        between,
        config.num_draft_tokens,
        max_batch_size=config.max_batch_size,
        max_length=target.max_length,
    )


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.from_model(reciter("gpt"), TOKENIZERS["gpt"]())


def prompts() -> list[list[int]]:
    encode = TOKENIZERS["gpt"]()
    beginnings = [" ".join(line.split(" ")[:count]) for line in LINES for count in (1, 3, 5)]
    return [encode(text)["input_ids"] for text in beginnings]


@pytest.fixture(scope="module")
def plain(target: Target) -> list[list[int]]:
    config = dataclasses.replace(CONFIG, num_draft_tokens=0)
    return [o.token_ids for o in Engine(target, NoneProposer(), config).generate(prompts(), GREEDY)]


@pytest.mark.parametrize("name", DRAFTS)
def test_a_draft_model_that_knows_the_text_is_believed(target, plain, name: str, tmp_path: Path):
    """Other pieces, other characters known, other markers: what both say alike is kept."""
    between = Translation(text_of("gpt"), text_of(name))
    engine = Engine(target, proposer(target, loaded(reciter(name), tmp_path), between), CONFIG)
    assert [o.token_ids for o in engine.generate(prompts(), GREEDY)] == plain
    # the last of k drafts may be a token cut short, where the draft model's pieces are the smaller ones
    rates = engine.statistics.acceptance_by_position
    assert rates[0] > 0.8 and engine.statistics.draft_acceptance_rate > (0.9 if name == "gpt" else 0.7)


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen", marks=pytest.mark.slow)])
def test_drafts_are_those_of_transformers_whatever_batch_or_preemptions(name: str, tmp_path: Path):
    """A random target, whose text is halves of characters and markers anywhere; the cache must hold what was read."""
    target = Target.from_model(rand_llama(3, vocab_size=332, max_position_embeddings=128), TOKENIZERS["gpt"]())
    draft = reciter(name)
    between = Translation(text_of("gpt"), text_of(name))
    given = [prompt[:9] for prompt in prompts()[::2]]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    texts: list[list[int]] = []
    found: list[dict[tuple[int, int], list[int]]] = []
    for changes in ({}, {"max_batch_size": 1}, {"num_blocks": 25}, {"launch_ahead": True}):
        config = dataclasses.replace(CONFIG, **changes)
        made = proposer(target, loaded(draft, tmp_path), between, config)
        drafts = keep_drafts(made)
        engine = Engine(target, made, config)
        outputs = [o.token_ids for o in engine.generate(given, params)]
        texts = texts or [prompt + output for prompt, output in zip(given, outputs, strict=True)]
        assert [prompt + output for prompt, output in zip(given, outputs, strict=True)] == texts
        assert (engine.statistics.num_preemptions > 0) == ("num_blocks" in changes)
        assert not made._texts, "a request that left was not released"
        found.append(dict(drafts))
    plain = Engine(target, NoneProposer(), dataclasses.replace(CONFIG, num_draft_tokens=0)).generate(given, params)
    assert [given[i] + plain[i].token_ids for i in range(len(given))] == texts
    compared = 0
    for run, drafts in enumerate(found):
        for (request, length), tokens in drafts.items():
            known = texts[request][:length]
            if run == 0 and length % 3 == 0 and length + K < len(texts[request]):
                assert tokens == reference_drafts(draft, between, known, K)
                compared += len(tokens)
            elif run and length % 7 == 0 and tokens:
                # blocks may leave room for fewer; what was written last is then cut otherwise
                assert tokens in [reference_drafts(draft, between, known, k) for k in {K, len(tokens)}]
                compared += len(tokens)
    assert compared > 60


@torch.no_grad()
def reference_drafts(model: PreTrainedModel, between: Translation, known: list[int], k: int) -> list[int]:
    """The same drafts, everything read and computed from the start for each token."""
    reading = Reading(between)
    reading.extend(known)
    written: list[int] = []
    drafts: list[int] = []
    while len(drafts) < k and len(written) < 2 * k:
        logits = model(input_ids=torch.tensor([[*reading.token_ids, *written]]), use_cache=False).logits[0, -1]
        allowed = reading.allowed(written)
        token = int(logits.argmax()) if allowed is None else allowed[int(logits[allowed].argmax())]
        if reading.ends(token):
            break
        written.append(token)
        drafts = reading.continued(written)
    return drafts[:k]


def beginnings_within_characters() -> list[list[int]]:
    """A line cut within each of its characters of several tokens."""
    ids, gpt = TOKENIZERS["gpt"]()(LINES[2])["input_ids"], text_of("gpt")
    return [ids[:n] for n in range(1, len(ids)) if not _decodes(gpt.text(ids[:n]))]


def _decodes(text: bytes) -> bool:
    try:
        return bool(text.decode())
    except UnicodeDecodeError:
        return False


def test_a_character_that_a_text_ends_within_is_drafted_to_its_end(target, tmp_path: Path):
    begun = beginnings_within_characters()
    between = Translation(text_of("gpt"), text_of("qwen"))
    made = proposer(target, loaded(reciter("qwen"), tmp_path), between)
    drafts = keep_drafts(made)
    Engine(target, made, CONFIG).generate([ids[:-1] for ids in begun], SamplingParams(max_tokens=6))
    line = TOKENIZERS["gpt"]()(LINES[2])["input_ids"]
    assert len(begun) > 10
    for request, ids in enumerate(begun):
        assert drafts[request, len(ids)][:2] == line[len(ids) : len(ids) + 2]


def test_the_first_token_of_a_draft_ends_the_character_whatever_the_model_likes(target, tmp_path: Path):
    random = rand_llama(1, vocab_size=text_of("qwen").num_ids, max_position_embeddings=128)
    made = proposer(target, loaded(random, tmp_path), Translation(text_of("gpt"), text_of("qwen")))
    write, seen = made._write, []

    def check(texts, wanted) -> None:
        write(texts, wanted)
        seen.extend((text.drafted, text.reading.allowed([])) for text in texts if text.reading.pending)

    made._write = check
    Engine(target, made, CONFIG).generate(beginnings_within_characters(), SamplingParams(max_tokens=6))
    assert len(seen) > 5 and all(drafted[0] in allowed for drafted, allowed in seen if drafted)
    assert any(drafted for drafted, _ in seen)


def test_long_texts_are_read_in_several_forwards(target, plain, tmp_path: Path, monkeypatch):
    between, head = Translation(text_of("gpt"), text_of("llama")), loaded(reciter("llama"), tmp_path)
    seen = []
    for tokens in (4096, 7):
        monkeypatch.setattr("spectrain.infer.proposers.draft_model_text.STEP_TOKENS", tokens)
        made = proposer(target, head, between)
        drafts = keep_drafts(made)
        assert [o.token_ids for o in Engine(target, made, CONFIG).generate(prompts(), GREEDY)] == plain
        seen.append(dict(drafts))
    assert seen[0] == seen[1]


def test_text_that_both_read_alike_is_computed_once(target, tmp_path: Path):
    """Of a text that grew only its end is computed again; each step but the first takes a few rows."""
    between = Translation(text_of("gpt"), text_of("qwen"))
    made = proposer(target, loaded(reciter("qwen"), tmp_path), between)
    rows: list[int] = []
    batch = made._batch

    def count(spans):
        rows.append(sum(len(span.token_ids) - span.start for span in spans))
        return batch(spans)

    made._batch = count
    Engine(target, made, CONFIG).generate([prompts()[1]], GREEDY)
    assert rows[0] > 10 and max(rows[1:]) <= 4 and len(rows) > 10


def test_past_the_draft_models_positions_nothing_is_drafted(target, plain, tmp_path: Path):
    between = Translation(text_of("gpt"), text_of("qwen"))
    head = loaded(reciter("qwen"), tmp_path, max_position_embeddings=30)
    made = proposer(target, head, between)
    drafts = keep_drafts(made)
    engine = Engine(target, made, CONFIG)
    assert [o.token_ids for o in engine.generate(prompts(), GREEDY)] == plain
    reached = 0
    for (request, length), tokens in drafts.items():
        reading = Reading(between)
        reading.extend((prompts()[request] + plain[request])[:length])
        assert not tokens or len(reading.token_ids) <= 30
        reached = max(reached, len(reading.token_ids) if tokens else 0)
    assert reached > 26 and engine.statistics.num_decode_steps > 0


@NEEDS_SUFFIX
def test_it_serves_beside_suffix_trees(target, plain, tmp_path: Path):
    between = Translation(text_of("gpt"), text_of("qwen"))
    head = proposer(target, loaded(reciter("qwen"), tmp_path), between)
    engine = Engine(target, HybridProposer(SuffixProposer(K), head), CONFIG)
    assert [o.token_ids for o in engine.generate(prompts(), GREEDY)] == plain
    assert engine.statistics.accepted_tokens > 0


def letters(pieces: list[str], merges: list[tuple[str, str]]) -> TokenText:
    made = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>"))
    made.add_special_tokens(["<unk>"])
    made.decoder = decoders.ByteLevel()
    return TokenText(PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>"), "letters")


def test_sampled_output_follows_the_targets_law(tmp_path: Path):
    """Five tokens, and a draft model that writes two letters at a time."""
    target = Target.from_model(law.model())
    ours = letters(["<unk>", *"abcd"], [])
    theirs = letters(["<unk>", *"abcd", "ab", "cd", "da"], [("a", "b"), ("c", "d"), ("d", "a")])
    model = build("Llama", seed=5, std=0.4, **{**law.COMMON, "num_hidden_layers": 2, "vocab_size": 8})
    made = proposer(target, loaded(model, tmp_path), Translation(ours, theirs), law.CONFIG)
    engine, samples = Engine(target, made, law.CONFIG), 1500
    each = [SamplingParams(max_tokens=law.DEPTH + 1, seed=i, temperature=1.0) for i in range(samples)]
    outputs = engine.generate([law.PROMPT] * samples, each)
    counts = Counter(tuple(output.token_ids[: law.DEPTH]) for output in outputs)
    assert law.chi_square_p(counts, law.exact_law(each[0]), samples) > 1e-4
    statistics = engine.statistics
    assert 0.03 * statistics.draft_tokens < statistics.accepted_tokens < statistics.draft_tokens


@pytest.mark.gpu
def test_on_a_gpu_it_drafts_beside_recorded_steps(tmp_path: Path):
    """The target's steps are replayed, padded to a size; the draft model runs call by call between them."""
    model = copy.deepcopy(reciter("gpt")).to("cuda")
    target = Target.from_model(model, TOKENIZERS["gpt"]())
    config = dataclasses.replace(CONFIG, block_size=16, max_batch_tokens=256)
    plain = Engine(target, NoneProposer(), dataclasses.replace(config, num_draft_tokens=0)).generate(prompts(), GREEDY)
    head = loaded(reciter("qwen"), tmp_path).to("cuda")
    engine = Engine(target, proposer(target, head, Translation(text_of("gpt"), text_of("qwen"))), config)
    assert [o.token_ids for o in engine.generate(prompts(), GREEDY)] == [o.token_ids for o in plain]
    assert engine.statistics.draft_acceptance_rate > 0.7
