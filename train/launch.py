"""Starting one or several processes, and making sure that what runs is what was asked for.

Several ways of launching start fewer processes than asked, without a word. All is asserted here, before any work.
"""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedType,
    InitProcessGroupKwargs,
    broadcast_object_list,
)

Result = TypeVar("Result")

_SUPPORTED = (
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.DEEPSPEED,
)


class LaunchError(ValueError):
    """The processes that run are not those that were asked for."""


def start(device: str) -> Accelerator:
    """The accelerator of this process on `device` (auto, cpu or cuda).

    Raises LaunchError when world size, backend or distributed type are not what the launcher announced.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise LaunchError(f"--device must be auto, cpu or cuda, found {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise LaunchError("--device cuda needs a CUDA device, found none; use --device cpu")
    on_cpu = device == "cpu" or not torch.cuda.is_available()
    handlers: list[Any] = []
    if on_cpu and _announced() > 1:
        handlers.append(InitProcessGroupKwargs(backend="gloo"))
    # asked for the CPU by name, accelerate drops DeepSpeed without a word; left alone, DeepSpeed finds the CPU itself
    accelerator = Accelerator(
        cpu=on_cpu and not _asked_for("DEEPSPEED"), mixed_precision="no", kwargs_handlers=handlers
    )
    _check(accelerator, on_cpu)
    return accelerator


def describe(accelerator: Accelerator) -> str:
    """One line: processes, distributed type, backend and device; it names the launcher that silently runs alone."""
    count = accelerator.num_processes
    kind = f"{accelerator.distributed_type.value}, backend {accelerator.state.backend}, "
    line = f"{count} process{'es' if count > 1 else ''}, {kind if count > 1 else ''}device {accelerator.device}"
    if accelerator.num_processes == 1 and _asked_for("CPU") and "WORLD_SIZE" not in os.environ:
        line += (
            "; `accelerate launch --cpu` starts one process whatever --num_processes says: for several use "
            "ACCELERATE_USE_CPU=true torchrun --nproc_per_node N -m spectrain"
        )
    return line


def run_on_main(accelerator: Accelerator, work: Callable[[], Result]) -> Result:
    """Runs `work` on the main process and gives every process its result, or its error."""
    outcome: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            outcome[0] = work()
        except Exception as error:
            if accelerator.num_processes == 1:
                raise
            outcome[1] = error
    if accelerator.num_processes > 1:
        broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def _check(accelerator: Accelerator, on_cpu: bool) -> None:
    announced = _announced()
    if accelerator.num_processes != announced:
        raise LaunchError(
            f"the launcher announced {announced} processes (WORLD_SIZE) but {accelerator.num_processes} run together; "
            f"on CPU start them with ACCELERATE_USE_CPU=true torchrun --nproc_per_node {announced} -m spectrain"
        )
    if accelerator.distributed_type not in _SUPPORTED:
        raise LaunchError(
            f"fit runs alone, under DDP or under DeepSpeed ZeRO-2, found {accelerator.distributed_type.value}; use "
            f"recipes/accelerate/ddp.yaml or zero2.yaml"
        )
    for name in ("DEEPSPEED", "FSDP"):
        if _asked_for(name) and accelerator.distributed_type.value != name:
            raise LaunchError(
                f"the launcher asked for {name} but {accelerator.distributed_type.value} runs; unset "
                f"ACCELERATE_USE_CPU, which switches it off, or launch without {name}"
            )
    if accelerator.num_processes > 1:
        initialised = torch.distributed.is_initialized()
        world = torch.distributed.get_world_size() if initialised else 1
        expected, backend = "gloo" if on_cpu else "nccl", torch.distributed.get_backend() if initialised else "none"
        if world != announced or expected not in backend:
            raise LaunchError(
                f"expected {announced} processes over {expected}, found a group of {world} over {backend}; check the "
                f"launcher's configuration"
            )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        plugin: Any = accelerator.state.deepspeed_plugin
        stage = plugin.zero_stage
        if stage > 2:
            raise LaunchError(
                f"DeepSpeed ZeRO stages 0 to 2 are supported, found {stage}; a draft head fits one device"
            )


def _announced() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _asked_for(name: str) -> bool:
    return os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() in ("1", "true", "yes")
