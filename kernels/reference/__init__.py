"""The kernels in plain PyTorch: the CPU path, and the oracle the Triton kernels are tested against.

Each file is the twin of the file of that name beside this folder, with its names and signatures.
"""

from . import attention, fused, gated_steps, linear, rejection, sampling, survival

__all__ = ["attention", "fused", "gated_steps", "linear", "rejection", "sampling", "survival"]
