"""How much memory a block of work takes: measuring the most of it, and keeping it to what is in
use.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

__all__ = ["PeakMemory", "freed_blocks_returned"]

# times what was resident before: up to that a peak tells of the work before and not of this
INHERITED = 1.05
PERIOD_S = 0.25  # a look costs well under a millisecond
M_MMAP_THRESHOLD = -3  # mallopt(3)
LARGE_BYTES, LARGEST_BYTES = (
    1 << 20,
    1 << 25,
)  # the second is as far as glibc raises the threshold by itself


@contextlib.contextmanager
def freed_blocks_returned() -> Iterator[None]:
    """Within, freed blocks of a megabyte or more go back to the kernel at once.

    glibc keeps those below 32 MB for later use, in pieces between what is still in use: work that
    makes and drops one temporary per layer ends up holding as much as the whole model. Costs a page
    fault per page of each new block. Of the whole process; a C library without `mallopt` is left
    alone.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        yield
        return
    library.mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
    try:
        yield
    finally:
        library.mallopt(M_MMAP_THRESHOLD, LARGEST_BYTES)
        library.malloc_trim(0)


class PeakMemory:
    """`with PeakMemory() as peak: ...`, then `peak.bytes`: resident memory, summed over the tree of
    processes.

    The sum is sampled, and pages that processes share count in each. A peak of this process alone,
    or of one child that has ended, is exact where the kernel keeps it, so a short one between two
    samples is seen as well; what other processes of the tree hold all the while is added to the
    former. root: the process at the head of another tree to watch, by samples alone.
    """

    def __init__(self, root: int | None = None) -> None:
        self.bytes = 0
        self._root = root
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="peak-memory", daemon=True)
        self._children_before = 0
        self._before = self._beside = 0

    @property
    def own(self) -> int | None:
        """The peak, or None where this process held as much before: it is then what earlier work
        has left in it.
        """
        return self.bytes if self.bytes > INHERITED * self._before else None

    def __enter__(self) -> PeakMemory:
        if self._root is None:
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # resets our VmHWM, proc(5)
            self._beside = _others()
            self._before = self._beside + _status(os.getpid(), "VmRSS")
        self._children_before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
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
        self._look()
        if self._root is not None:
            return
        children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        largest_child = children * 1024 if children > self._children_before else 0
        own = _status(os.getpid(), "VmHWM") + min(self._beside, _others())
        self.bytes = max(self.bytes, own, largest_child)

    def _sample(self) -> None:
        while not self._stop.wait(PERIOD_S):
            self._look()

    def _look(self) -> None:
        self.bytes = max(
            self.bytes, sum(_status(pid, "VmRSS") for pid in _tree(self._root or os.getpid()))
        )


def _others() -> int:
    """What our child processes and theirs hold."""
    return sum(_status(pid, "VmRSS") for pid in _tree(os.getpid()) if pid != os.getpid())


def _tree(pid: int) -> Iterator[int]:
    yield pid
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for child in file.read_text().split():
                yield from _tree(int(child))


def _status(pid: int, name: str) -> int:
    """A field of /proc/PID/status in bytes; 0 once the process has ended."""
    with contextlib.suppress(OSError):
        match = re.search(
            rf"^{name}:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE
        )
        return int(match.group(1)) * 1024 if match else 0
    return 0
