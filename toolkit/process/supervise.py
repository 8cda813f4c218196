"""The small parent process of a server. Whichever process dies first, it stops the server and
removes everything that is left of it.

It is run as a file (`python -I -S supervise.py PARENT_PID WORKSPACE GRACE_S [MODEL...] --
COMMAND...`), so that it starts in a few milliseconds. It must import only the standard library. It
ends when the server ends, when it gets SIGTERM, or when its own parent is gone, also by kill -9
(PARENT_PID 0: no parent is watched). The server has its own process group, so that its children
(Triton's Python stubs, vLLM's engine and workers) are stopped with it. A parent-death signal kills
the server if this process dies. The children of a killed server become children of this process,
which waits for them.

If a child dies, a model cannot answer any more, but Triton still reports ready while every request
fails, and leaves those that the child had taken without an answer. So this process then ends the
server at once, with an exit code for failure: whoever runs the server can see that and start it
again, and clients see their connection end. The named MODELs are an exception, since the other
models can do without them. Such a model may also beat: touch the file WORKSPACE/heartbeats/PID
again and again while it is well. If it stops, its process stands still and is killed, so that the
backend answers the calls that it has taken.

Servers leave shared memory behind when they are killed. Triton's has the workspace's name. vLLM's
has random names of Python's multiprocessing, so it is recognised by the processes that map it, as
long as they live: those that run in the workspace. A server that has its own working directory is
left alone in this respect.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["HEARTBEATS", "PID_FILE", "STUB_DIED", "clean"]

PID_FILE = "pid"
HEARTBEATS = "heartbeats"  # in the workspace: a file per process that beats
SHM = Path("/dev/shm")
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
KILLED_S = 5.0  # how long a killed process may take to end
STUB_CHECK_INTERVAL_S = 1.0
# After so many checks without a beat a process stands still. On a busy machine one may be late, and
# nothing starts a killed draft again.
CHECKS_WITHOUT_BEAT = 10
# For what the other models have just answered. The dead one's requests would be waited for in vain:
# with the usual grace their clients were told after 17 seconds.
DEAD_GRACE_S = 0.5
SHM_CHECK_INTERVAL_S = 5.0  # reading the maps of vLLM's four processes takes some milliseconds
# Shared memory that vLLM makes: Python's multiprocessing, and its own exchange between CPUs. Other
# files there, such as a model's weights, belong to the user.
SHM_NAMES = ("psm_*", "sem.mp-*", "*cpushm*")
# Of each thread of the server, reserved and not taken. Triton (24.10) reads a body that is called a
# form, as `curl -d` calls every body, on the stack of an HTTP thread: with the usual 8 MiB one of
# 5 MB ends the server; with this one 32 MB is read, and refused by the model.
STACK_BYTES = 64 << 20
STUB_DIED = 70  # exit code: EX_SOFTWARE of sysexits.h


def clean(workspace: Path) -> None:
    """Remove a server's shared-memory regions and its private folder, and end processes that still
    run in that folder.
    """
    processes = _processes_in(workspace)
    # Up to the separator, so that the regions of a longer name are not taken for its own.
    regions = {*SHM.glob(f"{workspace.name}-*"), *_shared_memory_of(processes)}
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    deadline = time.monotonic() + KILLED_S
    while _processes_in(workspace) and time.monotonic() < deadline:
        time.sleep(0.01)
    for region in regions:
        region.unlink(missing_ok=True)
    shutil.rmtree(workspace, ignore_errors=True)


def _processes_in(workspace: Path) -> list[int]:
    """The processes whose working directory is the workspace."""
    processes = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or belongs to another user
            folder = link.readlink()
            if workspace == folder or workspace in folder.parents:
                processes.append(int(link.parent.name))
    return processes


def _shared_memory_of(processes: list[int]) -> set[Path]:
    """The files in /dev/shm that these processes map, of those that vLLM makes, and those that
    Intel's OpenMP names by process.

    A file is recognised by its inode: a semaphore is mapped under another name, which is gone.
    """
    regions, inodes = set(), set()
    for process in processes:
        regions |= set(SHM.glob(f"__KMP_REGISTERED_LIB_{process}_*"))
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process}/maps").read_text(errors="replace").splitlines():
                _, _, _, _, inode, *path = line.split(maxsplit=5)
                if path and path[0].startswith(f"{SHM}/"):
                    inodes.add(int(inode))
    for name in SHM_NAMES:
        for file in SHM.glob(name):
            with contextlib.suppress(OSError):  # it has gone meanwhile
                if file.stat().st_ino in inodes:
                    regions.add(file)
    return regions


def main(arguments: list[str]) -> int:
    parent, workspace, grace_s = int(arguments[0]), Path(arguments[1]), float(arguments[2])
    separator = arguments.index("--")
    dispensable, command = arguments[3:separator], arguments[separator + 1 :]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def in_the_child() -> None:
        os.setpgid(0, 0)
        _, most = resource.getrlimit(resource.RLIMIT_STACK)
        stack = STACK_BYTES if most == resource.RLIM_INFINITY else min(STACK_BYTES, most)
        resource.setrlimit(resource.RLIMIT_STACK, (stack, most))
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    # This process has one thread, so running code between fork and exec is safe. The server
    # inherits the lock's descriptor on purpose.
    server = subprocess.Popen(command, preexec_fn=in_the_child, close_fds=False)  # noqa: PLW1509
    (workspace / PID_FILE).write_text(str(server.pid))
    os.chdir("/")  # this process is none of those that run in the workspace
    is_wanted, stubs = True, _Stubs(server.pid, dispensable, workspace / HEARTBEATS)
    regions: set[Path] = set()
    next_shm_check = 0.0
    while is_wanted and server.poll() is None:
        received = signal.sigtimedwait(SIGNALS, 0.25)
        if time.monotonic() >= next_shm_check:
            next_shm_check = time.monotonic() + SHM_CHECK_INTERVAL_S
            regions |= _shared_memory_of(_processes_in(workspace))
        is_wanted = (
            parent in (0, os.getppid())
            and (received is None or received.si_signo == signal.SIGCHLD)
            and not stubs.has_died()
        )
    if stubs.dead_pid is not None:
        message = (
            f"supervise: a model's Python process ({stubs.dead_pid}) died; the model cannot answer"
            " any more, so the server is stopped"
        )
        print(message, file=sys.stderr, flush=True)
    regions |= _shared_memory_of(_processes_in(workspace))
    if server.poll() is None:
        server.terminate()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGCONT)  # a paused server would not see it
        grace_s = grace_s if stubs.dead_pid is None else min(grace_s, DEAD_GRACE_S)
        deadline = time.monotonic() + grace_s
        while server.poll() is None and time.monotonic() < deadline:
            signal.sigtimedwait([signal.SIGCHLD], 0.1)
    with contextlib.suppress(ProcessLookupError):  # the whole group may be gone already
        os.killpg(server.pid, signal.SIGKILL)
    code = server.wait()
    try:
        while True:
            os.wait()
    except ChildProcessError:
        pass  # all children have ended
    for region in regions:
        region.unlink(missing_ok=True)
    clean(workspace)
    if stubs.dead_pid is not None:
        return STUB_DIED
    return code if code >= 0 else 128 - code


class _Stubs:
    """Watches the server's children. dead_pid: the process id of a stub that died. dispensable:
    models whose stubs may die. heartbeats: the folder where they beat.

    Triton waits for a stub that it ends itself, but not for one that just dies. Such a stub stays a
    zombie: it is still there at the next check.
    """

    def __init__(self, server: int, dispensable: list[str], heartbeats: Path) -> None:
        self._dispensable = tuple(f"/{model}/" for model in dispensable)
        self._may_die: set[int] = set()
        self.dead_pid: int | None = None
        self._server = str(server)
        self._zombies: set[int] = set()
        self._next_check = 0.0
        self._heartbeats = heartbeats
        self._beats: dict[int, tuple[int, int]] = {}  # last beat, and checks since

    def has_died(self) -> bool:
        """Whether a stub died that the server needs."""
        if time.monotonic() >= self._next_check:
            self._next_check = time.monotonic() + STUB_CHECK_INTERVAL_S
            before, self._zombies = self._zombies, set(self._dead_children())
            self.dead_pid = next(iter(self._zombies & before), None)
            self._kill_what_stands_still()
        return self.dead_pid is not None

    def _kill_what_stands_still(self) -> None:
        """Kill a process that beat once and does so no more, unless the server is paused, too."""
        for pid in self._may_die:
            with contextlib.suppress(OSError):  # it does not beat, or has ended
                beat = (self._heartbeats / str(pid)).stat().st_mtime_ns
                last, checks = self._beats.get(pid, (0, 0))
                is_paused = _state(int(self._server)) == "T"
                checks = checks + 1 if beat == last and not is_paused else 0
                self._beats[pid] = beat, checks
                if checks == CHECKS_WITHOUT_BEAT and _state(pid) != "Z":
                    message = (
                        f"supervise: a model's Python process ({pid}) stands still and is killed;"
                        " the other models can do without it"
                    )
                    print(message, file=sys.stderr, flush=True)
                    os.kill(pid, signal.SIGKILL)

    def _dead_children(self) -> Iterator[int]:
        for file in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # the process has ended meanwhile
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


def _state(pid: int) -> str:
    """The state of a process in /proc. Raises OSError if there is none."""
    text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    return text.rsplit(")", 1)[1].split()[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
