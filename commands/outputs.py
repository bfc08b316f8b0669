"""Whether results can be written where they were asked for: looked at before the work that would be lost otherwise."""

import errno
import os
from pathlib import Path


class OutputError(ValueError):
    """Results cannot be written where they were asked for; the message says what is in the way."""


def check_folders(*folders: Path, option: str = "--out") -> None:
    """Raises OutputError where files cannot be made in one of the folders, which need not be there yet."""
    for folder in folders:
        if found := obstacle(folder):
            raise OutputError(f"{option} must be a folder that can be written, found {found}; choose another")


def check_files(*files: Path, option: str = "--out") -> None:
    """Raises OutputError where one of the files can neither be made nor replaced."""
    for path in files:
        # many are written under a longer name first
        if found := obstacle(path.absolute().parent, path.name + ".tmp"):
            raise OutputError(f"{option} must be in a folder that can be written, found {found}; choose another")
        if os.path.lexists(path) and not os.path.isfile(path):
            raise OutputError(f"{option} must be a file, found something else at {path}; choose another name")


def check_new_files(*files: Path, overwrite: bool) -> None:
    """Raises OutputError where one of the files cannot be written, or is there already and may not be overwritten."""
    check_files(*files)
    for path in files:
        if path.exists() and not overwrite:
            raise OutputError(f"{path} is there already; pass --overwrite or another --out")
        if path.exists() and not os.access(path, os.W_OK):
            raise OutputError(f"--out must be a file that can be written, found {path} read-only; choose another name")


def obstacle(folder: Path, name: str = "") -> str | None:
    """What keeps a file called `name` from being made in a folder, which need not be there yet; None: nothing does."""
    # a link that leads nowhere is in the way too
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not os.path.isdir(there):
        return f"{'a file' if os.path.exists(there) else 'a link that leads nowhere'} at {there}"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"no permission to write in {there}"
    missing = (*folder.absolute().relative_to(there.absolute()).parts, name)
    if any(_is_too_long(path) for path in (folder / name, *(there / part for part in missing))):
        return f"a name too long for the file system of {there}"
    return None


def _is_too_long(path: Path) -> bool:
    try:
        os.lstat(path)
    except OSError as error:
        return error.errno == errno.ENAMETOOLONG
    return False
