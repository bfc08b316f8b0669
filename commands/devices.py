"""Which device and type a command runs on, and what the machine is, for the record."""

import os
import platform
from importlib.metadata import version
from typing import Any

import torch


class DeviceError(ValueError):
    """The asked device is not there."""


def device_of(name: str) -> torch.device:
    """The device an option names; `auto` takes a GPU if there is one. Raises DeviceError for one that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DeviceError(f"--device must be auto, cpu, cuda or cuda:N, found {name!r}") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DeviceError(f"--device {name} is not there: {torch.cuda.device_count()} CUDA devices found; use cpu")
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # kernels, graphs and events go to the current device
    return device


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    """The compute type an option names; `auto`: bfloat16 on a GPU, float32 on a CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[name]


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and hardware, JSON-ready."""
    from .. import __version__

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} CPU cores"
    return {
        "spectrain": __version__,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
        "hardware": name,
        "threads": torch.get_num_threads(),
    }
