"""How requests arrive: an open loop that keeps its schedule whatever the server does, or a closed
loop of so many at a time.

An open loop is timed from when a request was due. A server that stalls then pays with every request
that waits, and a client that is late cannot hide it; how late it was is the lag, and it is
reported. A closed loop stops asking while the server stalls, so its latencies flatter; it measures
throughput at a concurrency.

Schedules are pure. Running one takes a transport and the encoded requests; the garbage collector
rests meanwhile.
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

from toolkit.bench.timerfd import Alarm
from toolkit.bench.transports import Exchange, Transport, too_many_files
from toolkit.errors import UsageError

__all__ = ["constant", "poisson", "read_trace", "run_closed", "run_open", "undisturbed", "uniquely"]

START_S = 0.05  # between the call and the first request of an open loop
LEAD_NS = (
    2_000_000  # laying out a request takes a tenth of that, unless the loop is busy with answers
)
BATCH = (
    8  # requests laid out at a time: what has become due meanwhile does not wait for more of them
)
NS = 1_000_000_000
NEVER_S = 1e12  # a clock of 64 bits has to hold it


def poisson(rate: float, count: int, seed: int = 0) -> tuple[int, ...]:
    """`count` arrivals in ns after the start: independent exponential gaps of 1 / rate seconds
    on average.
    """
    gaps = np.random.default_rng(seed).exponential(1 / rate, size=count)
    return tuple(int(at * NS) for at in np.cumsum(gaps))


def constant(rate: float, count: int) -> tuple[int, ...]:
    """`count` arrivals in ns after the start, 1 / rate seconds apart."""
    return tuple(round(i / rate * NS) for i in range(count))


def read_trace(path: Path) -> tuple[int, ...]:
    """Arrivals of a trace file, in ns after its first: a number of seconds per line, or JSON Lines
    with `timestamp` in ms.

    The latter is the form of the published Mooncake traces. Raises UsageError naming the line that
    cannot be used.
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
        if not abs(at) < NEVER_S or (seconds and at < seconds[-1]):
            raise UsageError(
                f"{at:g} s is no time after the arrival before it",
                where=f"{path}:{number}",
                hint=hint,
            )
        seconds.append(at)
    if not seconds:
        raise UsageError("no arrivals in this file", where=path, hint=hint)
    return tuple(round((at - seconds[0]) * NS) for at in seconds)


def uniquely(prompts: Sequence[str], count: int) -> list[str]:
    """`count` prompts, none twice: what a server has seen, it may answer from its cache.

    The prompts in turn; from the second use on a number stands in front, where it changes every
    prefix.
    """
    seen: set[str] = set()
    unique: list[str] = []
    for i in range(count):
        prompt = fresh = prompts[i % len(prompts)]
        use = i // len(prompts)
        while fresh in seen:
            use += 1
            fresh = f"{use}. {prompt}"
        seen.add(fresh)
        unique.append(fresh)
    return unique


async def run_open(
    transport: Transport,
    requests: Sequence[Any],
    arrivals: Sequence[int],
    on_done: Callable[[], None] = lambda: None,
) -> tuple[list[Exchange], list[int]]:
    """Send each request when it is due, however many are on their way. (exchanges, due times in
    ns), in the requests' order.

    A request is laid out, and has its connection, LEAD_NS before: what remains to be done at its
    time is to write it. Raises StageError where the process has no descriptor left to keep time
    with. What a transport raises ends the run.
    """
    tasks: list[asyncio.Task[Exchange]] = []
    go = [asyncio.Event() for _ in requests]
    all_sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    released = 0

    async def one(i: int) -> Exchange:
        try:
            exchange = await transport.exchange(requests[i], go[i])
        except Exception as error:
            if not all_sent.done():
                all_sent.set_exception(error)
            raise
        # What failed while it was made ready has failed at its time, and has neither lag nor
        # latency to its credit.
        exchange.sent_ns, exchange.ended_ns = (
            max(exchange.sent_ns, due[i]),
            max(exchange.ended_ns, due[i]),
        )
        on_done()
        return exchange

    def ring() -> None:
        nonlocal released
        now = time.monotonic_ns()
        for i in range(len(tasks), min(len(tasks) + BATCH, len(due))):
            if due[i] - LEAD_NS > now:
                break
            tasks.append(asyncio.create_task(one(i)))
        while released < len(tasks) and due[released] <= now:
            go[released].set()
            released += 1
        if released < len(due):
            next_one = due[len(tasks)] - LEAD_NS if len(tasks) < len(due) else due[-1]
            alarm.set(min(due[released], next_one))
        elif not all_sent.done():
            all_sent.set_result(None)

    with undisturbed(), _alarm(ring) as alarm:
        start = time.monotonic_ns() + int(START_S * NS)
        due = [start + at for at, _ in zip(arrivals, requests, strict=True)]
        try:
            ring()
            await all_sent
            return list(await asyncio.gather(*tasks)), due
        finally:  # where it ends before its end, nothing goes on behind its back
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
    """Keep `concurrency` requests on their way until all are done. Exchanges in the requests'
    order.
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
    """No garbage collection inside: a full one takes tens of milliseconds in a process that has
    imported much.
    """
    if not gc.isenabled():
        yield
        return
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
