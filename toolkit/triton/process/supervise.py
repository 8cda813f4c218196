"""The small process above tritonserver: whatever becomes of whom, it stops the server and removes
what is left of it.

Run as a file (`python -I -S supervise.py PARENT_PID WORKSPACE GRACE_S [MODEL...] -- COMMAND...`),
so it starts in a few milliseconds and must import nothing but the standard library. It ends when
the server ends, when it gets SIGTERM, or when its parent is gone (kill -9 included; PARENT_PID 0:
none is watched). The server has its own process group, so that its Python stubs go with it, and
dies with this process by a parent-death signal; the stubs of a killed server become our children
and are waited for.

A stub that dies takes its model with it for good, but Triton goes on saying that it is ready while
every request fails. So the server is stopped then, with an exit code that says that it failed:
whoever runs it can see that, and start it again. Not so for the MODELs named: the others are made
to do without them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["PID_FILE", "clean"]

PID_FILE = "pid"
SHM = Path("/dev/shm")
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
LOOK_EVERY_S = 1.0
STUB_DIED = 70  # exit code; EX_SOFTWARE of sysexits.h


def clean(workspace: Path) -> None:
    """Remove a server's shared-memory regions and its private folder."""
    for region in SHM.glob(f"{workspace.name}*"):
        region.unlink(missing_ok=True)
    shutil.rmtree(workspace, ignore_errors=True)


def main(arguments: list[str]) -> int:
    parent, workspace, grace_s = int(arguments[0]), Path(arguments[1]), float(arguments[2])
    dispensable, command = (
        arguments[3 : arguments.index("--")],
        arguments[arguments.index("--") + 1 :],
    )
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def in_the_child() -> None:
        os.setpgid(0, 0)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    # One thread only, so running code between fork and exec is safe. The lock's descriptor is
    # inherited on purpose.
    server = subprocess.Popen(command, preexec_fn=in_the_child, close_fds=False)  # noqa: PLW1509
    (workspace / PID_FILE).write_text(str(server.pid))
    wanted, stubs = True, _Stubs(server.pid, dispensable)
    while wanted and server.poll() is None:
        arrived = signal.sigtimedwait(SIGNALS, 0.25)
        wanted = (
            parent in (0, os.getppid())
            and (arrived is None or arrived.si_signo == signal.SIGCHLD)
            and not stubs.one_died()
        )
    if stubs.died is not None:
        what = (
            f"supervise: a model's Python process ({stubs.died}) died; it cannot answer any more,"
            " so the server is stopped"
        )
        print(what, file=sys.stderr, flush=True)
    if server.poll() is None:
        server.terminate()
        deadline = time.monotonic() + grace_s
        while server.poll() is None and time.monotonic() < deadline:
            signal.sigtimedwait([signal.SIGCHLD], 0.1)
    with contextlib.suppress(ProcessLookupError):  # nothing is left of it
        os.killpg(server.pid, signal.SIGKILL)
    code = server.wait()
    try:
        while True:
            os.wait()
    except ChildProcessError:
        pass  # every stub is gone
    clean(workspace)
    if stubs.died is not None:
        return STUB_DIED
    return code if code >= 0 else 128 - code


class _Stubs:
    """Watches the server's children. died: the process id of one that did.

    Triton waits for a stub that it ends itself, and never for one that just dies, which therefore
    stays a zombie: one that is still there at the next look. dispensable: models whose stubs may
    die.
    """

    def __init__(self, server: int, dispensable: list[str]) -> None:
        self._dispensable = tuple(f"/{model}/" for model in dispensable)
        self._may_die: set[int] = set()
        self.died: int | None = None
        self._server = str(server)
        self._zombies: set[int] = set()
        self._next_look = 0.0

    def one_died(self) -> bool:
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_EVERY_S
            before, self._zombies = self._zombies, set(self._dead_children())
            self.died = next(iter(self._zombies & before), None)
        return self.died is not None

    def _dead_children(self) -> Iterator[int]:
        for file in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it has gone meanwhile
                state, parent = file.read_text(errors="replace").rsplit(")", 1)[1].split()[:2]
                if parent != self._server:
                    continue
                pid = int(file.parent.name)
                if state == "Z" and pid not in self._may_die:
                    yield pid
                elif state != "Z" and self._dispensable:
                    words = (file.parent / "cmdline").read_text(errors="replace")
                    if any(model in words for model in self._dispensable):
                        self._may_die.add(pid)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
