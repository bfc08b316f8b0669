"""Run by torchrun: writes the gradients of one optimizer step over all processes.

`gradient_worker.py SHARDS OUT CHANGE...`
"""

import sys
from pathlib import Path

from safetensors.torch import save_file

from spectrain.extract.shards import ShardSet
from spectrain.tests.train.runs import gradients


def main(shards: str, out: str, *changes: str) -> None:
    import torch

    found = gradients(ShardSet.open([shards]), *changes)
    rank = torch.distributed.get_rank()
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, Path(out) / f"{rank}.safetensors")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
