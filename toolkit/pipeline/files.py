"""Write files and folders so that they appear whole or not at all, and explain an OSError."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import tempfile
from pathlib import Path

from toolkit.errors import StoreError

__all__ = ["link_or_copy", "os_error_in", "replace_folder", "store_error", "write_whole"]

AT_FDCWD = -100
RENAME_EXCHANGE = 2
EXCHANGE_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)
HINTS = {
    errno.ENOSPC: "Free some space there and run the same command again: finished stages are kept.",
    errno.EDQUOT: (
        "Your quota is used up; free some space and run the same command again: finished stages are"
        " kept."
    ),
    errno.EFBIG: "The file-size limit of this shell or file system is too low (ulimit -f).",
    errno.EACCES: "Give this user the permission to write there, or run from a folder of your own.",
    errno.EPERM: "Give this user the permission to write there, or run from a folder of your own.",
    errno.EROFS: "Run from a folder on a file system that can be written.",
    errno.EMFILE: "Raise the number of files a process may open (ulimit -n).",
    errno.ENOTDIR: "A file stands where a folder is needed: rename or remove it.",
    errno.EEXIST: "A file or a link stands where a folder is needed: rename or remove it.",
}


def store_error(stage: str, error: OSError, where: str | Path) -> StoreError | None:
    """The error with a hint that says how to fix it; None if the error is not about the file system
    (space, permission, limits).
    """
    if error.errno not in HINTS:
        return None
    return StoreError(
        stage,
        f"cannot write: {error.strerror}",
        where=error.filename2 or error.filename or where,  # a copy has two: from, to
        hint=HINTS[error.errno],
    )


def link_or_copy(source: str | Path, copy: str | Path) -> str:
    """Make a hard link, which takes no space, or a copy if the file system has no hard links. For
    files that nobody changes in place.
    """
    try:
        os.link(source, copy)
    except OSError:
        shutil.copy2(source, copy)
    return str(copy)


def os_error_in(error: Exception) -> OSError | None:
    """The OSError, out of those in HINTS, that the text of a library's own exception reports; None
    if there is none. safetensors and torch report a full disk this way.
    """
    text = str(error)
    for number in HINTS:
        if f"(os error {number})" in text or os.strerror(number) in text:
            return OSError(number, os.strerror(number))
    return None


def write_whole(path: Path, text: str) -> None:
    """Write a small file so that a reader sees the old or the new content, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(
        dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"
    )
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def replace_folder(new: Path, destination: Path) -> None:
    """Replace the folder `destination` by the folder `new`. The old content is removed. Both must
    be on one file system.

    If the file system can exchange two names, there is a whole folder at `destination` at every
    moment. Raises FileExistsError if `destination` is a file or a link, since only a person can
    have put it there.
    """
    if destination.is_symlink() or destination.is_file():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(destination))
    if not destination.exists():
        new.rename(destination)
        return
    if _exchange(new, destination):
        shutil.rmtree(new, ignore_errors=True)
        return
    old = new.with_name(new.name + ".old")
    destination.rename(old)
    new.rename(destination)
    shutil.rmtree(old, ignore_errors=True)


def _exchange(new: Path, destination: Path) -> bool:
    """Exchange two names with renameat2(2) and RENAME_EXCHANGE, which Python does not offer. Return
    False if that is not supported.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    status = libc.renameat2(
        AT_FDCWD, os.fsencode(new), AT_FDCWD, os.fsencode(destination), RENAME_EXCHANGE
    )
    if status == 0:
        return True
    number = ctypes.get_errno()
    if number in EXCHANGE_UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(destination))
