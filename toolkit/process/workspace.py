"""The private folder of a server.

A workspace is a folder in the temporary directory. The server and everything it starts hold its
lock, so a leftover is recognised exactly: its lock is free. The name of the workspace is also the
prefix of Triton's shared-memory regions. The next start sweeps leftovers, in case even `supervise`
was killed before it could clean up.

Everybody may write to the temporary directory, so a sweep touches only what `Workspace.create` can
have made: a real folder of this user with a name of exactly that form.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from toolkit.process import supervise

__all__ = ["Workspace", "private_folder", "sweep"]

WORKSPACE_PREFIX = "toolkit-serve-"
# What tempfile.mkdtemp adds to the prefix. A name that another name begins with would match the
# shared memory of both.
WORKSPACE_NAME = re.compile(WORKSPACE_PREFIX + r"[a-z0-9_]{8}")
LOCK_FILE = "lock"
STALE_S = 60.0  # a workspace that still has no lock file after this time was abandoned


@dataclass(frozen=True, slots=True)
class Workspace:
    """The private folder of one server. lock: the open file descriptor that marks it as in use."""

    path: Path
    lock: int

    @classmethod
    def create(cls, *, inheritable: bool = False) -> Workspace:
        """Sweep the workspaces of servers that are gone, then make a new one. inheritable: the lock
        stays held after an exec.
        """
        sweep(Path(tempfile.gettempdir()))
        path = Path(tempfile.mkdtemp(prefix=WORKSPACE_PREFIX))
        (path / "tmp").mkdir()
        making = path / "making"
        lock = os.open(making, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.set_inheritable(lock, inheritable)
        making.rename(path / LOCK_FILE)
        return cls(path, lock)

    def close(self) -> None:
        """Release the lock. Processes that inherited it still hold it."""
        os.close(self.lock)


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A folder that exists until the block ends. If the process is killed before, the next server
    start sweeps it away.
    """
    workspace = Workspace.create()
    try:
        yield workspace.path
    finally:
        supervise.clean(workspace.path)
        workspace.close()


def sweep(folder: Path) -> None:
    """Remove this user's workspaces and the shared memory of servers that are gone."""
    for path in folder.glob(f"{WORKSPACE_PREFIX}*"):
        try:
            if not _is_workspace(path):
                continue
            lock = os.open(path / LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            # The folder itself may also be gone: its own server has just ended.
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > STALE_S:
                    supervise.clean(path)
            continue
        except OSError:
            continue  # it cannot be opened, so it is not known to be free
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            supervise.clean(path)
        except BlockingIOError:
            pass  # in use
        finally:
            os.close(lock)


def _is_workspace(path: Path) -> bool:
    """Whether `Workspace.create` of this user can have made this folder."""
    status = path.lstat()
    return (
        WORKSPACE_NAME.fullmatch(path.name) is not None
        and stat.S_ISDIR(status.st_mode)
        and status.st_uid == os.geteuid()
    )
