"""JSON that the toolkit wrote itself, read back from wherever a user says it is."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

__all__ = ["read_saved"]

LOOKED_AT = 64  # bytes: what is no JSON object is not read as a whole, however large it is


def read_saved(file: Path) -> dict[str, Any]:
    """The object in it. Raises OSError or ValueError, whose words say why there is none."""
    if not stat.S_ISREG(file.stat().st_mode):
        raise ValueError("it is no regular file")  # a pipe or a device may never end
    with file.open("rb") as opened:
        if not opened.read(LOOKED_AT).lstrip().startswith(b"{"):
            raise ValueError("it is no JSON object")
        opened.seek(0)
        try:
            found: dict[str, Any] = json.loads(opened.read().decode("utf-8"))
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
    return found
