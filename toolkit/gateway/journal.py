"""The record of a roll-out: a file of JSON lines that is only ever added to.

The state of a roll-out is what follows from its lines, so it survives kill -9: a last line that was
cut is dropped. One process at a time writes it.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from toolkit.errors import UsageError

__all__ = ["Journal", "is_written", "read_journal"]

# One who asks `is_written` holds the lock for a moment, in which a process may want to begin.
ATTEMPTS = 5
ATTEMPT_S = 0.02


def read_journal(file: Path) -> Iterator[dict[str, Any]]:
    """The lines, oldest first. Raises UsageError for a file that is no journal."""
    _check_file(file)
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"cannot be read ({error.strerror})", where=file) from error
    whole = data[: data.rfind(b"\n") + 1]
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if not isinstance(entry, dict):
            raise UsageError(
                "is not the journal of a roll-out", where=f"{file}:{number}", hint="Move it away."
            )
        yield entry


def is_written(file: Path) -> bool:
    """Whether a process has the journal open for writing now."""
    try:
        with file.open("rb") as opened:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def _check_file(file: Path) -> None:
    """Raise UsageError for a folder or a device, which might be read without end."""
    if file.exists() and not file.is_file():
        raise UsageError("is no regular file", where=file, hint="Move it away.")


class Journal:
    """A journal that is open for writing. Raises UsageError if another process writes it."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        _check_file(file)
        self._file = file.open("ab", buffering=0)
        try:
            self._lock()
        except OSError as error:
            self._file.close()
            raise UsageError(
                "another process runs this roll-out",
                where=file,
                hint="toolkit rollout status CONFIG shows it.",
            ) from error
        self._drop_cut_line(file)

    def _lock(self) -> None:
        for left in reversed(range(ATTEMPTS)):
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not left:
                    raise
                time.sleep(ATTEMPT_S)
            else:
                return

    def _drop_cut_line(self, file: Path) -> None:
        data = file.read_bytes()
        if data and not data.endswith(b"\n"):
            self._file.truncate(data.rfind(b"\n") + 1)

    def add(self, entry: Mapping[str, Any], *, lasting: bool = False) -> None:
        """Add a line. lasting: it is on the disk when this returns. Raises OSError; then nothing
        of the line is left.
        """
        line = json.dumps(entry).encode() + b"\n"
        size = os.fstat(self._file.fileno()).st_size
        try:
            written = self._file.write(line)
            if written < len(line):
                raise OSError(f"{written} of {len(line)} bytes written")
            if lasting:
                os.fsync(self._file.fileno())
        except OSError:
            self._file.truncate(size)
            raise

    def close(self) -> None:
        self._file.close()
