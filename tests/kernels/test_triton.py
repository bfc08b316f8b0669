"""Runs the Triton cases: compiled on a GPU, else in Triton's interpreter, which must be chosen before the import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CASES = ["triton_cases.py", "triton_attention_cases.py", "layer_cases.py", "survival_cases.py", "gated_steps_cases.py"]


def run_cases(cases: str, environment: dict[str, str]) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        str(Path(__file__).with_name(cases)),
    ]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    result = subprocess.run(command, env={**own, **environment}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]


@pytest.mark.parametrize("cases", CASES)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the compiled kernels are tested instead")
def test_kernels_equal_their_twins_in_the_interpreter(cases: str) -> None:
    pytest.importorskip("triton")
    run_cases(cases, {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize("cases", CASES)
@pytest.mark.gpu
def test_kernels_equal_their_twins_compiled(cases: str) -> None:
    run_cases(cases, {"TRITON_INTERPRET": "0"})
