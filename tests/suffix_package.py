"""Suffix decoding needs arctic-inference, which an install may lack: what needs it is skipped, nothing beside it."""

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import pytest

NEEDS_SUFFIX = pytest.mark.skipif(find_spec("arctic_inference") is None, reason="arctic-inference is not installed")


def by_name(cases: Iterable[Any]) -> list[Any]:
    """Cases of a parametrised test; a name with suffix in it, alone or the first of a case, needs the package."""
    marked = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        marked.append(pytest.param(*values, marks=NEEDS_SUFFIX) if "suffix" in values[0] else case)
    return marked
