"""What the server's processes hold while they serve, and what is left of them afterwards."""

from __future__ import annotations

import contextlib
import fcntl
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from toolkit.process.workspace import LOCK_FILE, WORKSPACE_PREFIX

__all__ = ["Sample", "Watch", "leftovers", "sample_of", "stub_of", "tree"]

INTERVAL_S = 1.0
PROC = Path("/proc")
SHARED = Path("/dev/shm")
COUNTED = ("Pss_Anon:", "Pss_Shmem:")


@dataclass(frozen=True, slots=True)
class Sample:
    """The sums over a tree of processes at one time. memory: resident bytes, shared ones shared
    out (Pss), without mapped files: how much of these counts depends on who else maps them.
    """

    at_ns: int
    memory: int
    files: int
    threads: int


def tree(root: int) -> list[int]:
    """A process and all its descendants that run."""
    parents: dict[int, int] = {}
    for stat in PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
    found = [root] if root in parents else []
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found


def stub_of(root: int, model: str) -> int:
    """The Python process that runs the model."""
    for process in tree(root):
        with contextlib.suppress(OSError):
            words = (PROC / str(process) / "cmdline").read_bytes().split(b"\0")
            is_python = b"stub" in words[0] or any(b"native.worker" in word for word in words)
            if is_python and any(f"/{model}/".encode() in word for word in words):
                return process
    raise LookupError(f"no stub of {model} under process {root}")


def leftovers() -> set[str]:
    """Shared-memory regions, and folders of servers in the temporary folder; without what a running
    process uses, which may be somebody else's.
    """
    folders = list(Path(tempfile.gettempdir()).glob(f"{WORKSPACE_PREFIX}*"))
    running = tuple(folder.name for folder in folders if _is_held(folder / LOCK_FILE))
    paths = [*SHARED.iterdir(), *folders]
    return {str(path) for path in paths if not path.name.startswith(running)} - _mapped()


def _mapped() -> set[str]:
    """The shared-memory regions that some process maps."""
    regions = set()
    for maps in PROC.glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            lines = (line.split() for line in maps.read_text().splitlines())
            regions |= {line[5] for line in lines if line[-1].startswith(f"{SHARED}/")}
    return regions


def _is_held(lock: Path) -> bool:
    with contextlib.suppress(FileNotFoundError), lock.open("rb") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


class Watch:
    """Samples a server once a second, in a thread: `with Watch(lambda: server.pid) as watch`."""

    def __init__(self, root: Callable[[], int | None]) -> None:
        self.samples: list[Sample] = []
        self._root = root
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch")

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            with contextlib.suppress(FileNotFoundError):  # of the pid: the server has just ended
                root = self._root()
                if root is not None:
                    self.samples.append(sample_of(root))


def sample_of(root: int) -> Sample:
    """What a process and all its descendants hold now."""
    held = list(_held(tree(root)))
    return Sample(time.monotonic_ns(), *(sum(column) for column in zip(*held, strict=True)))


def _held(processes: list[int]) -> Iterator[tuple[int, int, int]]:
    yield (0, 0, 0)
    for process in processes:
        folder = PROC / str(process)
        with contextlib.suppress(OSError):  # it has ended meanwhile
            rollup = (folder / "smaps_rollup").read_text().splitlines()
            kilobytes = sum(int(line.split()[1]) for line in rollup if line.startswith(COUNTED))
            files = sum(1 for _ in (folder / "fd").iterdir())
            threads = sum(1 for _ in (folder / "task").iterdir())
            yield (1024 * kilobytes, files, threads)
