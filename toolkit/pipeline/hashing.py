"""Canonical digests of values, files and folders: what stage keys are made of.

A value is written in a tagged, length-prefixed form before it is hashed, so that no two different
values share an encoding: 1,
1.0, True and "1" differ, floats are exact to the bit, and the order of a mapping's keys does not
matter. Tuples are lists, as they are in JSON. A folder is its files' names and contents; times,
owners and permissions are not part of it.

The digest of a big file may be remembered by (path, size, mtime, inode). That is a shortcut and
never the identity: nothing of it enters a digest, and a memo opened with `rehash` forgets
everything it knew.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import os
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.errors import StoreError

__all__ = ["DigestMemo", "digest_file", "digest_files", "digest_tree", "digest_value"]

PREFIX = "sha256:"
BLOCK_BYTES = 1 << 20
# a file younger than this could change again within its time stamp's resolution: not remembered
SETTLED_NS = 2_000_000_000


def digest_value(structure: object) -> str:
    """sha256 over None, bool, int, float, str, bytes, lists or tuples, and mappings with text keys,
    nested at will.

    Raises TypeError for anything else, paths included: a path is no content.
    """
    state = hashlib.sha256()
    for piece in _encode(structure):
        state.update(piece)
    return PREFIX + state.hexdigest()


def _encode(value: object) -> Iterator[bytes]:
    if value is None:
        yield b"n"
    elif isinstance(value, bool):
        yield b"b1" if value else b"b0"
    elif isinstance(value, int):
        yield b"i%d;" % value
    elif isinstance(value, float):
        yield b"f" + struct.pack(">d", value)
    elif isinstance(value, str):
        text = value.encode("utf-8", "surrogatepass")
        yield b"s%d:" % len(text)
        yield text
    elif isinstance(value, bytes):
        yield b"y%d:" % len(value)
        yield value
    elif isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("a mapping in a digest has text keys only")
        yield b"d%d:" % len(value)
        for key in sorted(value):
            yield from _encode(key)
            yield from _encode(value[key])
    elif isinstance(value, Sequence):
        yield b"l%d:" % len(value)
        for item in value:
            yield from _encode(item)
    else:
        raise TypeError(f"{type(value).__name__} has no canonical form; digest its content instead")


def digest_file(path: Path, memo: DigestMemo | None = None) -> str:
    """sha256 of a file's bytes, symbolic links followed. Raises StoreError when it cannot be
    read.
    """
    try:
        status = path.stat()
        remembered = None if memo is None else memo.recall(path, status)
        if remembered is not None:
            return remembered
        state = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                state.update(block)
    except OSError as error:
        leads_nowhere = isinstance(error, FileNotFoundError) and path.is_symlink()
        hint = (
            f"It is a link to {path.readlink()}."
            if leads_nowhere
            else "Check the file and its permissions."
        )
        raise StoreError(
            "digest", f"cannot be read: {error.strerror}", where=path, hint=hint
        ) from error
    digest = PREFIX + state.hexdigest()
    if memo is not None:
        memo.remember(path, status, digest)
    return digest


def digest_files(
    directory: Path, patterns: Sequence[str] | None = None, memo: DigestMemo | None = None
) -> dict[str, str]:
    """Relative name -> digest of every file beneath `directory`, in order of names.

    patterns: shell patterns, of which a file's name relative to `directory` has to match one; None
    takes all. Raises StoreError when something cannot be read, or a link leads in a circle.
    """
    names = sorted(_walk(directory, ""))
    wanted = [
        name
        for name in names
        if patterns is None or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    ]
    return {name: digest_file(directory / name, memo) for name in wanted}


def digest_tree(
    directory: Path, patterns: Sequence[str] | None = None, memo: DigestMemo | None = None
) -> str:
    """sha256 of a folder: the names and contents of its files, as `digest_files` finds them."""
    return digest_value(digest_files(directory, patterns, memo))


def _walk(folder: Path, prefix: str, above: tuple[str, ...] = ()) -> Iterator[str]:
    try:
        real = os.path.realpath(folder)
        if real in above:
            raise StoreError(
                "digest",
                "a link leads back to a folder above it",
                where=folder,
                hint="Remove the link.",
            )
        with os.scandir(folder) as entries:
            found = list(entries)
        for entry in found:
            if entry.is_dir():
                yield from _walk(folder / entry.name, f"{prefix}{entry.name}/", (*above, real))
            else:
                yield prefix + entry.name
    except OSError as error:
        raise StoreError(
            "digest", f"cannot be read: {error.strerror}", where=folder, hint="Check the folder."
        ) from error


class DigestMemo:
    """Digests remembered by (path, size, mtime, inode) in one small file. Losing it costs time and
    nothing else.

    rehash: forget what is known, and learn anew. Several processes may use one file: each writes a
    whole one, the last one stands.
    """

    def __init__(self, file: Path, *, rehash: bool = False) -> None:
        self._file = file
        self._known: dict[str, list[Any]] = {} if rehash else self._read()
        self._changed = rehash

    def _read(self) -> dict[str, list[Any]]:
        try:
            known = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}

    def recall(self, path: Path, status: os.stat_result) -> str | None:
        entry = self._known.get(str(path.absolute()))
        if not isinstance(entry, list) or entry[:-1] != [
            status.st_size,
            status.st_mtime_ns,
            status.st_ino,
        ]:
            return None
        return entry[-1] if isinstance(entry[-1], str) else None

    def remember(self, path: Path, status: os.stat_result, digest: str) -> None:
        if time.time_ns() - status.st_mtime_ns < SETTLED_NS:
            return
        self._known[str(path.absolute())] = [
            status.st_size,
            status.st_mtime_ns,
            status.st_ino,
            digest,
        ]
        self._changed = True

    def save(self) -> None:
        """Write what was learnt. Failing to is no fault: the digests are made again."""
        if not self._changed:
            return
        alive = {path: entry for path, entry in self._known.items() if Path(path).exists()}
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(
                dir=self._file.parent, prefix=f".{self._file.name}.", suffix=".tmp"
            )
            try:
                with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                    json.dump(alive, file)
                Path(temporary).replace(self._file)
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise
            self._changed = False
