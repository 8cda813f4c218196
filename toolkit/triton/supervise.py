"""The small process between us and tritonserver: whatever becomes of us, it stops the server and removes what is left of it.

Run as a file (`python -I -S supervise.py PARENT_PID WORKSPACE GRACE_S -- COMMAND...`), so it starts in a few milliseconds and
must import nothing but the standard library. It ends when the server ends, when it gets SIGTERM, or when its parent is gone
(kill -9 included). The server has its own process group, so that its Python stubs go with it, and dies with this process by a
parent-death signal; the stubs of a killed server become our children and are waited for.
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
from pathlib import Path

__all__ = ["PID_FILE", "clean"]

PID_FILE = "pid"
SHM = Path("/dev/shm")
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)


def clean(workspace: Path) -> None:
    """Remove a server's shared-memory regions and its private folder."""
    for region in SHM.glob(f"{workspace.name}*"):
        region.unlink(missing_ok=True)
    shutil.rmtree(workspace, ignore_errors=True)


def main(arguments: list[str]) -> int:
    parent, workspace, grace_s = int(arguments[0]), Path(arguments[1]), float(arguments[2])
    command = arguments[arguments.index("--") + 1 :]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def in_the_child() -> None:
        os.setpgid(0, 0)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    # One thread only, so running code between fork and exec is safe. The lock's descriptor is inherited on purpose.
    server = subprocess.Popen(command, preexec_fn=in_the_child, close_fds=False)  # noqa: PLW1509
    (workspace / PID_FILE).write_text(str(server.pid))
    wanted = True
    while wanted and server.poll() is None:
        arrived = signal.sigtimedwait(SIGNALS, 0.25)
        wanted = os.getppid() == parent and (arrived is None or arrived.si_signo == signal.SIGCHLD)
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
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
