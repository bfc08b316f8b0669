"""From a plan to a finished shard folder: resumable, checked before it starts, the same bytes however often killed.

The order of writing is the guarantee: the run's record first, then the target, then shards, token counts and, last of
all, the manifest. A folder with a manifest is complete.
"""

import copy
import json
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ..infer.prompts import template_hash, tokenizer_hash
from ..infer.target import Target
from .manifest import MANIFEST, ShardError, TargetIdentity, read_manifest, write_atomically
from .plan import ExtractionError, Plan, PlannedRow
from .shards import (
    TARGET_FOLDER,
    TARGET_TENSORS,
    TOKEN_COUNTS,
    Manifest,
    ShardEntry,
    ShardWriter,
    shard_name,
    write_manifest,
    write_token_counts,
)
from .states import StateExtractor, bytes_per_token

RECORD = "extract.json"
TEXT_FOLDER = "text"
_OURS = (MANIFEST, TOKEN_COUNTS, RECORD)


@dataclass(frozen=True, kw_only=True)
class ExtractionSettings:
    """What decides the bytes of a shard folder beside target and data."""

    layer_ids: tuple[int, ...]  # id L is added
    batch_tokens: int = 4096
    shard_tokens: int = 65536
    max_length: int  # tokens of a row

    def __post_init__(self) -> None:
        for name in ("batch_tokens", "shard_tokens", "max_length"):
            if getattr(self, name) < 1:
                raise ExtractionError(
                    f"--{name.replace('_', '-')} must be at least 1, found {getattr(self, name)}; give a larger number"
                )


class Workers(Protocol):
    """The processes that share one extraction."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def gather(self, entries: list[tuple[int, ShardEntry]]) -> list[tuple[int, ShardEntry]]:
        """Everyone's entries, once all processes have come this far."""
        ...

    def wait(self) -> None:
        """Returns once all processes have come this far."""
        ...


@dataclass(frozen=True)
class Alone:
    """A single process."""

    rank: int = 0
    world_size: int = 1

    def gather(self, entries: list[tuple[int, ShardEntry]]) -> list[tuple[int, ShardEntry]]:
        return entries

    def wait(self) -> None:
        pass


class ProgressReport(Protocol):
    """Hears how far a process has come."""

    def skipped(self, tokens: int) -> None:
        """A shard that was already whole."""
        ...

    def computed(self, tokens: int) -> None:
        """A document left the engine."""
        ...

    def written(self, num_bytes: int) -> None:
        """A shard reached the disk."""
        ...


@dataclass(frozen=True)
class Need:
    """Disk space, known before the first byte is written."""

    bytes_per_token: int
    tokens: int
    documents: int
    target_bytes: int

    @property
    def total(self) -> int:
        return self.bytes_per_token * self.tokens + 16 * self.documents + self.target_bytes


def check_folder(out: Path, *, resume: bool, overwrite: bool) -> None:
    """Raises ExtractionError where the folder holds a run and neither option says what to do with it."""
    if resume and overwrite:
        raise ExtractionError("expected --resume or --overwrite, found both; give one")
    present = [name for name in _OURS if (out / name).exists()] + [
        path.name for path in out.glob("shard-*.safetensors")
    ]
    if present and not (resume or overwrite):
        raise ExtractionError(
            f"{out} already holds an extraction ({present[0]}); pass --resume, --overwrite or another --out"
        )


def clear_folder(out: Path) -> None:
    """Removes what extraction wrote and nothing else; call it when everything that can be refused was looked at."""
    for path in [
        out / MANIFEST,
        *out.glob("shard-*.safetensors*"),
        *out.glob("*.tmp"),
        out / TOKEN_COUNTS,
        out / RECORD,
    ]:
        path.unlink(missing_ok=True)
    for name in (TARGET_FOLDER, TEXT_FOLDER):
        if (out / name).is_dir():
            shutil.rmtree(out / name)


class Extraction:
    """One process's part in filling a shard folder."""

    def __init__(
        self,
        target: Target,
        plan: Plan,
        out: Path,
        settings: ExtractionSettings,
        *,
        workers: Workers | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        """`notes` join the manifest's settings and must agree when a run is resumed. Raises ExtractionError."""
        self.target, self.plan, self.out, self.settings = target, plan, out, settings
        self.workers = workers or Alone()
        self.layer_ids = tuple(sorted({*settings.layer_ids, target.num_layers}))
        dtype = str(target.dtype).removeprefix("torch.")
        self.writer = ShardWriter(out, num_layer_ids=len(self.layer_ids), hidden_size=target.hidden_size, dtype=dtype)
        self.record = self._record(dtype, dict(notes or {}))
        # the engine wants room for one token behind a prompt, computed or not
        self.extractor = StateExtractor(target, self.layer_ids, settings.batch_tokens, settings.max_length + 1)

    def need(self) -> Need:
        """What the whole folder takes."""
        tensors = self.extractor.tensors
        matrices = {t.data_ptr(): t.nbytes for t in (tensors.embed_tokens, tensors.lm_head)}
        per_token = bytes_per_token(len(self.layer_ids), self.target.hidden_size, self.target.dtype.itemsize)
        return Need(per_token, self.plan.tokens, len(self.plan.rows), sum(matrices.values()))

    def check_disk(self) -> None:
        """Raises ExtractionError where the disk cannot hold what is still to be written."""
        kept = [*self.out.glob("shard-*.safetensors"), self.out / TARGET_TENSORS]
        held = sum(path.stat().st_size for path in kept if path.is_file())
        missing, free = self.need().total - held, shutil.disk_usage(self.out).free
        if missing > free:
            raise ExtractionError(
                f"the states need {missing / 1e9:.2f} GB more, the disk of {self.out} has {free / 1e9:.2f} GB free; "
                f"lower --max-tokens or --limit, capture fewer layers, or choose another --out"
            )

    def run(self, report: ProgressReport | None = None) -> tuple[Manifest, int]:
        """Writes what is missing; returns the manifest and how many shards this process wrote.

        Raises ExtractionError or ShardError; every finished shard stays as it is.
        """
        report = report or _Silent()
        self._start()
        finished = self._finished()
        mine = range(self.workers.rank, len(self.plan.shards), self.workers.world_size)
        entries: list[tuple[int, ShardEntry]] = []
        wanted = []
        for index in mine:
            if index in finished:
                entries.append((index, finished[index]))
                report.skipped(sum(len(row.token_ids) for row in self.plan.shards[index]))
            else:
                wanted.append(index)
        entries += self._write_shards(wanted, report)
        everyone = dict(self.workers.gather(entries))
        manifest = self._manifest([everyone[index] for index in range(len(self.plan.shards))])
        if self.workers.rank == 0:
            counts = torch.from_numpy(self.plan.token_counts(self.target.vocab_size))
            write_token_counts(self.out, counts)
            write_manifest(self.out, manifest)
        self.workers.wait()
        return manifest, len(wanted)

    def _start(self) -> None:
        """Rank 0 settles the record and the target folder before anyone writes a shard."""
        if self.workers.rank == 0:
            self._check_record()
            self.check_disk()
            self.writer.remove_leftovers()
            self._write_record()
            self._write_target()
        self.workers.wait()

    def _check_record(self) -> None:
        path = self.out / RECORD
        if not path.is_file():
            return
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            raise ExtractionError(f"{path} is not readable JSON ({error}); pass --overwrite to start again") from error
        # the hash of the data comes last: it covers the division into shards, and the setting behind it says more
        for key in sorted({*self.record, *before}, key=lambda key: (key == "data", key)):
            if before.get(key) != self.record.get(key):
                raise ExtractionError(
                    f"{self.out} was begun with another {key.replace('_', ' ')} (found {_short(before.get(key))}, now "
                    f"{_short(self.record.get(key))}); use the same settings and data to resume, or pass --overwrite"
                )

    def _write_record(self) -> None:
        text = json.dumps(self.record, indent=2) + "\n"
        write_atomically(self.out / RECORD, lambda path: path.write_text(text, encoding="utf-8"))

    def _write_target(self) -> None:
        if (self.out / TARGET_TENSORS).is_file():
            return
        folder = self.out / TARGET_FOLDER
        folder.mkdir(exist_ok=True)
        config = copy.deepcopy(self.target.config)
        config._name_or_path = ""
        config.save_pretrained(folder)
        if self.target.tokenizer is not None:
            self.target.tokenizer.save_pretrained(folder)
        write_atomically(self.out / TARGET_TENSORS, self.extractor.tensors.save)

    def _finished(self) -> dict[int, ShardEntry]:
        """Shards on disk that hold exactly the planned rows; the manifest, if any, must know their bytes."""
        listed: dict[str, ShardEntry] | None = None
        if (self.out / MANIFEST).is_file():
            try:
                listed = {entry.file: entry for entry in read_manifest(self.out).shards}
            except ShardError:
                listed = None
        finished = {}
        for index in range(len(self.plan.shards)):
            entry = self.writer.finished(index) if (self.out / shard_name(index)).is_file() else None
            if entry is None or (listed is not None and listed.get(entry.file) != entry):
                continue
            if _holds(self.out / entry.file, self.plan.shards[index]):
                finished[index] = entry
        # every process must have looked before a manifest that no longer tells the truth goes
        self.workers.wait()
        if self.workers.rank == 0 and len(finished) < len(self.plan.shards):
            (self.out / MANIFEST).unlink(missing_ok=True)
        return finished

    def _write_shards(self, indices: list[int], report: ProgressReport) -> list[tuple[int, ShardEntry]]:
        """Computes one shard while the one before it is written."""
        entries: list[tuple[int, ShardEntry]] = []
        pending: tuple[int, Future[ShardEntry]] | None = None

        def settle(index: int, future: Future[ShardEntry]) -> None:
            entry = future.result()
            entries.append((index, entry))
            report.written((self.out / entry.file).stat().st_size)

        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="shard-writer") as pool:
            for index in indices:
                documents = self.extractor.documents(self.plan.shards[index], report.computed)
                if pending is not None:
                    settle(*pending)
                pending = index, pool.submit(self.writer.write, index, documents)
            if pending is not None:
                settle(*pending)
        return entries

    def _record(self, dtype: str, notes: dict[str, Any]) -> dict[str, Any]:
        tokenizer = self.target.tokenizer
        fingerprint = {key: value for key, value in self.target.fingerprint().items() if key != "facts"}
        return {
            "target": self.target.name,
            "target_fingerprint": json.dumps(fingerprint, sort_keys=True),
            "tokenizer_hash": "none" if tokenizer is None else tokenizer_hash(tokenizer),
            "template_hash": "none" if tokenizer is None else template_hash(tokenizer),
            "layer_ids": list(self.layer_ids),
            "dtype": dtype,
            "device": self.target.device.type,
            "max_length": self.settings.max_length,
            "batch_tokens": self.settings.batch_tokens,
            "shard_tokens": self.settings.shard_tokens,
            "data": self.plan.content_hash(),
            **notes,
        }

    def _manifest(self, entries: list[ShardEntry]) -> Manifest:
        kept = ("max_length", "batch_tokens", "shard_tokens", "device", "data")
        stated = {"target", "target_fingerprint", "tokenizer_hash", "template_hash", "layer_ids", "dtype", *kept}
        counts = self.plan.counts
        return Manifest(
            target=TargetIdentity(
                name=self.target.name,
                revision=getattr(self.target.config, "_commit_hash", None) or "",
                fingerprint=self.record["target_fingerprint"],
            ),
            tokenizer_hash=self.record["tokenizer_hash"],
            template_hash=self.record["template_hash"],
            on_policy=self.plan.on_policy,
            layer_ids=self.layer_ids,
            hidden_size=self.target.hidden_size,
            dtype=self.record["dtype"],
            num_layers=self.target.num_layers,
            vocab_size=self.target.vocab_size,
            shards=tuple(entries),
            settings={
                **{key: self.record[key] for key in kept},
                **{key: value for key, value in self.record.items() if key not in stated},
                "rows": {"read": counts.rows, "kept": counts.kept, "left_out": dict(sorted(counts.dropped.items()))},
            },
        )


class _Silent:
    def skipped(self, tokens: int) -> None:
        pass

    def computed(self, tokens: int) -> None:
        pass

    def written(self, num_bytes: int) -> None:
        pass


def _holds(path: Path, rows: tuple[PlannedRow, ...]) -> bool:
    """Whether a shard that can be read holds these rows' ids and masks."""
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        ids, mask = file.get_tensor("token_ids"), file.get_tensor("loss_mask")
        sources = file.get_tensor("source_rows").tolist()
    return (
        sources == [row.source_row for row in rows]
        and ids.tobytes() == b"".join(row.token_ids.tobytes() for row in rows)
        and mask.tobytes() == b"".join(row.loss_mask.tobytes() for row in rows)
    )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:40] + "…"
