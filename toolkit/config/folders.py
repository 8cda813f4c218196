"""Whether a written `checkpoint` is a folder or a model id of the hub, and which folder was meant
by one that is not there.

`OWNER/NAME` can be either. It is read as a folder as soon as anything on the disk speaks for one:
its first part lies beside the file, a folder is found whose spelling is close, or one that lies
where it says from another folder to start at. What the shipped facts know as a model is never taken
for a misspelt folder.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from toolkit.facts.models import CONFIGS

__all__ = ["meant_folder", "names_a_model"]

HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
CLOSE = 0.75  # of difflib: one letter of four
LEVELS_UP = 3


def names_a_model(base: Path, written: str) -> bool:
    """Whether `written`, which is no folder beneath `base`, may be an id of the hub."""
    if HUB_ID.match(written) is None or (base / written).parent.exists():
        return False
    return written in CONFIGS or meant_folder(base, written) is None


def meant_folder(base: Path, written: str) -> str | None:
    """A folder that is there, as it would have to be written: the same path from elsewhere, or a
    close spelling.
    """
    path = Path(written)
    if not path.is_absolute():
        starts = [*base.parents[:LEVELS_UP], Path.cwd()]
        for start in starts:
            if path.parts and _is_folder(start / path):
                return Path(os.path.relpath(start / path, base)).as_posix()
    found = Path(path.anchor) if path.is_absolute() else base
    spelt = Path(path.anchor)
    for part in path.parts[1:] if path.is_absolute() else path.parts:
        name = part if part == ".." or _is_folder(found / part) else _close(found, part)
        if name is None:
            return None
        found, spelt = found / name, spelt / name
    return spelt.as_posix() if spelt != path else None


def _close(folder: Path, name: str) -> str | None:
    try:
        there = [
            one.name for one in folder.iterdir() if one.is_dir() and not one.name.startswith(".")
        ]
    except OSError:
        return None
    by_case = {one.lower(): one for one in there}
    near = difflib.get_close_matches(name.lower(), by_case, n=1, cutoff=CLOSE)
    return by_case[near[0]] if near else None


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name that no file system takes, or a folder that may not be read
        return False
