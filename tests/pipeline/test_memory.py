"""Freed memory really leaves the process. This is measured in a separate process, since it concerns
the C library's heap.
"""

from __future__ import annotations

import subprocess
import sys

from toolkit.pipeline.memory import PeakMemory

PROGRAM = """
import ctypes, contextlib, sys
from pathlib import Path
from toolkit.pipeline.memory import freed_blocks_returned

def held():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1])

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
libc.free(libc.malloc(16 << 20))  # glibc now serves up to 16 MB from its heap
with freed_blocks_returned() if sys.argv[1] == "within" else contextlib.nullcontext():
    before = held()
    small = []
    for _ in range(20):  # what stays lies between what goes
        large = libc.malloc(4 << 20)
        ctypes.memset(large, 1, 4 << 20)
        small.append(libc.malloc(1 << 18))
        ctypes.memset(small[-1], 1, 1 << 18)
        small.append(large)
    for large in small[1::2]:
        libc.free(large)
    print(held() - before)
"""


def kept_kb(how: str) -> int:
    return int(
        subprocess.run(
            [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True
        ).stdout
    )


def test_freed_blocks_leave_the_process() -> None:
    assert kept_kb("within") < 10_000  # 5 MB of them are still in use
    assert kept_kb("without") > 40_000  # the heap keeps most of 80 MB: what the block is there for


def test_a_short_peak_is_seen_beside_a_child_that_holds_more() -> None:
    """The child is like a server that runs all the time: the peak comes on top of its memory."""
    holding = "import sys; held = bytearray(300_000_000); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", holding], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        with PeakMemory() as idle:
            pass
        with PeakMemory() as short:
            bytearray(200_000_000)
        child.stdin.close()
    assert idle.of_this_work is None
    assert short.of_this_work is not None
    assert short.of_this_work > idle.bytes + 150_000_000
