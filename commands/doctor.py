"""`spectrain doctor`: one screen that says what this installation can do."""

import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

REQUIRED = ("torch", "transformers", "accelerate", "safetensors", "numpy", "numba", "datasets", "gguf", "matplotlib")
OPTIONAL = {
    "triton": "compiled kernels; without it the PyTorch twins run",
    "deepspeed": "ZeRO training: pip install 'spectrain[deepspeed]'",
    "arctic-inference": "suffix decoding: pip install 'spectrain[suffix]'",
    "tensorboard": "training curves: pip install 'spectrain[trackers]'",
    "wandb": "training curves online: pip install 'spectrain[trackers]'",
}


def doctor() -> None:
    """Shows versions, devices and what is missing; exit code 1 if something required is."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("spectrain", version_of("spectrain") or "run from a checkout", str(Path(__file__).parents[1]))
    table.add_row("python", platform.python_version(), f"{platform.system()} {platform.machine()}")
    missing = []
    for name in REQUIRED:
        found = version_of(name)
        if found is None:
            missing.append(name)
        table.add_row(name, found or "[red]missing[/red]", "" if found else "required: pip install spectrain")
    for name, purpose in OPTIONAL.items():
        table.add_row(name, version_of(name) or "[dim]none[/dim]", escape(purpose))
    for name, value, remark in _devices():
        table.add_row(name, value, remark)
    console = Console()
    console.print(table)
    if missing:
        console.print(f"missing: {', '.join(missing)}")
        sys.exit(1)


def version_of(package: str) -> str | None:
    """The installed version of a distribution, without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _devices() -> list[tuple[str, str, str]]:
    rows = [("cpu", f"{os.cpu_count()} cores", "")]
    free = shutil.disk_usage(Path.cwd()).free
    rows.append(("disk", f"{free / 2**30:.0f} GiB free", str(Path.cwd())))
    if version_of("torch") is None:
        return rows
    import torch

    rows[0] = ("cpu", f"{os.cpu_count()} cores", f"torch uses {torch.get_num_threads()} threads")
    if not torch.cuda.is_available():
        rows.append(("cuda", "none", "everything runs on the CPU; triton kernels are off"))
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        capability = f"{facts.major}.{facts.minor}"
        rows.append((f"cuda:{index}", facts.name, f"{facts.total_memory / 2**30:.0f} GiB, capability {capability}"))
    return rows
