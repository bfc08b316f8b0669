"""Text the target wrote itself: seeded by row, written in whole chunks, extracted as the very ids."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spectrain.extract.generation import GenerationSettings, TextWriter
from spectrain.extract.plan import ExtractionError, plan_extraction
from spectrain.infer.engine import Engine
from spectrain.infer.prompts import load_prompts
from spectrain.infer.target import Target
from spectrain.tests.models import rand_llama, succ_llama

WordLevel = Callable[..., Any]


def settings(**changes: Any) -> GenerationSettings:
    return GenerationSettings(**{"max_new_tokens": 4, "max_length": 40, "chunk_rows": 3, **changes})


def prompts_of(folder: Path, tokenizer: Any, count: int = 7) -> Any:
    path = folder / "prompts.jsonl"
    letters = "abcdefghijklm"
    path.write_text("".join(json.dumps({"prompt": letters[i]}) + "\n" for i in range(count)))
    return load_prompts([path], tokenizer)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]


def write(target: Target, folder: Path, prompts: Any, **changes: Any) -> int:
    writer = TextWriter(target, folder, settings(**changes))
    writer.begin(prompts)
    return writer.write(writer.chunks(prompts))


def test_greedy_answers_and_their_extraction(word_level: WordLevel, plain_template: str, tmp_path: Path) -> None:
    tokenizer = word_level(plain_template)
    target = Target.from_model(succ_llama(), tokenizer)
    prompts = prompts_of(tmp_path, tokenizer)
    assert write(target, tmp_path / "text", prompts) == 3
    found = rows(tmp_path / "text")
    assert [row["index"] for row in found] == list(range(7))
    assert all(row["token_ids"] == [6, 7, 8, 9] for row in found)  # each id is the one before plus one; the header is 5
    assert found[0]["messages"] == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<e> a b c"}]
    plan = plan_extraction(
        sorted((tmp_path / "text").glob("*.jsonl")), tokenizer, shard_tokens=99, max_length=40, vocab_size=41
    )
    assert plan.on_policy and len(plan.rows) == 7
    for row, prompt in zip(plan.rows, prompts, strict=True):
        assert row.token_ids.tolist() == [*prompt.token_ids, 6, 7, 8, 9]
        assert row.loss_mask.tolist() == [False] * len(prompt.token_ids) + [True] * 4
    other = word_level(plain_template, end="<e>")
    other.add_tokens(["new"])
    again = plan_extraction(
        sorted((tmp_path / "text").glob("*.jsonl")), other, shard_tokens=99, max_length=40, vocab_size=41
    )
    assert not again.on_policy  # another tokenizer reads the messages, never foreign ids


def test_no_chunk_finds_rows_that_an_earlier_one_computed(
    word_level: WordLevel, plain_template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run has no earlier chunks in its cache, and must round as an unbroken one does."""
    tokenizer = word_level(plain_template)
    target = Target.from_model(rand_llama(eos_token_id=None), tokenizer)
    (tmp_path / "prompts.jsonl").write_text(7 * (json.dumps({"prompt": "a " * 20}) + "\n"))
    generate, hits = Engine.generate, []

    def one_by_one(engine: Engine, prompts: Any, params: Any, on_finish: Any) -> Any:
        outputs = [generate(engine, [p], [q], on_finish)[0] for p, q in zip(prompts, params, strict=True)]
        hits.append(engine.statistics.cache_hits)
        return outputs

    monkeypatch.setattr(Engine, "generate", one_by_one)
    write(target, tmp_path / "text", load_prompts([tmp_path / "prompts.jsonl"], tokenizer))
    assert hits == [2, 4, 4]  # chunks of 3, 3 and 1: the first of each finds nothing


def test_text_goes_on_after_the_last_whole_chunk(word_level: WordLevel, plain_template: str, tmp_path: Path) -> None:
    tokenizer = word_level(plain_template)
    target = Target.from_model(rand_llama(eos_token_id=None), tokenizer)
    prompts = prompts_of(tmp_path, tokenizer)
    sampled: dict[str, Any] = {"temperature": 1.0, "seed": 5}
    write(target, tmp_path / "whole", prompts, **sampled)
    write(target, tmp_path / "resumed", prompts, **sampled)
    (tmp_path / "resumed" / "text-00001.jsonl").unlink()
    (tmp_path / "resumed" / "text-00002.jsonl.tmp").write_text("half")
    assert write(target, tmp_path / "resumed", prompts, **sampled) == 1
    assert write(target, tmp_path / "resumed", prompts, **sampled) == 0
    assert {p.name: p.read_bytes() for p in (tmp_path / "resumed").iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "whole").iterdir()
    }


def test_each_row_has_its_own_seed(word_level: WordLevel, plain_template: str, tmp_path: Path) -> None:
    tokenizer = word_level(plain_template)
    target = Target.from_model(rand_llama(eos_token_id=None), tokenizer)
    prompts = prompts_of(tmp_path, tokenizer)
    write(target, tmp_path / "a", prompts, temperature=1.0, chunk_rows=3)
    write(target, tmp_path / "b", prompts, temperature=1.0, chunk_rows=5)
    write(target, tmp_path / "c", prompts, temperature=1.0, seed=1)
    a, b, c = ([row["token_ids"] for row in rows(tmp_path / name)] for name in "abc")
    assert a == b != c
    path = tmp_path / "same.jsonl"
    path.write_text('{"prompt": "a"}\n' * 6)
    write(target, tmp_path / "d", load_prompts([path], tokenizer), temperature=1.0, max_new_tokens=8)
    assert len({tuple(row["token_ids"]) for row in rows(tmp_path / "d")}) > 1


def test_other_settings_and_lengths(word_level: WordLevel, plain_template: str, tmp_path: Path) -> None:
    tokenizer = word_level(plain_template)
    target = Target.from_model(succ_llama(), tokenizer)
    prompts = prompts_of(tmp_path, tokenizer, 2)
    write(target, tmp_path / "text", prompts, max_length=7)
    assert [len(row["token_ids"]) for row in rows(tmp_path / "text")] == [2, 2]  # the context is full
    with pytest.raises(ExtractionError, match="begun with another max new tokens .found 4, now 5."):
        write(target, tmp_path / "text", prompts, max_length=7, max_new_tokens=5)
    with pytest.raises(ExtractionError, match="--generate takes the longest answer"):
        settings(max_new_tokens=0)
