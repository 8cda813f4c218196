"""What many clients at once do to the gateway: silent ones, slow ones, short requests, streams.

    python -m tests.benchmarks connections [--idle 2000] [--slow 1000] [--requests 10000]
                                           [--concurrency 200] [--streams 1000]

The gateway is a process of its own before a scripted server, with its default limits (256 requests
at a time); the clients are this process. A chunk comes every 100 ms, 20 in a stream. Good: every
client is answered or closed within the limits that docs/gateway.md names, and nobody else waits.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path

from tests.support.crowds import Crowd, idle, requests, slow_heads, streams
from toolkit.gateway.connections import raise_open_files

MIB = 1 << 20
PAGE_BYTES = 4096


def serve(ready: Connection, delay_s: float) -> None:
    from tests.support.gateways import MODEL, ScriptedBackend
    from toolkit.config.schema import GatewayConfig
    from toolkit.gateway.app import Gateway
    from toolkit.gateway.arms import SERVED, Arm, OneArm
    from toolkit.gateway.guard import Guard
    from toolkit.gateway.program import run

    config = GatewayConfig(stop_timeout_s=0)
    backend = ScriptedBackend(words=[" a"] * (20 if delay_s else 1), delay_s=delay_s)

    def make() -> Gateway:
        guard = Guard((), None, config.max_requests, time.monotonic)
        arms = OneArm(Arm(SERVED, backend))
        return Gateway(config, MODEL, arms, guard, log=lambda line: None)

    run(config, make, ready=ready.send)


def memory_mib(pid: int) -> float:
    """Of a process, resident."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES / MIB


async def beside(url: str, crowd: asyncio.Future[Crowd], pid: int) -> tuple[float, float, float]:
    """(p50 and worst seconds of requests that are sent meanwhile, the most memory in MiB)."""
    seconds, most = [], 0.0
    while not crowd.done():
        other = await requests(url, 1, 1)
        assert other.seen == {"200": 1}, other.seen
        seconds += other.seconds
        most = max(most, memory_mib(pid))
        await asyncio.sleep(0.1)
    return statistics.median(seconds), max(seconds), most


async def measure(name: str, url: str, pid: int, options: argparse.Namespace) -> dict[str, object]:
    before_mib, began_s = memory_mib(pid), time.monotonic()
    row: dict[str, object] = {"crowd": name}
    if name == "idle":
        count, work = options.idle, idle(url, options.idle)
    elif name == "slow heads":
        count, work = options.slow, slow_heads(url, options.slow, 0.5)
    elif name == "requests":
        count, work = options.requests, requests(url, options.requests, options.concurrency)
    else:
        count, work = options.streams, streams(url, options.streams)
    crowd = asyncio.ensure_future(work)
    if name in ("idle", "slow heads"):
        p50_s, worst_s, most_mib = await beside(url, crowd, pid)
        row |= {"others_p50_ms": p50_s * 1e3, "others_worst_ms": worst_s * 1e3}
        row["kib_per_connection"] = (most_mib - before_mib) * 1024 / count
    seen = (await crowd).seen
    took_s = time.monotonic() - began_s
    ordered = sorted(crowd.result().seconds)
    row |= {"count": count, "seen": dict(seen), "took_s": took_s, "per_s": count / took_s}
    row |= {"p50_s": ordered[len(ordered) // 2], "p99_s": ordered[int(0.99 * len(ordered))]}
    retry = {line for a in crowd.result().answers for line in a.split(b"\r\n") if b"retry" in line}
    row["retry_after"] = sorted(line.decode() for line in retry)
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--idle", type=int, default=2000)
    parser.add_argument("--slow", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=200)
    parser.add_argument("--streams", type=int, default=1000)
    options = parser.parse_args()
    raise_open_files()
    context = multiprocessing.get_context("spawn")
    rows = []
    for name in ("idle", "slow heads", "requests", "streams"):
        end, ready = context.Pipe(duplex=False)
        process = context.Process(target=serve, args=(ready, 0.1 if name == "streams" else 0.0))
        process.start()
        assert process.pid is not None
        try:
            row = asyncio.run(measure(name, end.recv(), process.pid, options))
        finally:
            process.terminate()
            process.join()
        rows.append({key: round(v, 3) if isinstance(v, float) else v for key, v in row.items()})
        print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    print(json.dumps({"benchmark": "connections", "rows": rows}))


if __name__ == "__main__":
    main()
