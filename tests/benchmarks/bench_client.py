"""Does the load client keep its schedule? Lag of sends behind it in an open loop, per protocol.

A stub endpoint in a process of its own answers every request with 8 chunks, 5 ms apart; requests
arrive as a Poisson process at 500/s. Lag is the time from when a request was due to when it was
handed to the network. Good: p99 under 2 ms on 2 cores. Beside it, the time by which the client saw
chunks later than the stub wrote them, which is what it adds to a latency.

On a machine that others use too, a real-time priority takes them out of the picture (as root): chrt
-f 10 python -m ...

    python -m tests.benchmarks.bench_client [--rate 500] [--seconds 10] [--protocols triton-grpc
    ...]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import sys
from importlib.metadata import version
from typing import Any

import numpy as np

from tests.support.stub import Script, StubServer
from toolkit.bench.arrivals import poisson, run_closed, run_open
from toolkit.bench.transports import PROTOCOLS, connect, read_exchange
from toolkit.client import Options

CHUNKS, GAP_MS, TOKENS = 8, 5.0, 2
LIMIT_MS = 2.0
MS = 1e6


async def measure(stub: StubServer, protocol: str, rate: float, seconds: float) -> dict[str, Any]:
    url = stub.grpc if protocol == "triton-grpc" else stub.http
    transport = await connect(url, protocol=protocol)
    try:
        count = int(rate * seconds)
        options = Options(max_tokens=CHUNKS * TOKENS)
        prompts = [f"{protocol} prompt {i}" for i in range(count)]
        requests = [transport.prepare(prompt, options) for prompt in prompts]
        await run_closed(
            transport, [transport.prepare(f"warm {i}", options) for i in range(200)], 50
        )
        before = resource.getrusage(resource.RUSAGE_SELF)
        exchanges, due = await run_open(transport, requests, poisson(rate, count))
        after = resource.getrusage(resource.RUSAGE_SELF)
        timings = [
            read_exchange(transport, prompt, one, options.max_tokens, at)
            for prompt, one, at in zip(prompts, exchanges, due, strict=True)
        ]
    finally:
        await transport.close()
    wrote = {entry["prompt"]: entry["written"] for entry in stub.log()}
    seen = [t.chunks[i][0] - wrote[t.prompt][i][0] for t in timings for i in range(CHUNKS)]
    lag = (
        np.array([exchange.sent_ns - at for exchange, at in zip(exchanges, due, strict=True)]) / MS
    )
    window_s = (max(one.ended_ns for one in exchanges) - min(due)) / 1e9
    assert all(t.output_tokens == CHUNKS * TOKENS for t in timings)
    return {
        "protocol": protocol,
        "requests": count,
        "rate": count / window_s,
        "lag_p50_ms": float(np.percentile(lag, 50)),
        "lag_p99_ms": float(np.percentile(lag, 99)),
        "lag_max_ms": float(lag.max()),
        "seen_after_written_p50_ms": float(np.percentile(seen, 50)) / MS,
        "seen_after_written_p99_ms": float(np.percentile(seen, 99)) / MS,
        "client_cores": (
            (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / window_s
        ),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=500.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--protocols", nargs="+", choices=PROTOCOLS, default=list(PROTOCOLS))
    asked = parser.parse_args()
    script = Script(chunks=tuple((GAP_MS, f"word{i} ", TOKENS) for i in range(CHUNKS)))
    rows = []
    print(f"{asked.rate:g} requests/s, {CHUNKS} chunks each, {os.cpu_count()} cores; ms")
    print(
        f"{'':20}{'lag p50':>9}{'p99':>8}{'max':>8}   {'seen p50':>9}{'p99':>8}{'cores':>8}  "
        " requests/s"
    )
    for protocol in asked.protocols:
        with StubServer(script) as stub:
            row = asyncio.run(measure(stub, protocol, asked.rate, asked.seconds))
        rows.append(row)
        print(
            f"{protocol:20}{row['lag_p50_ms']:9.2f}{row['lag_p99_ms']:8.2f}{row['lag_max_ms']:8.2f}"
            f"   {row['seen_after_written_p50_ms']:9.2f}{row['seen_after_written_p99_ms']:8.2f}"
            f"{row['client_cores']:8.2f}"
            f"   {row['rate']:.0f}  {'good' if row['lag_p99_ms'] < LIMIT_MS else 'late'}",
            flush=True,
        )
    versions = {name: version(name) for name in ("aiohttp", "grpcio")} | {
        "python": platform.python_version()
    }
    print(
        json.dumps(
            {"benchmark": "client", "results": rows, "versions": versions, "cores": os.cpu_count()}
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
