"""Checkpoints: float32 masters, optimizer moments and the position of a run, whole or absent.

A checkpoint is written into a temporary folder, synced, and renamed; `state.json` is its last file and lists the sizes
of the others. What does not match is not a checkpoint. Tensors are named as the bare head names them.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..heads.base import DraftHead
from .step import Stepper

HEAD_FILE = "head.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"
SHARDED_FOLDER = "accelerate"
FORMAT_VERSION = 1


class CheckpointError(ValueError):
    """A run folder cannot be resumed as asked."""


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Where a run stands; everything random in it is a function of this and the recipe's seed."""

    step: int  # optimizer steps made
    position: int  # batches consumed
    skipped: int  # of those, batches without a supervised row
    total_steps: int  # what the schedule is stretched over
    data_hash: str  # ShardSet.content_hash
    identity: dict[str, Any]  # recipe sections and head config that must not change
    world: int
    format_version: int = FORMAT_VERSION


class Found(NamedTuple):
    """A whole checkpoint, and broken ones that were passed over."""

    folder: Path
    state: RunState
    broken: tuple[Path, ...]


class CheckpointFolder:
    """The checkpoints of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def newest(self) -> Found | None:
        """The newest whole checkpoint; None where there is none."""
        broken: list[Path] = []
        for path in sorted(self.folder.glob("step-*"), reverse=True):
            state = read_state(path)
            if state is not None:
                return Found(path, state, tuple(broken))
            broken.append(path)
        return None

    def remove_leftovers(self) -> None:
        """Deletes what killed writes left behind."""
        for leftover in self.folder.glob(".*.tmp"):
            shutil.rmtree(leftover)

    def prune(self, keep_last: int, keep: int | None) -> None:
        """Deletes all but the newest `keep_last` whole checkpoints and the one of step `keep`."""
        whole = [path for path in sorted(self.folder.glob("step-*")) if read_state(path) is not None]
        for path in whole[:-keep_last]:
            if keep is None or path != self.path(keep):
                # renamed first: a half deleted folder must not look like a checkpoint
                doomed = self.folder / f".{path.name}.tmp"
                os.replace(path, doomed)
                shutil.rmtree(doomed)


def read_state(folder: Path) -> RunState | None:
    """The state of a whole checkpoint; None where a file is missing or cut."""
    try:
        loaded = json.loads((folder / STATE_FILE).read_text())
        sizes = loaded.pop("files")
        if any((folder / name).stat().st_size != size for name, size in sizes.items()):
            return None
        if loaded["format_version"] != FORMAT_VERSION:
            raise CheckpointError(
                f"{folder} has format version {loaded['format_version']}, this spectrain reads {FORMAT_VERSION}; use "
                f"the version that began the run, or start again with --overwrite"
            )
        return RunState(**loaded)
    except (OSError, KeyError, TypeError, json.JSONDecodeError):
        return None


def save(folder: Path, stepper: Stepper, head: DraftHead, state: RunState, on_main: Callable[..., Any]) -> None:
    """Writes one checkpoint; every process must call it. Replaces a folder of that name, whole or not."""
    temporary = folder.with_name(f".{folder.name}.tmp")

    def begin() -> None:
        with _writing(temporary):
            folder.parent.mkdir(parents=True, exist_ok=True)
            if temporary.exists():
                shutil.rmtree(temporary)
            temporary.mkdir()
            save_file(head_tensors(head), temporary / HEAD_FILE, metadata={"format": "pt"})
            if not stepper.sharded:
                save_file(_optimizer_tensors(head, stepper.optimizer), temporary / OPTIMIZER_FILE)

    def finish() -> None:
        with _writing(temporary):
            files = [path for path in temporary.rglob("*") if path.is_file()]
            sizes = {str(path.relative_to(temporary)): path.stat().st_size for path in files}
            (temporary / STATE_FILE).write_text(json.dumps({**asdict(state), "files": sizes}, indent=2) + "\n")
            for path in [*files, temporary / STATE_FILE, temporary]:
                _sync(path)
            if folder.exists():
                shutil.rmtree(folder)
            os.replace(temporary, folder)
            _sync(folder.parent)

    on_main(begin)
    if stepper.sharded:
        stepper.accelerator.save_state(str(temporary / SHARDED_FOLDER), safe_serialization=True)
        stepper.accelerator.wait_for_everyone()
    on_main(finish)


@contextmanager
def _writing(temporary: Path) -> Iterator[None]:
    """Gives back the space of a checkpoint that the disk refuses, and says so as CheckpointError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"could not write a checkpoint into {temporary.parent}: {error}; free space and continue with --resume, "
            f"checkpoints that are already there are kept"
        ) from error


def load(folder: Path, stepper: Stepper, head: DraftHead, state: RunState) -> None:
    """Restores weights and moments in place; every process must call it."""
    load_head_tensors(folder, head)
    if stepper.sharded != (folder / SHARDED_FOLDER).is_dir():
        raise CheckpointError(
            f"{folder} was written {'without' if stepper.sharded else 'under'} DeepSpeed; resume it that way"
        )
    if not stepper.sharded:
        _load_optimizer(folder / OPTIMIZER_FILE, head, stepper.optimizer)
        return
    if state.world != stepper.accelerator.num_processes:
        raise CheckpointError(
            f"DeepSpeed keeps its state per process: {folder} needs {state.world} processes, found "
            f"{stepper.accelerator.num_processes}; resume with {state.world}"
        )
    stepper.accelerator.load_state(str(folder / SHARDED_FOLDER))


def head_tensors(head: DraftHead) -> dict[str, Tensor]:
    """The head's own state dict on the CPU, without any wrapper's prefixes."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}


def load_head_tensors(folder: Path, head: DraftHead) -> None:
    """Fills a head from a checkpoint's float32 masters, draft vocabulary included."""
    path = folder / HEAD_FILE
    try:
        head.load_state_dict(load_file(path), strict=True)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise CheckpointError(f"{path} does not hold this head: {' '.join(str(error).split())}") from error


def _optimizer_tensors(head: DraftHead, optimizer: Any) -> dict[str, Tensor]:
    """Moments and step counts under `slot.parameter name`."""
    tensors = {}
    for name, parameter in head.named_parameters():
        for slot, value in _inner(optimizer).state.get(parameter, {}).items():
            tensors[f"{slot}.{name}"] = value.detach().cpu().contiguous()
    return tensors


def _load_optimizer(path: Path, head: DraftHead, optimizer: Any) -> None:
    inner = _inner(optimizer)
    trained = {id(p) for group in inner.param_groups for p in group["params"]}
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        for name, parameter in head.named_parameters():
            if id(parameter) not in trained:
                continue
            slots = ("step", "exp_avg", "exp_avg_sq")
            missing = [f"{slot}.{name}" for slot in slots if f"{slot}.{name}" not in names]
            if missing:
                raise CheckpointError(f"{path} lacks {', '.join(missing)}; resume from an earlier checkpoint")
            step, *moments = (file.get_tensor(f"{slot}.{name}") for slot in slots)
            device = parameter.device
            inner.state[parameter] = {
                "step": step,
                "exp_avg": moments[0].to(device),
                "exp_avg_sq": moments[1].to(device),
            }


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    return getattr(optimizer, "optimizer", optimizer)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes JSON atomically."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n")
    _sync(temporary)
    os.replace(temporary, path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
