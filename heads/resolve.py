"""`module:Class` strings to classes: the one place where a name becomes code."""

import importlib
from collections.abc import Collection
from typing import Any

from .base import HeadError


def resolve(path: str, allowed_packages: Collection[str] = ()) -> Any:
    """The object a `module:Class` string names.

    Only spectrain's own modules are imported unless the user named the package: a downloaded head folder must not be
    able to run code.
    """
    module, colon, name = path.partition(":")
    if not colon or not module or not name:
        raise HeadError(f"a class is named as `module:Class`, found {path!r}")
    package = module.split(".")[0]
    if package != "spectrain" and package not in allowed_packages:
        raise HeadError(
            f"{path!r} lies outside spectrain and its package was not allowed; pass --allow-package {package} if you "
            f"trust its code"
        )
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise HeadError(f"{path!r} cannot be imported: {error}; check the spelling and that it is installed") from error
