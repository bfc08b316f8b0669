"""SIGKILL at any moment: the resumed folder holds the bytes of the unbroken run."""

import subprocess
import sys
from pathlib import Path

import pytest

from spectrain.tests.extraction_runs import digests

SCRIPT = Path(__file__).with_name("killed_run.py")


@pytest.mark.parametrize(
    "mode", ["moments", pytest.param("writes", marks=pytest.mark.slow, id="around every write")], ids=str
)
def test_killed_runs_resume_to_the_same_bytes(tmp_path: Path, mode: str) -> None:
    whole = tmp_path / "whole"
    command = [sys.executable, "-W", "ignore", str(SCRIPT), mode, str(whole), str(tmp_path / "killed")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    folders = [Path(line) for line in done.stdout.split("\n") if line]
    assert folders and len(digests(whole)) == 8
    for folder in folders:
        assert digests(folder) == digests(whole)
