"""Runs the Triton cases: compiled on a GPU, else in Triton's interpreter, which must be chosen before the import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


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


class Kernels:
    """Each file of cases is a class, so that they can run side by side: together they take minutes."""

    cases: str

    @pytest.mark.skipif(torch.cuda.is_available(), reason="the compiled kernels are tested instead")
    def test_equal_their_twins_in_the_interpreter(self) -> None:
        pytest.importorskip("triton")
        run_cases(self.cases, {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})

    @pytest.mark.gpu
    def test_equal_their_twins_compiled(self) -> None:
        run_cases(self.cases, {"TRITON_INTERPRET": "0"})


class TestVerification(Kernels):
    cases = "triton_cases.py"


class TestAttention(Kernels):
    cases = "triton_attention_cases.py"


class TestLayers(Kernels):
    cases = "layer_cases.py"


class TestSurvival(Kernels):
    cases = "survival_cases.py"


class TestGatedSteps(Kernels):
    cases = "gated_steps_cases.py"
