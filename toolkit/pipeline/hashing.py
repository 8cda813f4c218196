"""Canonical digests of values, files and folders. Stage keys are made of them.

A value is encoded with a tag and a length before it is hashed, so that no two different values have
the same encoding: 1, 1.0, True and "1" differ, and floats are exact to the bit. The order of a
mapping's keys does not matter. A tuple counts as a list, as in JSON. The digest of a folder covers
the names and contents of its files, but not times, owners and permissions.

The digest of a big file may be remembered by (path, size, mtime, inode). This only saves time: none
of the four enters a digest, and a memo opened with `rehash` forgets everything that it knew.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.errors import StoreError

__all__ = [
    "PREFIX",
    "DigestMemo",
    "digest_file",
    "digest_files",
    "digest_tree",
    "digest_value",
    "files_of",
]

PREFIX = "sha256:"
BLOCK_BYTES = 1 << 20
# The digest of a younger file is not remembered: the file could change again without getting
# another time stamp.
MIN_AGE_NS = 2_000_000_000


def digest_value(structure: object) -> str:
    """sha256 of a structure of None, bool, int, float, str, bytes, lists or tuples, and mappings
    with text keys, nested in any way.

    Raises TypeError for anything else, and also for paths, since a path is not content.
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
            raise TypeError("a mapping in a digest may have text keys only")
        yield b"d%d:" % len(value)
        for key in sorted(value):
            yield from _encode(key)
            yield from _encode(value[key])
    elif isinstance(value, Sequence):
        yield b"l%d:" % len(value)
        for item in value:
            yield from _encode(item)
    else:
        raise TypeError(
            f"{type(value).__name__} has no canonical encoding; digest its content instead"
        )


def digest_file(
    path: Path,
    memo: DigestMemo | None = None,
    *,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
) -> str:
    """sha256 of a file's bytes. Symbolic links are followed. Raises StoreError if the file cannot
    be read.

    on_bytes: called with the size of each block that was read.
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
                on_bytes(len(block))
    except OSError as error:
        hint = "Check the file and its permissions."
        if isinstance(error, FileNotFoundError) and path.is_symlink():
            hint = f"It is a link to {path.readlink()}."
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
    """Relative name -> digest of every file below `directory`, in the order of names.

    patterns: take only files whose name relative to `directory` matches one of these shell
    patterns; None takes all. Raises StoreError if something cannot be read, or if links form a
    circle.
    """
    wanted = [
        name
        for name in files_of(directory)
        if patterns is None or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    ]
    return {name: digest_file(directory / name, memo) for name in wanted}


def files_of(directory: Path) -> list[str]:
    """The relative names of all files below a folder, in the order of names. Raises StoreError if a
    folder cannot be read, or if links form a circle.
    """
    return sorted(_walk(directory, ""))


def digest_tree(
    directory: Path, patterns: Sequence[str] | None = None, memo: DigestMemo | None = None
) -> str:
    """sha256 of the names and contents of a folder's files, as `digest_files` finds them."""
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
        with os.scandir(folder) as iterator:
            entries = list(iterator)
        for entry in entries:
            if entry.is_dir():
                yield from _walk(folder / entry.name, f"{prefix}{entry.name}/", (*above, real))
            else:
                yield prefix + entry.name
    except OSError as error:
        raise StoreError(
            "digest", f"cannot be read: {error.strerror}", where=folder, hint="Check the folder."
        ) from error


class DigestMemo:
    """Digests remembered by (path, size, mtime, inode) in one small file. If the file is lost, only
    time is lost.

    rehash: forget everything and start again. Several processes may use one file: each writes the
    whole file, and the last one wins.
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
        identity = [status.st_size, status.st_mtime_ns, status.st_ino]
        if not isinstance(entry, list) or entry[:-1] != identity:
            return None
        return entry[-1] if isinstance(entry[-1], str) else None

    def remember(self, path: Path, status: os.stat_result, digest: str) -> None:
        if time.time_ns() - status.st_mtime_ns < MIN_AGE_NS:
            return
        self._known[str(path.absolute())] = [
            status.st_size,
            status.st_mtime_ns,
            status.st_ino,
            digest,
        ]
        self._changed = True

    def save(self) -> None:
        """Write the file if anything is new. A failure is ignored: the digests are made again."""
        if not self._changed:
            return
        existing = {path: entry for path, entry in self._known.items() if Path(path).exists()}
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(
                dir=self._file.parent, prefix=f".{self._file.name}.", suffix=".tmp"
            )
            try:
                with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                    json.dump(existing, file)
                Path(temporary).replace(self._file)
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise
            self._changed = False
