from __future__ import annotations

import asyncio
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kstest

from toolkit.bench.arrivals import constant, poisson, read_trace, run_closed, run_open, uniquely
from toolkit.bench.transports import Exchange, Go
from toolkit.errors import StageError, UsageError

NS = 1_000_000_000
TRIES = 5  # of what a machine that is busy with something else can spoil, but not bring about


def lateness_ns(exchanges: list[Exchange], due: list[int]) -> list[int]:
    return [exchange.sent_ns - at for exchange, at in zip(exchanges, due, strict=True)]


class Held:
    """A transport that takes as many seconds as the request says, and knows how many are on
    their way.
    """

    protocol = model = address = "held"

    def __init__(self) -> None:
        self.now = self.most = 0

    async def exchange(self, seconds: float, go: Go = None) -> Exchange:
        if go is not None:
            await go.wait()
        done = Exchange(sent_ns=time.monotonic_ns())
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(seconds)
        self.now -= 1
        done.ended_ns = time.monotonic_ns()
        return done

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def test_poisson_gaps_are_exponential_at_the_rate() -> None:
    arrivals = np.asarray(poisson(50.0, 20_000, seed=3)) / NS
    gaps = np.diff(arrivals, prepend=0.0)
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.03)
    assert kstest(gaps, "expon", args=(0, 1 / 50)).pvalue > 1e-4
    assert poisson(50.0, 9, seed=1) == poisson(50.0, 9, seed=1)
    assert poisson(50.0, 9, seed=1) != poisson(50.0, 9, seed=2)


def test_constant_arrivals_do_not_drift() -> None:
    assert constant(3.0, 4) == (0, 333_333_333, 666_666_667, NS)


@pytest.mark.parametrize(
    "text",
    [
        "0.5\n1\n\n2.25\n",
        '{"timestamp": 500}\n{"timestamp": 1000, "input_length": 3}\n{"timestamp": 2250}\n',
    ],
)
def test_traces_start_at_their_first_arrival(tmp_path: Path, text: str) -> None:
    (tmp_path / "trace").write_text(text)
    assert read_trace(tmp_path / "trace") == (0, NS // 2, 1_750_000_000)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        ("1\n0.5\n", ":2"),
        ("1\nsoon\n", ":2"),
        ('{"at": 3}\n', ":1"),
        ("1\nnan\n", ":2"),
        ("[1]\n", ":1"),
        ("0\n1e300\n", ":2"),
        ('{"timestamp": 1' + 400 * "0" + "}\n", ":1"),
        ("[" * 100_000, ":1"),
    ],
    ids=range(9),
)
def test_a_trace_that_cannot_be_used_is_refused_with_its_line(
    tmp_path: Path, text: str, line: str
) -> None:
    (tmp_path / "trace").write_text(text)
    with pytest.raises(UsageError, match=f"trace{line}: "):
        read_trace(tmp_path / "trace")


def test_a_trace_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_trace(tmp_path / "nothing")


@given(st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=5), st.integers(1, 40))
def test_no_prompt_is_sent_twice(prompts: list[str], count: int) -> None:
    unique = uniquely(prompts, count)
    assert len(unique) == len(set(unique)) == count
    assert all(got.endswith(prompts[i % len(prompts)]) for i, got in enumerate(unique))


def test_an_open_loop_does_not_wait_for_a_server_that_stalls() -> None:
    async def go() -> tuple[list[Exchange], list[int]]:
        return await run_open(Held(), [0.5, 0.0, 0.0, 0.0], [0, 10_000_000, 20_000_000, 30_000_000])

    exchanges, due = asyncio.run(go())
    assert [at - due[0] for at in due] == [0, 10_000_000, 20_000_000, 30_000_000]
    assert max(one.ended_ns for one in exchanges[1:]) < exchanges[0].ended_ns
    assert all(late >= 0 for late in lateness_ns(exchanges, due))


def test_requests_that_are_due_together_leave_together() -> None:
    transport = Held()
    asyncio.run(run_open(transport, [0.2] * 10, [0] * 10))
    assert transport.most == 10


def test_a_request_is_made_ready_before_its_time_and_sent_at_it() -> None:
    def are_ready_in_time() -> bool:
        ready: list[int] = []

        class Noting(Held):
            async def exchange(self, seconds: float, go: Go = None) -> Exchange:
                ready.append(time.monotonic_ns())
                return await super().exchange(seconds, go)

        _, due = asyncio.run(run_open(Noting(), [0.0] * 3, [0, 40_000_000, 80_000_000]))
        return all(at < time_due for at, time_due in zip(ready, due, strict=True))

    assert any(are_ready_in_time() for _ in range(TRIES))


def test_what_fails_before_its_time_has_no_time_to_its_credit() -> None:
    class Refused(Held):
        async def exchange(self, seconds: float, go: Go = None) -> Exchange:
            return Exchange(1, 1, failure="refused")  # long before, however slow the machine

    exchanges, due = asyncio.run(run_open(Refused(), [0.0] * 2, [0, 20_000_000]))
    assert lateness_ns(exchanges, due) == [0, 0] and [one.ended_ns for one in exchanges] == due


def test_what_failed_later_has_ended_then() -> None:
    class Hanging(Held):
        async def exchange(self, seconds: float, go: Go = None) -> Exchange:
            began = time.monotonic_ns()
            await asyncio.sleep(0.05)  # for a connection
            return Exchange(began, time.monotonic_ns(), failure="no connection")

    (one,), due = asyncio.run(run_open(Hanging(), [0.0], [0]))
    assert one.sent_ns >= due[0] and one.ended_ns - due[0] > 0.04 * NS


def test_of_many_at_once_the_first_do_not_wait_for_the_last() -> None:
    class Laborious(Held):
        async def exchange(self, seconds: float, go: Go = None) -> Exchange:
            time.sleep(0.002)  # laying it out takes that
            return await super().exchange(seconds, go)

    def first_are_early() -> bool:
        exchanges, due = asyncio.run(run_open(Laborious(), [0.0] * 100, [0] * 100))
        late = lateness_ns(exchanges, due)
        return late[-1] > 0.15 * NS and max(late[:25]) < late[-1] / 2

    assert any(first_are_early() for _ in range(TRIES))


def test_a_closed_loop_keeps_its_concurrency_and_the_order_of_answers() -> None:
    transport = Held()
    seconds = [0.02, 0.001, 0.001, 0.03, 0.001, 0.001, 0.001]
    done: list[int] = []
    exchanges = asyncio.run(run_closed(transport, seconds, 3, lambda: done.append(1)))
    assert transport.most == 3 and len(done) == len(seconds)
    took = [(one.ended_ns - one.sent_ns) / NS for one in exchanges]
    assert all(spent >= asked * 0.9 for spent, asked in zip(took, seconds, strict=True))


def test_a_failing_transport_ends_the_open_loop_with_its_error() -> None:
    class Broken(Held):
        async def exchange(self, seconds: float, go: Go = None) -> Exchange:
            raise RuntimeError("a bug of ours")

    with pytest.raises(RuntimeError, match="a bug of ours"):
        asyncio.run(run_open(Broken(), [0.0, 0.0], [0, 3600 * NS]))  # at once, and not in an hour


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_an_open_loop_that_is_interrupted_leaves_nothing_on_its_way() -> None:
    async def go() -> int:
        transport, before = Held(), open_files()
        running = asyncio.create_task(run_open(transport, [60.0] * 3, [0, 0, 3600 * NS]))
        while transport.now < 2:
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert open_files() == before
        return len(asyncio.all_tasks())

    assert asyncio.run(go()) == 1


def test_without_a_descriptor_for_its_timer_an_open_loop_says_so() -> None:
    async def go() -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            await run_open(Held(), [0.0], [0])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    with pytest.raises(StageError, match=r"(?s)Too many open files.*ulimit"):
        asyncio.run(go())
