"""Folders and files that appear whole or not at all, and what an OSError means to a person."""

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
NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)
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
    """The error as one that says how to fix it; None if it is not one of the file system's own
    (space, permission, limits).
    """
    if error.errno not in HINTS:
        return None
    return StoreError(
        stage,
        f"cannot write: {error.strerror}",
        where=error.filename or where,
        hint=HINTS[error.errno],
    )


def link_or_copy(source: str | Path, copy: str | Path) -> str:
    """A hard link where the file system has them, which costs no space; else a copy. For files
    that nobody changes in place.
    """
    try:
        os.link(source, copy)
    except OSError:
        shutil.copy2(source, copy)
    return str(copy)


def os_error_in(error: Exception) -> OSError | None:
    """The OSError of the above that a library tells of in words of its own, as safetensors and
    torch do.
    """
    text = str(error)
    for number in HINTS:
        if f"(os error {number})" in text or os.strerror(number) in text:
            return OSError(number, os.strerror(number))
    return None


def write_whole(path: Path, text: str) -> None:
    """Write a small file so that a reader sees the old or the new one, never a part."""
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
    """Put the folder `new` in the place of `destination`, whose present content is removed. Both
    lie on one file system.

    Where the file system can exchange two names there is no moment without a whole folder at
    `destination`. Raises FileExistsError for a `destination` that is a file or a link, which
    somebody put there.
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


def _exchange(one: Path, other: Path) -> bool:
    """renameat2(2) with RENAME_EXCHANGE, which Python does not offer. False where it is not
    supported.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    if (
        libc.renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE)
        == 0
    ):
        return True
    number = ctypes.get_errno()
    if number in NO_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(other))
