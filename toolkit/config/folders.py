"""Decide whether a `checkpoint` in the YAML is a folder or a model id of the hub, and suggest a
folder for a path that does not exist.

`OWNER/NAME` can be either. It is read as a folder if anything on the disk suggests one: a folder
`OWNER` beside the file, a folder with a similar spelling, or a folder at this path below another
starting folder. A model that the shipped facts know is never taken for a misspelt folder.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from toolkit.facts.models import CONFIGS

__all__ = ["is_hub_id", "similar_folder"]

HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
MIN_SIMILARITY = 0.75  # of difflib: one letter of four may differ
MAX_LEVELS_UP = 3


def is_hub_id(base: Path, written: str) -> bool:
    """Whether `written`, which is not a folder below `base`, is to be read as a hub id."""
    if HUB_ID.match(written) is None or (base / written).parent.exists():
        return False
    return written in CONFIGS or similar_folder(base, written) is None


def similar_folder(base: Path, written: str) -> str | None:
    """An existing folder that may have been meant, as it has to be written: the same path below
    another starting folder, or a similar spelling. None if there is none.
    """
    path = Path(written)
    if not path.is_absolute():
        starts = [*base.parents[:MAX_LEVELS_UP], Path.cwd()]
        for start in starts:
            if path.parts and _is_folder(start / path):
                return Path(os.path.relpath(start / path, base)).as_posix()
    folder = Path(path.anchor) if path.is_absolute() else base
    spelling = Path(path.anchor)
    for part in path.parts[1:] if path.is_absolute() else path.parts:
        exists = part == ".." or _is_folder(folder / part)
        name = part if exists else _similar_name(folder, part)
        if name is None:
            return None
        folder, spelling = folder / name, spelling / name
    return spelling.as_posix() if spelling != path else None


def _similar_name(folder: Path, name: str) -> str | None:
    try:
        inner_folders = [
            path.name
            for path in folder.iterdir()
            if path.is_dir() and not path.name.startswith(".")
        ]
    except OSError:
        return None
    by_lower_case = {inner.lower(): inner for inner in inner_folders}
    matches = difflib.get_close_matches(name.lower(), by_lower_case, n=1, cutoff=MIN_SIMILARITY)
    return by_lower_case[matches[0]] if matches else None


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name that the file system refuses, or a folder without read permission
        return False
