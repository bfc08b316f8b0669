"""The shard folder: what extraction writes and training reads. No engine, no tokenizer, no model here.

Nothing in a shard is shifted: row t of ids, mask and states speaks of the same token. The state at id L is stored raw,
before the final norm. The manifest is written last, so a folder with a manifest is complete.
"""

import hashlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..heads.target_tensors import TargetTensors
from .manifest import (
    DTYPES,
    Manifest,
    ShardEntry,
    ShardError,
    TargetIdentity,
    check_same,
    read_manifest,
    write_atomically,
    write_manifest,
)

__all__ = [
    "Document",
    "Manifest",
    "ShardEntry",
    "ShardError",
    "ShardSet",
    "ShardWriter",
    "TargetIdentity",
    "read_manifest",
    "shard_name",
    "write_manifest",
    "write_token_counts",
]

TOKEN_COUNTS = "token_counts.safetensors"
TARGET_FOLDER = "target"
TARGET_TENSORS = "target/target.safetensors"
_TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_SAFETENSORS_DTYPES = {"bfloat16": "BF16", "float32": "F32"}
_MAX_OPEN_FILES = 128


class Document(NamedTuple):
    """One conversation, unshifted."""

    token_ids: Tensor  # [tokens] int32
    loss_mask: Tensor  # [tokens] bool
    target_argmax: Tensor  # [tokens] int32; the target's top token after the row, -1 where the next is unsupervised
    hidden_states: Tensor  # [tokens, layers, hidden]
    source_row: int


def shard_name(index: int) -> str:
    """The file name of shard number `index`."""
    return f"shard-{index:05d}.safetensors"


class ShardWriter:
    """Writes shards of one folder, each under a temporary name, synced, then renamed."""

    def __init__(self, folder: Path, *, num_layer_ids: int, hidden_size: int, dtype: str) -> None:
        """Creates the folder."""
        if dtype not in DTYPES:
            raise ShardError(f"the storage dtype must be one of {', '.join(DTYPES)}, found {dtype!r}; change --dtype")
        self.folder, self.num_layer_ids, self.hidden_size, self.dtype = folder, num_layer_ids, hidden_size, dtype
        folder.mkdir(parents=True, exist_ok=True)

    def remove_leftovers(self) -> None:
        """Deletes temporary files of an earlier, killed run; call it from one process, before any writes."""
        for leftover in self.folder.glob("*.tmp"):
            leftover.unlink()

    def write(self, index: int, documents: Sequence[Document]) -> ShardEntry:
        """Writes one shard and returns its manifest entry; raises ShardError when the disk refuses."""
        for document in documents:
            self._check(document)
        lengths = torch.tensor([0, *(len(d.token_ids) for d in documents)], dtype=torch.int64)
        states = [d.hidden_states for d in documents]
        tensors = {
            "token_ids": _concatenate([d.token_ids for d in documents], torch.int32),
            "loss_mask": _concatenate([d.loss_mask for d in documents], torch.bool),
            "target_argmax": _concatenate([d.target_argmax for d in documents], torch.int32),
            "hidden_states": torch.cat(states).to(_TORCH_DTYPES[self.dtype])
            if states
            else torch.empty(0, self.num_layer_ids, self.hidden_size, dtype=_TORCH_DTYPES[self.dtype]),
            "cu_seqlens": lengths.cumsum(0),
            "source_rows": torch.tensor([d.source_row for d in documents], dtype=torch.int64),
        }
        path = self.folder / shard_name(index)
        write_atomically(path, lambda temporary: save_file(tensors, temporary))
        return _entry(path, tensors["loss_mask"], len(documents))

    def finished(self, index: int) -> ShardEntry | None:
        """The entry of a shard that is already whole on disk; None where it is absent or damaged."""
        path = self.folder / shard_name(index)
        try:
            with safe_open(path, framework="pt") as file:
                self._check_header(path, file)
                mask = file.get_tensor("loss_mask")
                documents = file.get_slice("source_rows").get_shape()[0]
        except (OSError, SafetensorError, ShardError):
            return None
        return _entry(path, mask, documents)

    def _check_header(self, path: Path, file: Any) -> None:
        check_header(path, file, self.num_layer_ids, self.hidden_size, self.dtype)

    def _check(self, document: Document) -> None:
        tokens = len(document.token_ids)
        expected = (tokens, self.num_layer_ids, self.hidden_size)
        if tuple(document.hidden_states.shape) != expected:
            raise ShardError(
                f"row {document.source_row}: hidden_states must be {list(expected)} for {tokens} tokens, found "
                f"{list(document.hidden_states.shape)}"
            )
        if len(document.loss_mask) != tokens or len(document.target_argmax) != tokens or tokens == 0:
            raise ShardError(f"row {document.source_row}: ids, mask and argmax must be of one length above 0")


def write_token_counts(folder: Path, counts: Tensor) -> None:
    """Writes how often each id [vocab] int64 occurs as a supervised token."""
    write_atomically(folder / TOKEN_COUNTS, lambda path: save_file({"token_counts": counts.to(torch.int64)}, path))


class DocumentIds(NamedTuple):
    """A document without its states; fields as in Document."""

    token_ids: Tensor
    loss_mask: Tensor
    target_argmax: Tensor


class _Located(NamedTuple):
    path: Path
    entry: ShardEntry


class ShardSet:
    """The documents of one or more shard folders of the same target, read lazily.

    Documents are numbered over all folders in the order given. Nothing but manifests and file headers is read when a
    set is opened.
    """

    def __init__(self, folders: Sequence[Path], manifests: Sequence[Manifest]) -> None:
        self.folders, self.manifests = tuple(folders), tuple(manifests)
        self.manifest = self.manifests[0]
        self._shards = [
            _Located(folder / entry.file, entry)
            for folder, manifest in zip(folders, manifests, strict=True)
            for entry in manifest.shards
        ]
        self._first_document = [0, *accumulate(located.entry.documents for located in self._shards)]
        self._offsets: dict[int, Tensor] = {}
        self._files: OrderedDict[int, Any] = OrderedDict()

    @classmethod
    def open(cls, folders: Iterable[Path | str]) -> Self:
        """Raises ShardError where a folder is unfinished or damaged, or folders do not belong together."""
        paths = [Path(folder) for folder in folders]
        if not paths:
            raise ShardError("expected at least one shard folder, found none; pass --shards DIR")
        manifests = [read_manifest(path) for path in paths]
        for path, manifest in zip(paths[1:], manifests[1:], strict=True):
            check_same(paths[0], manifests[0], path, manifest)
        opened = cls(paths, manifests)
        for index, located in enumerate(opened._shards):
            opened._check_shard(index, located)
        return opened

    @property
    def num_documents(self) -> int:
        return self._first_document[-1]

    @property
    def tokens(self) -> int:
        return sum(manifest.tokens for manifest in self.manifests)

    @property
    def supervised_tokens(self) -> int:
        return sum(manifest.supervised_tokens for manifest in self.manifests)

    @property
    def target_folder(self) -> Path:
        """The target's config, tokenizer and chat template."""
        return self.folders[0] / TARGET_FOLDER

    def content_hash(self) -> str:
        """A hash of what is read, in order, wherever the folders lie."""
        digests = "".join(located.entry.sha256 for located in self._shards)
        return hashlib.sha256(digests.encode()).hexdigest()

    def layer_columns(self, layer_ids: Sequence[int]) -> list[int]:
        """Columns of `hidden_states` that hold the asked layers; raises ShardError where one was not captured."""
        captured = self.manifest.layer_ids
        if any(i not in captured for i in layer_ids):
            raise ShardError(
                f"shards were captured at layers {captured} but this recipe needs {tuple(layer_ids)}; run `spectrain "
                f"extract --layers {','.join(map(str, layer_ids))}` or change head.layer_ids"
            )
        return [captured.index(i) for i in layer_ids]

    def document_lengths(self) -> Tensor:
        """Tokens of every document [documents] int64; reads one small tensor a shard."""
        lengths = [self._cu_seqlens(index).diff() for index in range(len(self._shards))]
        return torch.cat(lengths) if lengths else torch.zeros(0, dtype=torch.int64)

    @property
    def states_dtype(self) -> torch.dtype:
        return _TORCH_DTYPES[self.manifest.dtype]

    def document(self, index: int, max_tokens: int | None = None) -> Document:
        """Document `index`, at most its first `max_tokens` tokens, read from the mapped file."""
        shard, local, _ = self._locate(index, max_tokens)
        source_row = int(self._file(shard).get_slice("source_rows")[local : local + 1])
        return Document(*self.document_ids(index, max_tokens), self.hidden_states(index, max_tokens), source_row)

    def document_ids(self, index: int, max_tokens: int | None = None) -> DocumentIds:
        """The same document without its states."""
        shard, _, tokens = self._locate(index, max_tokens)
        file = self._file(shard)
        return DocumentIds(*(file.get_slice(name)[tokens] for name in DocumentIds._fields))

    def hidden_states(self, index: int, max_tokens: int | None = None) -> Tensor:
        """States [tokens, layers, hidden] of the same document, in the storage dtype."""
        shard, _, tokens = self._locate(index, max_tokens)
        return self._file(shard).get_slice("hidden_states")[tokens]

    def token_counts(self) -> Tensor:
        """How often each id [vocab] int64 occurs as a supervised token, over all folders."""
        total = torch.zeros(self.manifest.vocab_size, dtype=torch.int64)
        for folder in self.folders:
            path = folder / TOKEN_COUNTS
            try:
                with safe_open(path, framework="pt") as file:
                    counts = file.get_tensor("token_counts")
            except (OSError, SafetensorError) as error:
                raise ShardError(f"expected token counts in {path}, found: {error}; run `spectrain extract`") from error
            if counts.shape != total.shape:
                raise ShardError(f"{path}: token_counts must have {len(total)} ids (vocab_size), found {len(counts)}")
            total += counts
        return total

    def target_tensors(self) -> TargetTensors:
        """The target's embeddings, final norm and output head."""
        path = self.folders[0] / TARGET_TENSORS
        try:
            return TargetTensors.load(path)
        except (OSError, SafetensorError) as error:
            raise ShardError(
                f"expected the target's tensors in {path}, found: {error}; run `spectrain extract`"
            ) from error

    def verify(self) -> None:
        """Hashes every shard; raises ShardError naming the first whose sha256 is not the manifest's."""
        for located in self._shards:
            found = file_sha256(located.path)
            if found != located.entry.sha256:
                raise ShardError(
                    f"{located.path}: sha256 must be {located.entry.sha256[:12]}…, found {found[:12]}…; the file "
                    f"changed after it was written, delete it and resume `spectrain extract`"
                )

    def _check_shard(self, index: int, located: _Located) -> None:
        path, entry = located
        manifest = self.manifest
        file = self._file(index)
        check_header(path, file, len(manifest.layer_ids), manifest.hidden_size, manifest.dtype)
        for field, tensor, expected in (
            ("tokens", "token_ids", entry.tokens),
            ("documents", "source_rows", entry.documents),
        ):
            found = file.get_slice(tensor).get_shape()[0]
            if found != expected:
                raise ShardError(
                    f"{path}: the manifest lists {expected} {field}, the file holds {found}; extract again"
                )

    def _locate(self, index: int, max_tokens: int | None) -> tuple[int, int, slice]:
        """Shard, document within it and token range of a document."""
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} of {self.num_documents}")
        shard = bisect_right(self._first_document, index) - 1
        local = index - self._first_document[shard]
        start, stop = self._cu_seqlens(shard)[local : local + 2].tolist()
        return shard, local, slice(start, stop if max_tokens is None else min(stop, start + max_tokens))

    def _cu_seqlens(self, shard: int) -> Tensor:
        if shard not in self._offsets:
            self._offsets[shard] = self._file(shard).get_tensor("cu_seqlens")
        return self._offsets[shard]

    def _file(self, shard: int) -> Any:
        if shard not in self._files:
            path = self._shards[shard].path
            try:
                self._files[shard] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ShardError(
                    f"{path}: expected a whole shard, found: {error}; delete it and resume `spectrain extract`"
                ) from error
            if len(self._files) > _MAX_OPEN_FILES:
                self._files.popitem(last=False)
        self._files.move_to_end(shard)
        return self._files[shard]


def check_header(path: Path, file: Any, num_layer_ids: int, hidden_size: int, dtype: str) -> None:
    """Raises ShardError naming the tensor of an opened shard whose dtype or shape is not the format's."""
    if set(file.keys()) != {"token_ids", "loss_mask", "target_argmax", "hidden_states", "cu_seqlens", "source_rows"}:
        raise ShardError(f"{path}: expected the tensors of a shard, found {', '.join(sorted(file.keys()))}")
    tokens = file.get_slice("token_ids").get_shape()[0]
    documents = file.get_slice("source_rows").get_shape()[0]
    expected = {
        "token_ids": ([tokens], "I32"),
        "loss_mask": ([tokens], "BOOL"),
        "target_argmax": ([tokens], "I32"),
        "hidden_states": ([tokens, num_layer_ids, hidden_size], _SAFETENSORS_DTYPES[dtype]),
        "cu_seqlens": ([documents + 1], "I64"),
        "source_rows": ([documents], "I64"),
    }
    for name, (shape, kind) in expected.items():
        view = file.get_slice(name)
        if view.get_shape() != shape or view.get_dtype() != kind:
            raise ShardError(
                f"{path}: {name} must be {kind} {shape} by the manifest, found {view.get_dtype()} {view.get_shape()}"
            )


def file_sha256(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _entry(path: Path, loss_mask: Tensor, documents: int) -> ShardEntry:
    return ShardEntry(
        file=path.name,
        tokens=len(loss_mask),
        supervised_tokens=int(loss_mask.sum()),
        documents=documents,
        sha256=file_sha256(path),
    )


def _concatenate(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([part.to(dtype) for part in parts]) if parts else torch.empty(0, dtype=dtype)
