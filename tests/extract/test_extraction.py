"""Stored states are the target's own, and a folder is whole, refused or resumed to the same bytes."""

import json
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from spectrain.extract.extraction import Extraction, check_folder, clear_folder
from spectrain.extract.manifest import ShardEntry
from spectrain.extract.plan import ExtractionError, plan_extraction
from spectrain.extract.shards import ShardError, ShardSet
from spectrain.extract.states import StateExtractor
from spectrain.infer.target import Target, TargetError
from spectrain.tests.extraction_runs import LENGTHS, digests, plan_of, rows_of, settings
from spectrain.tests.models import TARGETS, lone_forward, nemotron_h, qwen3_next, rand_llama


@pytest.fixture(scope="module")
def llama() -> Target:
    return Target.from_model(rand_llama())


FAMILIES = {**TARGETS, "qwen3_next": qwen3_next, "nemotron_h": nemotron_h}


@pytest.mark.parametrize("family", FAMILIES)
def test_states_equal_the_librarys_own(family: str) -> None:
    rows = rows_of(LENGTHS)
    oracle = FAMILIES[family]()
    expected = [lone_forward(oracle, row.token_ids.astype(np.int64).tolist()) for row in rows]
    target = Target.from_model(FAMILIES[family]())
    every = tuple(range(target.num_layers + 1))
    for batch_tokens, order in ((7, 1), (24, -1), (4096, 1)):
        extractor = StateExtractor(target, every, batch_tokens, target.max_length)
        documents = extractor.documents(rows[::order])[::order]
        for document, row, (logits, states) in zip(documents, rows, expected, strict=True):
            assert document.token_ids.tolist() == row.token_ids.tolist()
            torch.testing.assert_close(document.hidden_states, torch.stack(states, 1), rtol=1e-4, atol=1e-4)
            tops = torch.where(torch.from_numpy(np.append(row.loss_mask[1:], False)), logits.argmax(-1), -1)
            assert document.target_argmax.tolist() == tops.tolist()


def test_shared_prefixes_and_repeats_keep_all_their_rows(llama: Target) -> None:
    first, second = rows_of((15, 14))
    second.token_ids[:10] = first.token_ids[:10]
    extractor = StateExtractor(llama, (1, 6), 64, 63)
    documents = extractor.documents([first, second, first])
    assert [len(d.token_ids) for d in documents] == [len(d.hidden_states) for d in documents] == [15, 14, 15]
    torch.testing.assert_close(documents[0].hidden_states, documents[2].hidden_states, rtol=1e-5, atol=1e-6)
    again = extractor.documents([first, second, first])
    assert all(torch.equal(d.hidden_states, e.hidden_states) for d, e in zip(documents, again, strict=True))
    assert extractor.engine.statistics.cached_prompt_tokens == 0


def test_extraction_never_asks_the_library_for_hidden_states(llama: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = type(llama.model).forward

    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("output_hidden_states") or self.config.output_hidden_states:
            raise RuntimeError("hidden states asked of the library")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(llama.model), "forward", guarded)
    assert len(StateExtractor(llama, (6,), 64, 63).documents(rows_of((5,)))) == 1


def test_the_shard_alone_gives_the_targets_logits(llama: Target, tmp_path: Path) -> None:
    rows = rows_of(LENGTHS)
    Extraction(llama, plan_of([rows[:4], rows[4:]]), tmp_path, settings()).run()
    shards = ShardSet.open([tmp_path])
    assert shards.manifest.layer_ids == (0, 2, 3, 6) and not shards.manifest.final_state_normed
    oracle, tensors = rand_llama(), shards.target_tensors()
    counts = torch.zeros(97, dtype=torch.int64)
    for index, row in enumerate(rows):
        document = shards.document(index)
        logits, states = lone_forward(oracle, row.token_ids.astype(np.int64).tolist())
        rebuilt = tensors.logits(document.hidden_states[:, -1])
        assert (rebuilt.argmax(-1) == logits.argmax(-1)).all()
        torch.testing.assert_close(document.hidden_states[:, 1], states[2], rtol=1e-4, atol=1e-5)
        assert document.source_row == row.source_row
        assert document.loss_mask.tolist() == row.loss_mask.tolist()
        counts += torch.bincount(document.token_ids[document.loss_mask].long(), minlength=97)
    assert shards.token_counts().tolist() == counts.tolist()
    assert shards.supervised_tokens == int(counts.sum())
    shards.verify()


def test_the_target_folder_stands_alone_and_names_no_path(tmp_path: Path, word_level: Any, plain_template: str) -> None:
    model = tmp_path / "secret-place" / "tiny"
    rand_llama().save_pretrained(model)
    word_level(plain_template).save_pretrained(model)
    target = Target.load(model, dtype=torch.float32)
    Extraction(target, plan_of([rows_of((5, 6))]), tmp_path / "out", settings()).run()
    for path in (tmp_path / "out").rglob("*"):
        assert path.is_dir() or b"secret-place" not in path.read_bytes(), path
    from transformers import AutoConfig, AutoTokenizer

    assert AutoConfig.from_pretrained(tmp_path / "out" / "target").num_hidden_layers == 6
    assert AutoTokenizer.from_pretrained(tmp_path / "out" / "target").chat_template == plain_template


def test_a_head_that_is_not_understood_stops_the_run(llama: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    extractor = StateExtractor(llama, (6,), 64, 63)
    tensors = extractor.tensors
    for broken in (
        SimpleNamespace(logits=tensors.logits_of_normed),  # the final norm left out
        SimpleNamespace(logits=lambda states: tensors.logits(tensors.norm(states))),  # and applied twice
    ):
        monkeypatch.setattr(extractor, "tensors", broken)
        with pytest.raises(ExtractionError, match=r"rows.jsonl:0: logits rebuilt from the stored states"):
            extractor.documents(rows_of((9,)))


def test_states_that_are_not_finite_stop_the_run_and_keep_the_shards_before(tmp_path: Path) -> None:
    model = rand_llama()
    rows = rows_of((5, 6, 7))
    for row in rows:
        row.token_ids[row.token_ids == 96] = 1
    target = Target.from_model(model)
    model.model.embed_tokens.weight.data[96] = torch.inf
    rows[2].token_ids[2] = 96
    extraction = Extraction(target, plan_of([[row] for row in rows]), tmp_path, settings())
    with pytest.raises(ExtractionError, match=r"rows.jsonl:2: hidden states must be finite.*--dtype float32"):
        extraction.run()
    assert not (tmp_path / "manifest.json").exists()
    assert extraction.writer.finished(0) is not None and extraction.writer.finished(2) is None
    assert not list(tmp_path.glob("*.tmp"))


def test_packing_does_not_depend_on_free_memory(llama: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    for free in (8 * 10**6, 10**12):  # the first holds the cache, but four fifths of it would not
        monkeypatch.setattr("spectrain.infer.engine.free_memory", lambda device, free=free: free)
        sizes.append(StateExtractor(llama, (6,), 64, 63).engine.pool.num_blocks)
    assert sizes[0] == sizes[1]


def test_a_single_value_that_is_not_finite_is_found(llama: Target) -> None:
    extractor = StateExtractor(llama, (2, 6), 64, 63)
    proposer: Any = extractor.engine.proposer
    finish = proposer.on_finish

    def poisoned(request_id: int, states: torch.Tensor) -> None:
        states[-1, 0, 5] = torch.nan
        finish(request_id, states)

    proposer.on_finish = poisoned
    with pytest.raises(ExtractionError, match="rows.jsonl:0: hidden states must be finite"):
        extractor.documents(rows_of((9,)))


def test_resume_repairs_what_is_damaged_and_nothing_else(llama: Target, tmp_path: Path) -> None:
    rows = rows_of((5, 6, 7, 8, 9, 10))
    plan = plan_of([rows[:2], rows[2:4], rows[4:]])

    def run() -> int:
        check_folder(tmp_path, resume=True, overwrite=False)
        return Extraction(llama, plan, tmp_path, settings()).run()[1]

    assert run() == 3
    whole = digests(tmp_path)
    shard = tmp_path / "shard-00001.safetensors"
    original = shard.read_bytes()
    state_flipped, mask_flipped = bytearray(original), bytearray(original)
    state_flipped[len(original) // 2] ^= 1
    mask_flipped[-3] ^= 1
    stamps = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("shard-*")}
    damages = [
        b"",
        original[:8],
        original[: len(original) // 2],
        original[:-1],
        original + b"xx",
        bytes(state_flipped),
        None,
    ]
    for damage in damages:
        shard.unlink()
        if damage is not None:
            shard.write_bytes(damage)
        (tmp_path / "shard-00002.safetensors.tmp").write_bytes(b"half")
        assert run() == 1
        assert digests(tmp_path) == whole
    shard.write_bytes(mask_flipped)
    (tmp_path / "manifest.json").unlink()  # no hash is left to compare with, the plan still is
    assert run() == 1 and digests(tmp_path) == whole
    assert run() == 0 and digests(tmp_path) == whole
    assert {p.name: p.stat().st_mtime_ns for p in tmp_path.glob("shard-*") if p != shard} == {
        name: stamp for name, stamp in stamps.items() if name != shard.name
    }


def test_bytes_do_not_depend_on_what_ran_before(llama: Target, tmp_path: Path) -> None:
    rows = rows_of(LENGTHS)
    plan = plan_of([rows[:3], rows[3:6], rows[6:]])
    Extraction(llama, plan, tmp_path / "unbroken", settings()).run()
    for index in (2, 0, 1):
        (tmp_path / f"only-{index}").mkdir()
        extraction = Extraction(llama, plan, tmp_path / f"only-{index}", settings())
        entry = extraction.writer.write(index, extraction.extractor.documents(plan.shards[index]))
        name = entry.file
        assert (tmp_path / f"only-{index}" / name).read_bytes() == (tmp_path / "unbroken" / name).read_bytes()


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"layer_ids": (1,)}, "layer ids"),
        ({"batch_tokens": 25}, "batch tokens"),
        ({"shard_tokens": 9}, "shard tokens"),
        ({"max_length": 62}, "max length"),
    ],
)
def test_resuming_with_other_settings_is_refused(
    llama: Target, tmp_path: Path, changes: dict[str, Any], word: str
) -> None:
    plan = plan_of([rows_of((5, 6))])
    Extraction(llama, plan, tmp_path, settings()).run()
    before = digests(tmp_path)
    with pytest.raises(ExtractionError, match=f"begun with another {word}.*--overwrite"):
        Extraction(llama, plan, tmp_path, settings(**changes)).run()
    assert digests(tmp_path) == before


def test_resuming_with_other_data_or_weights_is_refused(llama: Target, tmp_path: Path) -> None:
    Extraction(llama, plan_of([rows_of((5, 6))]), tmp_path, settings()).run()
    with pytest.raises(ExtractionError, match="begun with another data"):
        Extraction(llama, plan_of([rows_of((5, 6), seed=1)]), tmp_path, settings()).run()
    other = Target.from_model(rand_llama(seed=1))
    with pytest.raises(ExtractionError, match="begun with another target fingerprint"):
        Extraction(other, plan_of([rows_of((5, 6))]), tmp_path, settings()).run()


def test_an_existing_folder_needs_a_decision(llama: Target, tmp_path: Path) -> None:
    check_folder(tmp_path, resume=False, overwrite=False)
    (tmp_path / "mine.txt").write_text("kept")
    Extraction(llama, plan_of([rows_of((5,)), rows_of((6,))]), tmp_path, settings()).run()
    with pytest.raises(ExtractionError, match="pass --resume, --overwrite or another --out"):
        check_folder(tmp_path, resume=False, overwrite=False)
    with pytest.raises(ExtractionError, match="found both"):
        check_folder(tmp_path, resume=True, overwrite=True)
    check_folder(tmp_path, resume=False, overwrite=True)
    assert len(list(tmp_path.iterdir())) > 1, "looking removes nothing"
    clear_folder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_disk_too_small_is_refused_before_the_first_byte(
    llama: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extraction = Extraction(llama, plan_of([rows_of((5, 6))]), tmp_path, settings())
    need = extraction.need()
    assert need.bytes_per_token == 4 * 32 * 4 + 9 and need.tokens == 11
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=need.total - 1))
    with pytest.raises(ExtractionError, match="the states need .* GB free; lower --max-tokens"):
        extraction.run()
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=need.total))
    assert extraction.run()[1] == 1
    written = sum(path.stat().st_size for path in tmp_path.glob("shard-*"))
    assert abs(written - need.bytes_per_token * need.tokens) < 1000


def test_a_disk_that_fills_up_keeps_the_finished_shards(
    llama: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spectrain.extract import shards

    plan = plan_of([rows_of((5,)), rows_of((6,)), rows_of((7,))])
    save_file, calls = shards.save_file, []

    def full(tensors: Any, path: Any, *args: Any) -> None:
        calls.append(path)
        if len(calls) == 3:
            Path(path).write_bytes(b"part")
            raise OSError(28, "No space left on device")
        save_file(tensors, path, *args)

    monkeypatch.setattr(shards, "save_file", full)
    with pytest.raises(ShardError, match="No space left on device.*finished shards are kept"):
        Extraction(llama, plan, tmp_path, settings()).run()
    assert sorted(path.name for path in tmp_path.glob("shard-*")) == [f"shard-0000{i}.safetensors" for i in (0, 1)]
    monkeypatch.setattr(shards, "save_file", save_file)
    assert Extraction(llama, plan, tmp_path, settings()).run()[1] == 1


def test_layers_the_target_has_not_are_refused(llama: Target, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="layer ids must lie between 0 .* and 6"):
        Extraction(llama, plan_of([rows_of((5,))]), tmp_path, settings(layer_ids=(2, 7)))
    with pytest.raises(ExtractionError, match="--batch-tokens must be at least 1"):
        settings(batch_tokens=0)


def test_two_workers_write_the_bytes_of_one(tmp_path: Path) -> None:
    rows = rows_of(LENGTHS)
    plan = plan_of([rows[:2], rows[2:4], rows[4:5], rows[5:7], rows[7:]])
    Extraction(Target.from_model(rand_llama()), plan, tmp_path / "one", settings()).run()
    barrier, shared = threading.Barrier(2), []

    class Pair:
        def __init__(self, rank: int) -> None:
            self.rank, self.world_size = rank, 2

        def wait(self) -> None:
            barrier.wait(60)

        def gather(self, entries: list[tuple[int, ShardEntry]]) -> list[tuple[int, ShardEntry]]:
            shared.extend(entries)
            barrier.wait(60)
            return list(shared)

    (tmp_path / "two").mkdir()
    parts = [
        Extraction(Target.from_model(rand_llama()), plan, tmp_path / "two", settings(), workers=Pair(rank))
        for rank in range(2)
    ]
    written: dict[int, int] = {}
    threads = [
        threading.Thread(target=lambda part=part: written.update({part.workers.rank: part.run()[1]})) for part in parts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert written == {0: 3, 1: 2}
    assert digests(tmp_path / "one") == digests(tmp_path / "two")


def test_rows_are_divided_in_input_order(tmp_path: Path, word_level: Any, plain_template: str) -> None:
    path = tmp_path / "rows.jsonl"
    chats = [[("user", "a " * n), ("assistant", "b " * n)] for n in (1, 2, 3, 4, 5, 6)]
    rows = [{"messages": [{"role": role, "content": content} for role, content in chat]} for chat in chats]
    rows.insert(2, {"messages": []})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options: dict[str, Any] = {"max_length": 60, "vocab_size": 97}
    tokenizer = word_level(plain_template)
    plan = plan_extraction([path], tokenizer, shard_tokens=20, **options)
    lengths = [[len(row.token_ids) for row in shard] for shard in plan.shards]
    assert lengths == [[7, 9], [11], [13], [15], [17]]
    assert [row.source_row for row in plan.rows] == [0, 1, 3, 4, 5, 6]
    assert plan.counts.rows == 7 and plan.tokens == sum(map(sum, lengths))
    few = plan_extraction([path], tokenizer, shard_tokens=20, max_tokens=30, limit=6, **options)
    assert [row.source_row for row in few.rows] == [0, 1, 3]
    assert few.counts.kept == 3 and few.counts.dropped.total() == 1
    one = plan_extraction([path], tokenizer, shard_tokens=1, **options)
    assert [len(shard) for shard in one.shards] == [1] * 6
    assert one.content_hash() != plan.content_hash()
    cut = plan_extraction([path], tokenizer, shard_tokens=20, **{**options, "max_length": 8})
    assert {reason: count for reason, count in cut.counts.dropped.items() if "max-length" in reason} == {
        "no supervised token within --max-length": 3
    }
    with pytest.raises(ExtractionError, match="found none .*no supervised token within --max-length"):
        plan_extraction([path], tokenizer, shard_tokens=20, **{**options, "max_length": 2})
    with pytest.raises(ExtractionError, match="beyond the target's vocabulary of 5"):
        plan_extraction([path], tokenizer, shard_tokens=20, max_length=60, vocab_size=5)
