"""The manifest of a shard folder: what it holds, for which target, and how it was made."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
DTYPES = ("bfloat16", "float32")


class ShardError(ValueError):
    """A shard folder is not what was expected; the message names the file and the field."""


@dataclass(frozen=True, kw_only=True)
class TargetIdentity:
    """Which target wrote the states."""

    name: str
    revision: str
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class ShardEntry:
    """One shard file, as the manifest lists it."""

    file: str
    tokens: int
    supervised_tokens: int
    documents: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a shard folder holds and how it was made."""

    format_version: int = FORMAT_VERSION
    target: TargetIdentity
    tokenizer_hash: str
    template_hash: str
    on_policy: bool
    """Whether the target itself wrote the supervised text."""
    layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: str
    num_layers: int
    vocab_size: int
    final_state_normed: bool = False
    shards: tuple[ShardEntry, ...]
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Extraction settings, for the record."""

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def supervised_tokens(self) -> int:
        return sum(shard.supervised_tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, the inverse of `from_dict`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: Path) -> Self:
        """Raises ShardError naming `source` and the field that is missing, unknown or of another version."""
        version = values.get("format_version")
        if version != FORMAT_VERSION:
            raise ShardError(
                f"{source}: format_version must be {FORMAT_VERSION}, found {version}; run `spectrain extract` again or "
                f"use the spectrain that wrote it"
            )
        _check_keys(cls, values, source, "")
        _check_keys(TargetIdentity, values["target"], source, "target.")
        for shard in values["shards"]:
            _check_keys(ShardEntry, shard, source, "shards.")
        manifest = cls(
            **{
                **values,
                "target": TargetIdentity(**values["target"]),
                "layer_ids": tuple(values["layer_ids"]),
                "shards": tuple(ShardEntry(**shard) for shard in values["shards"]),
            }
        )
        manifest._check_values(source)
        return manifest

    def _check_values(self, source: Path) -> None:
        if self.dtype not in DTYPES:
            raise ShardError(f"{source}: dtype must be one of {', '.join(DTYPES)}, found {self.dtype!r}")
        ids = self.layer_ids
        if list(ids) != sorted(set(ids)) or not ids or not 0 <= ids[0] <= ids[-1] <= self.num_layers:
            raise ShardError(
                f"{source}: layer_ids must be ascending, distinct and between 0 and num_layers ({self.num_layers}), "
                f"found {list(ids)}"
            )
        if self.final_state_normed:
            raise ShardError(f"{source}: final_state_normed must be false (id L is stored before the final norm)")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes `manifest.json`, atomically; call it when every other file of the folder is in place."""
    text = json.dumps(manifest.to_dict(), indent=2) + "\n"
    write_atomically(folder / MANIFEST, lambda path: path.write_text(text, encoding="utf-8"))


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of one folder; raises ShardError naming the file and the field."""
    path = folder / MANIFEST
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        found = "no manifest" if folder.is_dir() else "no such folder"
        raise ShardError(
            f"expected a finished shard folder with {path}, found {found}; run or resume `spectrain extract`"
        ) from error
    except (ValueError, OSError) as error:
        raise ShardError(f"{path} is not readable JSON ({error}); run `spectrain extract` again") from error
    if not isinstance(values, dict):
        raise ShardError(f"{path} must hold a JSON object, found {type(values).__name__}")
    return Manifest.from_dict(values, path)


def check_same(first: Path, reference: Manifest, other: Path, manifest: Manifest) -> None:
    """Raises ShardError naming the field in which two folders cannot be trained on together."""
    for field in ("hidden_size", "vocab_size", "num_layers", "layer_ids", "dtype", "tokenizer_hash", "template_hash"):
        wanted, found = getattr(reference, field), getattr(manifest, field)
        if wanted != found:
            raise ShardError(
                f"shard folders must agree: {field} is {wanted} in {first} but {found} in {other}; train on one kind"
            )
    if reference.target.fingerprint != manifest.target.fingerprint:
        raise ShardError(
            f"shard folders must come from one target: {first} is of {reference.target.name} (fingerprint "
            f"{_digest(reference)}), {other} of {manifest.target.name} ({_digest(manifest)}); train on one of them, or "
            f"extract the other again with the same target"
        )


def _digest(manifest: Manifest) -> str:
    return hashlib.sha256(manifest.target.fingerprint.encode()).hexdigest()[:12]


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Calls `write` with a temporary name, syncs and renames; raises ShardError when the disk refuses."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        write(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise ShardError(
            f"could not write {path}: {error}; free space or choose another folder and resume, finished shards are kept"
        ) from error


def _check_keys(cls: type, values: Any, source: Path, prefix: str) -> None:
    if not isinstance(values, Mapping):
        raise ShardError(f"{source}: {prefix.rstrip('.')} must be an object, found {type(values).__name__}")
    expected = {field.name for field in dataclasses.fields(cls)}
    for kind, names in (("missing", expected - set(values)), ("unknown", set(values) - expected)):
        if names:
            fields = ", ".join(prefix + name for name in sorted(names))
            raise ShardError(f"{source}: {kind} field {fields}; run `spectrain extract` again")
