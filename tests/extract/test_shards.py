"""The shard folder: what is written comes back, and what is damaged is named before anything is trained."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from spectrain.extract import manifest as manifest_module
from spectrain.extract.shards import (
    Document,
    Manifest,
    ShardError,
    ShardSet,
    ShardWriter,
    TargetIdentity,
    read_manifest,
    write_manifest,
)
from spectrain.tests.models import rand_llama
from spectrain.tests.shard_folders import LAYERS, random_documents, write_shards

LENGTHS = (9, 17, 12, 25, 8, 14, 21)


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    return random_documents(rand_llama(4), LENGTHS)


@pytest.fixture
def folder(tmp_path: Path, documents: list[Document]) -> Path:
    return write_shards(tmp_path / "shards", documents=documents, per_shard=3)


def edit(folder: Path, field: str, value: object) -> None:
    path = folder / "manifest.json"
    values = json.loads(path.read_text())
    values[field] = value
    path.write_text(json.dumps(values))


def test_documents_come_back_unshifted_across_shards(folder: Path, documents: list[Document]) -> None:
    shards = ShardSet.open([folder])
    assert shards.num_documents == len(LENGTHS) and shards.tokens == sum(LENGTHS)
    assert shards.document_lengths().tolist() == list(LENGTHS)
    for index, written in enumerate(documents):
        read = shards.document(index)
        assert read.source_row == written.source_row
        for name in ("token_ids", "loss_mask", "target_argmax", "hidden_states"):
            assert torch.equal(getattr(read, name), getattr(written, name)), name
        assert read.token_ids.dtype == torch.int32 and read.loss_mask.dtype == torch.bool


def test_a_document_can_be_read_in_part(folder: Path, documents: list[Document]) -> None:
    read = ShardSet.open([folder]).document(3, max_tokens=7)
    assert torch.equal(read.hidden_states, documents[3].hidden_states[:7]) and len(read.token_ids) == 7


def test_folders_are_numbered_one_after_the_other(tmp_path: Path, folder: Path, documents: list[Document]) -> None:
    other = write_shards(tmp_path / "other", documents=documents[:2])
    shards = ShardSet.open([other, folder])
    assert shards.num_documents == 2 + len(LENGTHS)
    assert torch.equal(shards.document(2).token_ids, documents[0].token_ids)
    single = ShardSet.open([folder]).token_counts() + ShardSet.open([other]).token_counts()
    assert torch.equal(shards.token_counts(), single)


def test_tensors_have_the_layout_of_the_format(folder: Path) -> None:
    with safe_open(folder / "shard-00000.safetensors", framework="pt") as file:
        found = {
            name: (file.get_slice(name).get_dtype(), file.get_slice(name).get_shape()) for name in list(file.keys())
        }
    tokens = sum(LENGTHS[:3])
    assert found == {
        "token_ids": ("I32", [tokens]),
        "loss_mask": ("BOOL", [tokens]),
        "target_argmax": ("I32", [tokens]),
        "hidden_states": ("F32", [tokens, len(LAYERS), 32]),
        "cu_seqlens": ("I64", [4]),
        "source_rows": ("I64", [3]),
    }


def test_a_file_holds_its_own_rows_and_no_others(tmp_path: Path, documents: list[Document]) -> None:
    """A slice of a big batch must not drag the batch's storage along."""
    base = torch.randn(1000, len(LAYERS), 32)
    sliced = [d._replace(hidden_states=base[: len(d.token_ids)]) for d in documents]
    writer = ShardWriter(tmp_path, num_layer_ids=len(LAYERS), hidden_size=32, dtype="float32")
    entry = writer.write(0, sliced)
    payload = entry.tokens * (4 + 1 + 4 + len(LAYERS) * 32 * 4) + (len(documents) + 1 + len(documents)) * 8
    assert payload < (tmp_path / entry.file).stat().st_size < payload + 1024


def test_same_documents_give_same_bytes_and_finished_finds_them(tmp_path: Path, documents: list[Document]) -> None:
    writers = [ShardWriter(tmp_path / n, num_layer_ids=len(LAYERS), hidden_size=32, dtype="float32") for n in "ab"]
    first, second = (writer.write(4, documents) for writer in writers)
    assert first == second == writers[0].finished(4) and writers[0].finished(5) is None


def test_bfloat16_is_stored_as_asked(tmp_path: Path, documents: list[Document]) -> None:
    writer = ShardWriter(tmp_path, num_layer_ids=len(LAYERS), hidden_size=32, dtype="bfloat16")
    writer.write(0, documents)
    with safe_open(tmp_path / "shard-00000.safetensors", framework="pt") as file:
        assert file.get_slice("hidden_states").get_dtype() == "BF16"


@pytest.mark.parametrize("damage", ["cut_one", "cut_half", "cut_to_8", "empty", "two_more"])
def test_a_shard_that_is_not_whole_is_named(folder: Path, damage: str) -> None:
    path = folder / "shard-00001.safetensors"
    whole = path.read_bytes()
    kept = {"cut_one": whole[:-1], "cut_half": whole[: len(whole) // 2], "cut_to_8": whole[:8], "empty": b""}
    path.write_bytes(kept.get(damage, whole + b"xx"))
    with pytest.raises(ShardError, match="shard-00001"):
        ShardSet.open([folder])
    writer = ShardWriter(folder, num_layer_ids=len(LAYERS), hidden_size=32, dtype="float32")
    assert writer.finished(1) is None and writer.finished(0) is not None


def test_a_missing_shard_is_named(folder: Path) -> None:
    (folder / "shard-00002.safetensors").unlink()
    with pytest.raises(ShardError, match="shard-00002"):
        ShardSet.open([folder])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format_version", 2),
        ("hidden_size", 64),
        ("layer_ids", [1, 2, 3]),
        ("layer_ids", [4, 3, 2, 1]),
        ("dtype", "float16"),
        ("dtype", "bfloat16"),
        ("final_state_normed", True),
        ("shard", "s"),
    ],
)
def test_a_manifest_that_does_not_fit_its_files_is_refused_by_field(folder: Path, field: str, value: object) -> None:
    edit(folder, field, value)
    expected = "hidden_states" if field in ("hidden_size", "layer_ids") and value != [4, 3, 2, 1] else field
    expected = "hidden_states" if value == "bfloat16" else expected
    with pytest.raises(ShardError, match=expected):
        ShardSet.open([folder])


def test_every_missing_field_is_named(folder: Path) -> None:
    values = read_manifest(folder).to_dict()
    for field in set(values) - {"format_version"}:
        rest = {name: value for name, value in values.items() if name != field}
        if field == "target" or field == "shards":
            rest[field] = [] if field == "target" else ["x"]
        with pytest.raises(ShardError, match=field):
            Manifest.from_dict(rest, folder / "manifest.json")


def test_a_folder_without_manifest_is_unfinished(folder: Path, tmp_path: Path) -> None:
    (folder / "manifest.json").unlink()
    with pytest.raises(ShardError, match="no manifest"):
        ShardSet.open([folder])
    with pytest.raises(ShardError, match="no such folder"):
        ShardSet.open([tmp_path / "nowhere"])
    with pytest.raises(ShardError, match="--shards"):
        ShardSet.open([])


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_an_unreadable_manifest_is_one_line(folder: Path, content: str) -> None:
    (folder / "manifest.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ShardError, match="manifest.json") as error:
        ShardSet.open([folder])
    assert "\n" not in str(error.value)


def test_manifest_survives_json(folder: Path) -> None:
    manifest = read_manifest(folder)
    assert Manifest.from_dict(json.loads(json.dumps(manifest.to_dict())), folder) == manifest
    assert (manifest.documents, manifest.tokens) == (len(LENGTHS), sum(LENGTHS))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokenizer_hash", "t1"),
        ("template_hash", "c1"),
        ("num_layers", 5),
        ("vocab_size", 98),
        ("target", TargetIdentity(name="other", revision="0", fingerprint="f1")),
    ],
)
def test_folders_of_other_targets_or_tokenizers_are_refused(
    tmp_path: Path, folder: Path, documents: list[Document], field: str, value: object
) -> None:
    other = write_shards(tmp_path / "other", documents=documents, changes={field: value})
    with pytest.raises(ShardError, match="fingerprint" if field == "target" else field):
        ShardSet.open([folder, other])


def test_verify_finds_a_flipped_bit(folder: Path) -> None:
    ShardSet.open([folder]).verify()
    path = folder / "shard-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(ShardError, match="sha256"):
        ShardSet.open([folder]).verify()


def test_asked_layers_become_columns_or_an_error(folder: Path) -> None:
    shards = ShardSet.open([folder])
    assert shards.layer_columns((2, 4)) == [1, 3]
    with pytest.raises(ShardError, match=r"captured at layers \(1, 2, 3, 4\).*needs \(0, 2\)"):
        shards.layer_columns((0, 2))


def test_a_refusing_disk_leaves_finished_shards_and_no_rubbish(
    tmp_path: Path, documents: list[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = ShardWriter(tmp_path, num_layer_ids=len(LAYERS), hidden_size=32, dtype="float32")
    writer.write(0, documents)
    before = (tmp_path / "shard-00000.safetensors").read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(manifest_module.os, "fsync", full)
    with pytest.raises(ShardError, match="No space left"):
        writer.write(1, documents)
    with pytest.raises(ShardError, match="No space left"):
        writer.write(0, documents[:1])
    assert os.listdir(tmp_path) == ["shard-00000.safetensors"]
    assert (tmp_path / "shard-00000.safetensors").read_bytes() == before


def test_leftovers_of_a_killed_write_go(tmp_path: Path) -> None:
    (tmp_path / "shard-00000.safetensors.tmp").write_bytes(b"half")
    writer = ShardWriter(tmp_path, num_layer_ids=1, hidden_size=8, dtype="float32")
    assert writer.finished(0) is None
    writer.remove_leftovers()
    assert not list(tmp_path.iterdir())


def test_documents_of_another_shape_are_refused(tmp_path: Path, documents: list[Document]) -> None:
    writer = ShardWriter(tmp_path, num_layer_ids=2, hidden_size=32, dtype="float32")
    with pytest.raises(ShardError, match="row 0: hidden_states"):
        writer.write(0, documents)
    with pytest.raises(ShardError, match="one length"):
        ShardWriter(tmp_path, num_layer_ids=len(LAYERS), hidden_size=32, dtype="float32").write(
            0, [documents[0]._replace(loss_mask=documents[0].loss_mask[:-1])]
        )
    assert not list(tmp_path.iterdir())


def test_target_tensors_come_from_the_folder(folder: Path) -> None:
    tensors = ShardSet.open([folder]).target_tensors()
    assert tensors.embed_tokens.shape == (97, 32) and tensors.norm.kind == "rms"
    (folder / "target" / "target.safetensors").write_bytes(b"")
    with pytest.raises(ShardError, match="target.safetensors"):
        ShardSet.open([folder]).target_tensors()


def test_the_manifest_is_replaced_as_a_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = read_manifest(folder)

    def refuse(*paths: object) -> None:
        raise OSError("interrupted")

    monkeypatch.setattr(manifest_module.os, "replace", refuse)
    with pytest.raises(ShardError):
        write_manifest(folder, manifest)
    monkeypatch.undo()
    assert read_manifest(folder) == manifest
