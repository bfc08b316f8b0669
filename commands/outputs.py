"""Whether results can be written where they were asked for: looked at before the work that would be lost otherwise."""

import os
from pathlib import Path


def obstacle(folder: Path) -> str | None:
    """What keeps files from being made in a folder, which need not be there yet; None: nothing does."""
    # a link that leads nowhere is in the way too
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not os.path.isdir(there):
        return f"a file at {there}"
    return None if os.access(there, os.W_OK | os.X_OK) else f"{there} read-only"
