"""The head folder: `config.json` and `model.safetensors` as serving engines read them, `spectrain.json` as we do.

Loading is strict: an unknown, missing or mis-shaped tensor is an error that names it, because engines that skip such
tensors serve a head that never gets a draft accepted.
"""

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .base import DraftHead, HeadConfig, HeadError
from .resolve import resolve

FORMAT_VERSION = 1


@dataclass(frozen=True)
class LoadedHead:
    """A head, and what was recorded when it was trained."""

    head: DraftHead
    record: dict[str, Any]  # spectrain.json


def class_path(cls: type) -> str:
    """The `module:Class` string of a class."""
    return f"{cls.__module__}:{cls.__qualname__}"


def save_head(folder: Path, head: DraftHead, record: Mapping[str, Any], dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes the three files, each atomically; `record` joins `spectrain.json` (fingerprints, recipe, metrics)."""
    head.assert_filled()
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (t.to(dtype) if t.is_floating_point() else t).detach().cpu().contiguous()
        for name, t in head.state_dict().items()
    }
    spectrain = {
        "format_version": FORMAT_VERSION,
        "config_class": class_path(type(head.config)),
        "config": head.config.to_dict(),
        **record,
    }
    _replace(folder / "model.safetensors", lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    serving = {**head.config.serving_config(), "dtype": str(dtype).removeprefix("torch.")}
    _replace(folder / "config.json", lambda path: path.write_text(json.dumps(serving, indent=2) + "\n"))
    _replace(folder / "spectrain.json", lambda path: path.write_text(json.dumps(spectrain, indent=2) + "\n"))


def load_head(
    folder: Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    allowed_packages: Collection[str] = (),
) -> LoadedHead:
    """Reads a head folder; raises HeadError naming the file, tensor or key that is wrong."""
    record = read_record(folder)
    config_class = resolve(record["config_class"], allowed_packages)
    if not (isinstance(config_class, type) and issubclass(config_class, HeadConfig)):
        raise HeadError(f"{record['config_class']!r} in {folder / 'spectrain.json'} is not a HeadConfig")
    config = config_class.from_dict(record["config"])
    head = resolve(config.network, allowed_packages)(config)
    fill(head, folder / "model.safetensors")
    return LoadedHead(head.to(device=device, dtype=dtype), record)


def fill(head: DraftHead, path: Path, copies: Mapping[str, str] | None = None) -> None:
    """Gives a head the tensors of one file; `copies` may be there as well and must equal the tensor they are beside.

    Raises HeadError naming every tensor that is unknown, missing, mis-shaped or not finite.
    """
    tensors = _read_tensors(path)
    for copy, source in (copies or {}).items():
        if copy in tensors and source in tensors and torch.equal(tensors[copy], tensors[source]):
            del tensors[copy]
    _check_tensors(path, head, tensors)
    head.load_state_dict(tensors, strict=True)
    head.assert_filled()


def read_record(folder: Path) -> dict[str, Any]:
    """`spectrain.json` of a head folder; raises HeadError where there is none of this version."""
    path = folder / "spectrain.json"
    if not folder.is_dir():
        raise HeadError(f"expected a head folder written by `spectrain fit`, found no folder at {folder}")
    if not path.is_file():
        raise HeadError(f"expected {path}, found none: {folder} is not a head folder written by `spectrain fit`")
    try:
        record = json.loads(path.read_text())
    except ValueError as error:
        raise HeadError(f"{path} is not valid JSON ({error}); restore it or train the head again") from error
    if not isinstance(record, dict):
        raise HeadError(f"{path} must hold a JSON object, found {type(record).__name__}; train the head again")
    version = record.get("format_version")
    if version != FORMAT_VERSION:
        raise HeadError(
            f"{path} has format version {version}, this spectrain reads {FORMAT_VERSION}; use the matching one"
        )
    missing = [key for key, kind in (("config_class", str), ("config", dict)) if not isinstance(record.get(key), kind)]
    if missing:
        raise HeadError(f"{path} lacks {' and '.join(missing)}; restore it or train the head again")
    return record


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in list(file.keys())}
    except (OSError, SafetensorError) as error:
        raise HeadError(f"expected a safetensors file at {path}, found: {error}; copy the head folder again") from error


def _check_tensors(path: Path, head: DraftHead, found: Mapping[str, torch.Tensor]) -> None:
    expected = head.state_dict()
    faults = [f"missing {name}" for name in expected if name not in found]
    faults += [f"unknown {name}" for name in found if name not in expected]
    faults += [
        f"{name} is of type {found[name].dtype}"
        for name, tensor in expected.items()
        if name in found and found[name].is_floating_point() != tensor.is_floating_point()
    ]
    faults += [
        f"{name} has shape {list(found[name].shape)}, expected {list(tensor.shape)}"
        for name, tensor in expected.items()
        if name in found and found[name].shape != tensor.shape
    ]
    if faults:
        raise HeadError(f"{path} does not hold the tensors its config asks for: {'; '.join(faults)}")


def _replace(path: Path, write: Any) -> None:
    """Writes to a temporary name beside `path`, syncs and renames, so that no reader ever sees half a file."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        write(temporary)
        os.chmod(temporary, mode)  # safetensors writes for its owner's eyes alone; a server may be another user
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise HeadError(f"could not write {path}: {error}; free space or choose another folder") from error
