"""Copies of library functions with one thing changed in their source: `from spectrain.tests.mutants import Edit`."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple


class Edit(NamedTuple):
    """`old`, which a function's source holds once, becomes `new`."""

    function: Callable[..., Any]
    old: str
    new: str


@contextmanager
def mutated(edits: Sequence[Edit]) -> Iterator[None]:
    """The functions run as edited copies of themselves, whoever imported them from wherever; no file is touched.

    Raises LookupError where an edit's `old` does not stand in the source exactly once.
    """
    before = [(edit.function, edit.function.__code__) for edit in edits]
    codes = [_compiled(edit) for edit in edits]
    try:
        for (function, _), code in zip(before, codes, strict=True):
            function.__code__ = code
        yield
    finally:
        for function, code in before:
            function.__code__ = code


def _compiled(edit: Edit) -> CodeType:
    """The edited function's code, compiled within its whole file: classes around it give `super()` its meaning."""
    code = edit.function.__code__
    lines = Path(code.co_filename).read_text(encoding="utf-8").splitlines(keepends=True)
    body, first = inspect.getsourcelines(code)
    first -= 1
    last = first + len(body)
    source = "".join(lines[first:last])
    found = source.count(edit.old)
    if found != 1:
        raise LookupError(f"expected {edit.old!r} once in {code.co_qualname}, found it {found} times; write it anew")
    changed = "".join([*lines[:first], source.replace(edit.old, edit.new), *lines[last:]])
    return _named(compile(changed, code.co_filename, "exec", dont_inherit=True), code.co_qualname)


def _named(code: CodeType, qualname: str) -> CodeType:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    for constant in inner:
        if constant.co_qualname == qualname:
            return constant
        if qualname.startswith(constant.co_qualname + "."):
            return _named(constant, qualname)
    raise LookupError(f"expected a function {qualname} in the edited source, found none")
