"""Every op has a kernel and a twin of one signature, in files of one name; the twin serves the CPU."""

import inspect
from importlib import import_module
from pathlib import Path

import pytest
import torch

from spectrain.kernels import dispatch, reference
from spectrain.tests.kernels.twins import refuse_twins, twins

OPS = {
    name: function
    for name, function in inspect.getmembers(dispatch, inspect.isfunction)
    if function.__module__ == dispatch.__name__
}


@pytest.mark.parametrize("op", OPS)
def test_kernel_and_twin_stand_in_files_of_one_name_with_one_signature(op: str) -> None:
    pytest.importorskip("triton")
    homes = {function.__module__ for _, name, function in twins() if name == op}
    assert len(homes) == 1, "a twin stands in one file"
    file = homes.pop().split(".")[-1]
    kernel = getattr(import_module(f"spectrain.kernels.{file}"), op)
    assert kernel.__module__ == f"spectrain.kernels.{file}"
    ours, twin, theirs = (inspect.signature(f) for f in (OPS[op], getattr(getattr(reference, file), op), kernel))
    assert ours == twin and ours.return_annotation == theirs.return_annotation
    given = list(theirs.parameters.values())  # a kernel may take a tiling of its own behind them
    assert list(ours.parameters.values()) == given[: len(ours.parameters)]
    assert all(more.default is None for more in given[len(ours.parameters) :])


def test_every_op_of_a_twin_file_is_dispatched() -> None:
    helpers = {"block_stats", "draw"}  # of two files
    assert {name for _, name, _ in twins() if not name.startswith("_")} == OPS.keys() | helpers


def test_refused_twins_are_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(reference.__file__).parent
    defined = sum(line.startswith("def ") for file in folder.glob("*.py") for line in file.read_text().splitlines())
    assert len({(function.__module__, name) for _, name, function in twins()}) == defined > 20
    refuse_twins(monkeypatch)
    for call in (
        lambda: dispatch.silu_mul(torch.ones(1, 2)),
        lambda: dispatch.linear(torch.ones(1, 2), torch.ones(1, 2)),
        lambda: dispatch.store_kv(*(torch.ones(1, 1, 1),) * 2, *(torch.ones(1, 1, 1, 1),) * 2, torch.zeros(1).long()),
    ):
        with pytest.raises(AssertionError, match="twin was called"):
            call()
