"""When requests are sent: in an open loop, on a schedule that does not depend on the server; in a
closed loop, a fixed number at a time.

The latencies of an open loop start when a request was due. So a stall of the server lengthens every
request that waits for it, and a client that sends late cannot hide the delay. The delay of the
client itself is the lag, which is reported. A closed loop sends nothing new while the server
stalls, so its latencies look better than they are; it measures throughput at a concurrency.

The schedules are pure functions. To run one takes a transport and the encoded requests. The garbage
collector is off during a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.bench.prompts import Prompt, name_of, numbered
from toolkit.bench.timerfd import Alarm
from toolkit.bench.transports import Exchange, Transport, too_many_files
from toolkit.errors import UsageError
from toolkit.process.placement import off_claimed_cores

__all__ = ["constant", "poisson", "read_trace", "run_closed", "run_open", "undisturbed", "uniquely"]

START_DELAY_S = 0.05  # between the call and the first request of an open loop
# A request is prepared this long before it is due. Preparing takes a tenth of it, unless the event
# loop is busy with answers.
LEAD_NS = 2_000_000
# Requests prepared at a time, so that a request that becomes due does not wait for many others.
PREPARED_AT_A_TIME = 8
NS_PER_S = 1_000_000_000
MAX_TRACE_S = 1e12  # in nanoseconds it has to fit into 64 bits


def poisson(rate: float, count: int, seed: int = 0) -> tuple[int, ...]:
    """`count` arrivals in ns after the start. The gaps are independent and exponential, with a
    mean of 1 / rate seconds.
    """
    gaps = np.random.default_rng(seed).exponential(1 / rate, size=count)
    return tuple(int(at * NS_PER_S) for at in np.cumsum(gaps))


def constant(rate: float, count: int) -> tuple[int, ...]:
    """`count` arrivals in ns after the start, 1 / rate seconds apart."""
    return tuple(round(i / rate * NS_PER_S) for i in range(count))


def read_trace(path: Path) -> tuple[int, ...]:
    """Read the arrivals of a trace file, in ns after the first one.

    A line is a number of seconds, or a JSON object with a `timestamp` in ms, which is the format of
    the published Mooncake traces. Raises UsageError, which names the line that cannot be used.
    """
    hint = (
        "Write one arrival in seconds per line, or one JSON object with a `timestamp` in"
        " milliseconds."
    )
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the trace cannot be read: {error}", where=path, hint=hint) from error
    seconds: list[float] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            at = data["timestamp"] / 1000 if isinstance(data, dict) else float(data)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise UsageError("no arrival time", where=f"{path}:{number}", hint=hint) from error
        if not abs(at) < MAX_TRACE_S or (seconds and at < seconds[-1]):
            raise UsageError(
                f"{at:g} s is no time after the arrival before it",
                where=f"{path}:{number}",
                hint=hint,
            )
        seconds.append(at)
    if not seconds:
        raise UsageError("no arrivals in this file", where=path, hint=hint)
    return tuple(round((at - seconds[0]) * NS_PER_S) for at in seconds)


def uniquely(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """`count` prompts, all different, since a server may answer a known prompt from its cache.

    The prompts are taken in turn. From the second use on, a prompt gets a number in front, which
    changes every prefix of it.
    """
    seen: set[str] = set()
    unique: list[Prompt] = []
    for i in range(count):
        prompt = fresh = prompts[i % len(prompts)]
        use = i // len(prompts)
        while name_of(fresh) in seen:
            use += 1
            fresh = numbered(prompt, use)
        seen.add(name_of(fresh))
        unique.append(fresh)
    return unique


async def run_open(
    transport: Transport,
    requests: Sequence[Any],
    arrivals: Sequence[int],
    on_done: Callable[[], None] = lambda: None,
) -> tuple[list[Exchange], list[int]]:
    """Send each request when it is due, however many are in flight. Returns (exchanges, due times
    in ns), both in the order of the requests.

    A request is prepared and has its connection LEAD_NS before it is due, so that at its time it
    only has to be written. Raises StageError if the process has no file descriptor left for the
    timer. An exception of the transport ends the run.
    """
    tasks: list[asyncio.Task[Exchange]] = []
    go = [asyncio.Event() for _ in requests]
    all_sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    released = 0

    async def send(i: int) -> Exchange:
        try:
            exchange = await transport.exchange(requests[i], go[i])
        except Exception as error:
            if not all_sent.done():
                all_sent.set_exception(error)
            raise
        # A request that failed before it was due counts as failed when it was due: its lag and its
        # latency are never negative.
        exchange.sent_ns = max(exchange.sent_ns, due[i])
        exchange.ended_ns = max(exchange.ended_ns, due[i])
        on_done()
        return exchange

    def ring() -> None:
        nonlocal released
        now = time.monotonic_ns()
        for i in range(len(tasks), min(len(tasks) + PREPARED_AT_A_TIME, len(due))):
            if due[i] - LEAD_NS > now:
                break
            tasks.append(asyncio.create_task(send(i)))
        while released < len(tasks) and due[released] <= now:
            go[released].set()
            released += 1
        if released < len(due):
            prepare_ns = due[len(tasks)] - LEAD_NS if len(tasks) < len(due) else due[-1]
            alarm.set(min(due[released], prepare_ns))
        elif not all_sent.done():
            all_sent.set_result(None)

    with undisturbed(), _alarm(ring) as alarm:
        start = time.monotonic_ns() + int(START_DELAY_S * NS_PER_S)
        due = [start + at for at, _ in zip(arrivals, requests, strict=True)]
        try:
            ring()
            await all_sent
            return list(await asyncio.gather(*tasks)), due
        finally:  # if the run ends early, no task may continue
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def _alarm(ring: Callable[[], None]) -> Iterator[Alarm]:
    with contextlib.ExitStack() as stack:
        try:
            alarm = stack.enter_context(Alarm(ring))
        except OSError as error:
            raise too_many_files(error) from error
        yield alarm


async def run_closed(
    transport: Transport,
    requests: Sequence[Any],
    concurrency: int,
    on_done: Callable[[], None] = lambda: None,
) -> list[Exchange]:
    """Keep `concurrency` requests in flight until all are done. Returns the exchanges in the order
    of the requests.
    """
    done: list[Exchange | None] = [None] * len(requests)
    waiting = iter(range(len(requests)))

    async def worker() -> None:
        for i in waiting:
            done[i] = await transport.exchange(requests[i])
            on_done()

    with undisturbed():
        await asyncio.gather(*(worker() for _ in range(min(concurrency, len(requests)))))
    return [exchange for exchange in done if exchange is not None]


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Turn garbage collection off inside: a full collection takes tens of milliseconds in a
    process that has imported many modules. And stay off the cores on which a server of this machine
    computes, as a client on another machine would.
    """
    if not gc.isenabled():
        yield
        return
    gc.collect()
    gc.disable()
    try:
        with off_claimed_cores():
            yield
    finally:
        gc.enable()
