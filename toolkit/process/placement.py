"""Cores of its own for the thread that computes, where there are more cores than it needs.

A thread that has to send a chunk, in this process, in tritonserver or in a client on the same
machine, may be woken on the core where a forward is running. The scheduler lets the forward go on
until its next tick, up to 4 ms, so the chunk is late although another core is idle. Therefore the
computing threads get cores that no other thread of this process or of tritonserver may use.

Several servers can be on one machine, so a core is claimed: by a name in Linux's abstract namespace
of sockets, which goes with the process, however that ends. A server that cannot claim enough cores
leaves its threads to the scheduler. So does one that may use no more cores than it computes with
(`engine.threads`, or `taskset` around the server).

What else runs on the machine does not know of this. So our own clients and the gateway look for
claims, and stay off the cores that a server computes on (`Visitor`).

The threads that send pass chunks on to others, on the cores that are left: to tritonserver, and to
clients on this machine. Where those have little time to spare, a queue grows behind a disturbance,
wherever the scheduler lets it. It has to grow before the threads that send, since there chunks that
wait are joined to one. So these give way (`give_way`).

Beside other busy processes a core of one's own is a trap: the thread waits for it while another
core may be idle. So the computing thread is observed, and a placement that makes it wait is given
up.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "Crowding",
    "Placement",
    "Visitor",
    "claim_cores",
    "claimed_cores",
    "give_way",
    "keep_off",
    "let_on",
    "move_thread",
    "off_claimed_cores",
    "times_of_thread",
    "tritonserver_above",
]

WINDOW_NS = 2_000_000_000
MAX_WAITING = 0.1  # of the time in which the thread could run
MIN_BUSY = 0.1  # of a window; with less to do, the share says nothing
NAME = "\0toolkit-forward-core-{core}"
# As Linux lists it: "@" in the place of the zero.
LISTED_NAME = re.compile(NAME.replace("\0", "@").format(core=r"(\d+)") + "$", re.MULTILINE)
SOCKETS = Path("/proc/net/unix")


@dataclass(frozen=True, slots=True)
class Placement:
    """claims: sockets that hold the names; the claim ends when they are closed."""

    computing: frozenset[int]  # cores
    other: frozenset[int]
    claims: tuple[socket.socket, ...]

    def close(self) -> None:
        for claim in self.claims:
            claim.close()


def claim_cores(count: int, allowed: Collection[int]) -> Placement | None:
    """Claim `count` of the cores that this process may use; None if no other would be left, or if
    too few are free. The last ones are taken first, since the first core serves most interrupts.
    """
    computing: list[int] = []
    claims: list[socket.socket] = []
    for core in sorted(allowed, reverse=True) if count < len(allowed) else ():
        if len(computing) == count:
            break
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(NAME.format(core=core))
        except OSError:
            claim.close()
            continue
        computing.append(core)
        claims.append(claim)
    placement = Placement(
        frozenset(computing), frozenset(allowed) - frozenset(computing), tuple(claims)
    )
    if computing and len(computing) == count:
        return placement
    placement.close()
    return None


def claimed_cores() -> frozenset[int]:
    """The cores on which servers of this machine compute."""
    try:
        return frozenset(map(int, LISTED_NAME.findall(SOCKETS.read_text())))
    except OSError:
        return frozenset()


class Visitor:
    """A process that is no server, and stays off the cores on which servers compute."""

    def __init__(self) -> None:
        self._allowed = frozenset(os.sched_getaffinity(0))
        self._left: frozenset[int] = frozenset()

    def move(self) -> None:
        """Leave the cores that are claimed now, and use those again that no longer are. All cores
        are used if none would be left.
        """
        claimed = claimed_cores() & self._allowed
        if claimed == self._allowed:
            claimed = frozenset()
        if claimed != self._left:
            let_on(os.getpid(), self._left - claimed)
            keep_off(os.getpid(), claimed)
            self._left = claimed

    def leave(self) -> None:
        """Use all cores again."""
        if self._left:
            let_on(os.getpid(), self._left)
            self._left = frozenset()


@contextlib.contextmanager
def off_claimed_cores() -> Iterator[None]:
    """Stay off the cores on which servers compute inside."""
    visitor = Visitor()
    visitor.move()
    try:
        yield
    finally:
        visitor.leave()


def keep_off(process_id: int, cores: Collection[int]) -> None:
    """Keep all present threads of a process, and those that they will start, off these cores."""
    for task in _tasks(process_id):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or may use no others
            os.sched_setaffinity(task, os.sched_getaffinity(task) - set(cores))


def let_on(process_id: int, cores: Collection[int]) -> None:
    """Let all present threads of a process, and those that they will start, use these, too."""
    for task in _tasks(process_id):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(task, os.sched_getaffinity(task) | set(cores))


def move_thread(cores: Collection[int]) -> None:
    """Let the calling thread, and those that it will start, use these cores."""
    os.sched_setaffinity(0, cores)


def give_way() -> None:
    """Let the calling thread, and those that it will start, take a core only once the thread that
    runs there waits or its slice is over, instead of as soon as they have something to do. A policy
    that somebody else chose for this process stays.
    """
    with contextlib.suppress(OSError):  # a sandbox may forbid either
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def tritonserver_above() -> int | None:
    """The tritonserver that runs this process's model; None if something else has started it."""
    parent = os.getppid()
    try:
        name = Path(f"/proc/{parent}/comm").read_text().strip()
    except OSError:
        return None
    return parent if name == "tritonserver" else None


def _tasks(process_id: int) -> list[int]:
    try:
        return [int(task.name) for task in Path(f"/proc/{process_id}/task").iterdir()]
    except OSError:  # it has ended
        return []


def times_of_thread(thread_id: int) -> tuple[int, int]:
    """(ns that a thread of this process ran, ns that it waited for a core). Zeros if the kernel
    does not count them.
    """
    try:
        ran, waited, _ = Path(f"/proc/self/task/{thread_id}/schedstat").read_text().split()
    except OSError:
        return 0, 0
    return int(ran), int(waited)


class Crowding:
    """Judges, window by window, whether a thread waits for its core."""

    def __init__(self) -> None:
        self._start: tuple[int, int, int] | None = None

    def is_crowded(self, now_ns: int, ran_ns: int, waited_ns: int) -> bool:
        """Call it often, with the thread's times so far. False until a window is over."""
        if self._start is None:
            self._start = now_ns, ran_ns, waited_ns
        began_ns, ran_before_ns, waited_before_ns = self._start
        window_ns = now_ns - began_ns
        if window_ns < WINDOW_NS:
            return False
        self._start = now_ns, ran_ns, waited_ns
        ran, waited = ran_ns - ran_before_ns, waited_ns - waited_before_ns
        return ran + waited > MIN_BUSY * window_ns and waited > MAX_WAITING * (ran + waited)
