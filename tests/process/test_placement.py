"""Cores for the computing thread: claimed once, given back, and never the last one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from toolkit.process.placement import (
    Crowding,
    claim_cores,
    claimed_cores,
    give_way,
    keep_off,
    let_on,
    move_thread,
    times_of_thread,
    tritonserver_above,
)

# Numbers that no machine has, so that a server on this machine is not in the way.
CORES = {70_001, 70_002, 70_003}


def test_a_core_is_claimed_once_and_given_back() -> None:
    first, second, third = (claim_cores(1, CORES) for _ in range(3))
    assert first is not None
    assert second is not None
    assert third is not None
    assert [placement.computing for placement in (first, second, third)] == [
        {70_003},
        {70_002},
        {70_001},
    ]
    assert first.other == {70_001, 70_002}
    assert claim_cores(1, CORES) is None
    second.close()
    again = claim_cores(1, CORES)
    assert again is not None
    assert again.computing == {70_002}
    for placement in (first, third, again):
        placement.close()


@pytest.mark.parametrize("count", [3, 4])
def test_one_core_is_left_for_the_others(count: int) -> None:
    assert claim_cores(count, CORES) is None
    two = claim_cores(2, CORES)  # nothing stayed claimed
    assert two is not None
    assert (two.computing, two.other) == ({70_002, 70_003}, {70_001})
    assert claim_cores(2, CORES) is None  # one is free, which is too few
    one = claim_cores(1, CORES)  # and it was given back
    assert one is not None
    one.close()
    two.close()


def test_a_claim_ends_with_its_process() -> None:
    program = (
        "import os, signal; from toolkit.process.placement import claim_cores\n"
        "kept = claim_cores(1, {80_001, 80_002}); print(sorted(kept.computing), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout == "[80002]\n"
    placement = claim_cores(1, {80_001, 80_002})
    assert placement is not None
    assert placement.computing == {80_002}
    placement.close()


def test_only_the_calling_thread_moves() -> None:
    allowed = os.sched_getaffinity(0)
    seen = []

    def run() -> None:
        move_thread({max(allowed)})
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [{max(allowed)}]
    assert os.sched_getaffinity(0) == allowed


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_all_threads_of_another_process_leave_cores_and_come_back() -> None:
    program = (
        "import threading, sys; done = threading.Event()\n"
        "threading.Thread(target=done.wait).start(); print('ready', flush=True)\n"
        "sys.stdin.read(); done.set()"
    )
    allowed = os.sched_getaffinity(0)
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        tasks = [int(task.name) for task in Path(f"/proc/{process.pid}/task").iterdir()]
        assert len(tasks) == 2

        def seen() -> list[set[int]]:
            return [os.sched_getaffinity(task) for task in tasks]

        keep_off(process.pid, {max(allowed)})
        assert seen() == [allowed - {max(allowed)}] * 2
        keep_off(process.pid, allowed)  # it has to have some
        assert seen() == [allowed - {max(allowed)}] * 2
        let_on(process.pid, {max(allowed)})
        assert seen() == [allowed] * 2
        process.communicate()
    keep_off(process.pid, {max(allowed)})  # it is gone


def test_only_tritonserver_is_moved() -> None:
    assert tritonserver_above() is None  # these tests run elsewhere


S = 1_000_000_000


def policies_after(chosen: int) -> list[int]:
    """Scheduling policies of a thread that gives way, of one that it starts, and of this one."""
    policies = []

    def inner() -> None:
        policies.append(os.sched_getscheduler(0))

    def outer() -> None:
        os.sched_setscheduler(0, chosen, os.sched_param(0))
        give_way()
        policies.append(os.sched_getscheduler(0))
        thread = threading.Thread(target=inner)
        thread.start()
        thread.join()

    thread = threading.Thread(target=outer)
    thread.start()
    thread.join()
    return [*policies, os.sched_getscheduler(0)]


def test_a_thread_gives_way_alone() -> None:
    here = os.sched_getscheduler(0)
    assert policies_after(os.SCHED_OTHER) == [os.SCHED_BATCH, os.SCHED_BATCH, here]


def test_a_policy_that_was_chosen_stays() -> None:
    assert policies_after(os.SCHED_IDLE)[:2] == [os.SCHED_IDLE, os.SCHED_IDLE]


def test_a_thread_that_waits_for_its_core_is_crowded() -> None:
    crowding = Crowding()
    assert not crowding.is_crowded(0, 7 * S, 3 * S)  # what was before does not count
    assert not crowding.is_crowded(1 * S, 7 * S, 4 * S)  # the window is not over
    assert crowding.is_crowded(2 * S, 8 * S, 4 * S)
    assert not crowding.is_crowded(4 * S, 9 * S + S // 2, 4 * S + S // 10)  # 6 % of the time
    assert crowding.is_crowded(6 * S, 11 * S, 4 * S + S // 2)


def test_an_idle_thread_is_not_crowded() -> None:
    crowding = Crowding()
    crowding.is_crowded(0, 0, 0)
    assert not crowding.is_crowded(2 * S, S // 20, S // 10)


def test_the_times_of_a_thread_are_counted_by_the_system() -> None:
    before, _ = times_of_thread(threading.get_native_id())
    assert sum(range(2_000_000)) > 0
    after, _ = times_of_thread(threading.get_native_id())
    assert after > before > 0
    assert times_of_thread(1 << 30) == (0, 0)


def test_claims_are_seen_by_other_processes() -> None:
    placement = claim_cores(2, CORES)
    assert placement is not None
    listed = "from toolkit.process.placement import claimed_cores; print(*sorted(claimed_cores()))"
    done = subprocess.run(
        [sys.executable, "-c", listed], capture_output=True, text=True, check=True
    )
    assert {70_002, 70_003} <= set(map(int, done.stdout.split()))
    placement.close()
    assert not claimed_cores() & CORES


# The claims have names of their own, so that servers which run meanwhile do not take part.
VISIT = """
import os, re, threading
from toolkit.process import placement as module
from toolkit.process.placement import Visitor, claim_cores, off_claimed_cores
mine = f"toolkit-visit-{os.getpid()}-core-"
module.NAME = f"\\0{mine}{{core}}"
module.LISTED_NAME = re.compile(rf"@{mine}(\\d+)$", re.MULTILINE)
allowed, ready, done = os.sched_getaffinity(0), threading.Event(), threading.Event()
other = threading.Thread(target=lambda: (ready.set(), done.wait()), daemon=True)
other.start(); ready.wait()
def cores():
    return [os.sched_getaffinity(task) for task in (0, other.native_id)]
visitor = Visitor()
visitor.move()
assert cores() == [allowed] * 2, cores()
placement = claim_cores(1, allowed)
core = min(placement.computing)
visitor.move()
assert cores() == [allowed - {core}] * 2, cores()
visitor.move()
placement.close()
visitor.move()
assert cores() == [allowed] * 2, cores()
placement = claim_cores(1, allowed)
with off_claimed_cores():
    assert cores() == [allowed - placement.computing] * 2
assert cores() == [allowed] * 2
placement.close()
# Nothing else is left: all cores are used.
os.sched_setaffinity(0, {core})
placement = claim_cores(1, allowed)
alone = Visitor()
alone.move()
assert os.sched_getaffinity(0) == {core}
done.set()
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_visitor_leaves_the_cores_that_are_claimed_and_comes_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", VISIT], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
