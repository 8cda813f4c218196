"""Read back JSON that the toolkit wrote itself, from a path that a user gives."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

__all__ = ["read_saved"]

# The first bytes must begin a JSON object; otherwise the file, however large, is not read further.
HEAD_BYTES = 64


def read_saved(file: Path) -> dict[str, Any]:
    """The JSON object in `file`. Raises OSError or ValueError, whose text says what is wrong."""
    if not stat.S_ISREG(file.stat().st_mode):
        raise ValueError("it is not a regular file")  # a pipe or a device may never end
    with file.open("rb") as opened:
        if not opened.read(HEAD_BYTES).lstrip().startswith(b"{"):
            raise ValueError("it is not a JSON object")
        opened.seek(0)
        try:
            data: dict[str, Any] = json.loads(opened.read().decode("utf-8"))
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
    return data
