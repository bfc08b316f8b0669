"""The PyTorch twins as a whole: `from spectrain.tests.kernels.twins import refuse_twins`."""

import inspect
import pkgutil
from collections.abc import Iterator
from importlib import import_module
from types import FunctionType, ModuleType

import pytest

from spectrain.kernels import reference


def twins() -> Iterator[tuple[ModuleType, str, FunctionType]]:
    """Every function of the twins under every name that a file of theirs has for it."""
    for file in pkgutil.iter_modules(reference.__path__):
        module = import_module(f"{reference.__name__}.{file.name}")
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__.startswith(f"{reference.__name__}."):
                yield module, name, function


def refuse_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a call of any of them fails."""

    def refuse(*arguments: object, **keywords: object) -> None:
        raise AssertionError("a PyTorch twin was called")

    for module, name, _ in list(twins()):
        monkeypatch.setattr(module, name, refuse)
