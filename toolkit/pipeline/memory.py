"""Measure the peak memory of a block of work, and return freed memory to the kernel."""

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

# A peak must exceed the memory that was resident before by this factor. Otherwise it says something
# about the earlier work and nothing about the present one.
MIN_PEAK_FACTOR = 1.05
SAMPLE_PERIOD_S = 0.25  # a sample takes well under a millisecond
M_MMAP_THRESHOLD = -3  # mallopt(3)
LOW_THRESHOLD_BYTES = 1 << 20
DEFAULT_MAX_THRESHOLD_BYTES = 1 << 25  # glibc raises the threshold by itself up to this


@contextlib.contextmanager
def freed_blocks_returned() -> Iterator[None]:
    """Within, freed blocks of a megabyte or more go back to the kernel at once.

    By default glibc keeps freed blocks below 32 MB for later use, scattered between blocks in use:
    work that makes and drops one temporary per layer ends up holding as much as the whole model.
    The price is a page fault per page of each new block. This affects the whole process; with a C
    library without `mallopt` it does nothing.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        yield
        return
    library.mallopt(M_MMAP_THRESHOLD, LOW_THRESHOLD_BYTES)
    try:
        yield
    finally:
        library.mallopt(M_MMAP_THRESHOLD, DEFAULT_MAX_THRESHOLD_BYTES)
        library.malloc_trim(0)


class PeakMemory:
    """Measure the peak of resident memory, summed over the tree of processes, in bytes:
    `with PeakMemory() as peak: ...`, then `peak.bytes`.

    The sum is sampled; a page that several processes share counts once for each. The kernel itself
    keeps the peak of this process and the largest peak of children that have ended, so these are
    exact even if they fall between two samples. To the peak of this process, the memory that the
    other processes of the tree hold all the time is added.

    root: watch the tree below this process instead, by samples only.
    """

    def __init__(self, root: int | None = None) -> None:
        self.bytes = 0
        self._root = root
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="peak-memory", daemon=True)
        self._children_before = 0
        self._before = self._children_bytes = 0

    @property
    def of_this_work(self) -> int | None:
        """The peak in bytes. None if the processes held about as much before: then the peak says
        nothing about this work.
        """
        return self.bytes if self.bytes > MIN_PEAK_FACTOR * self._before else None

    def __enter__(self) -> PeakMemory:
        if self._root is None:
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # resets our VmHWM, proc(5)
            self._children_bytes = _children_bytes()
            self._before = self._children_bytes + _status_bytes(os.getpid(), "VmRSS")
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
        self._take_sample()
        if self._root is not None:
            return
        children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        largest_child = children * 1024 if children > self._children_before else 0
        held_by_children = min(self._children_bytes, _children_bytes())
        this_process = _status_bytes(os.getpid(), "VmHWM") + held_by_children
        self.bytes = max(self.bytes, this_process, largest_child)

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_PERIOD_S):
            self._take_sample()

    def _take_sample(self) -> None:
        processes = process_tree(self._root or os.getpid())
        self.bytes = max(self.bytes, sum(_status_bytes(pid, "VmRSS") for pid in processes))


def _children_bytes() -> int:
    """Resident memory of all processes below this one."""
    return sum(
        _status_bytes(pid, "VmRSS") for pid in process_tree(os.getpid()) if pid != os.getpid()
    )


def process_tree(pid: int) -> Iterator[int]:
    """A process and all below it."""
    yield pid
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            for child in file.read_text().split():
                yield from process_tree(int(child))


def _status_bytes(pid: int, name: str) -> int:
    """A field of /proc/PID/status, in bytes. 0 if the process has ended."""
    with contextlib.suppress(OSError):
        match = re.search(
            rf"^{name}:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE
        )
        return int(match.group(1)) * 1024 if match else 0
    return 0
