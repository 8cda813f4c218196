"""Which requests make the server grow: each kind alone, in rounds, against the quickstart pair.

    python -m tests.soak.growth [--requests 100] [--rounds 5] [--layout llmapi | bls] [--hang-up]

A server takes memory until its heaps and buffers have the size that a kind of request needs, and
then no more; a leak goes on. So the first two rounds of a kind do not count, and the growth is
that of the median round after them, per request. It is larger than GROWTH only if most rounds grow:
a heap that grows once, late, is no leak, and a leak is not hidden by a heap that shrinks once.

--hang-up: the clients cancel their stream as soon as an error comes, which shows what Triton itself
keeps of such requests (see docs/serving.md). The exit code is 1 if a kind grows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np

from tests.soak.__main__ import QUICKSTART, repository
from tests.soak.traffic import HOSTILE, MALFORMED, Attack, Server
from tests.soak.watch import sample_of
from toolkit.client import RequestRefused
from toolkit.triton.process.server import TritonServer

__all__ = ["GROWTH", "growth_per_request"]

GROWTH = 2048.0  # bytes per request; what Triton keeps of one that it leaks is 12 KB or more
CONCURRENCY = 8
PROMPT, TOKENS = "def read_config(path):", 16

Send = Callable[[Server], None]


def growth_per_request(memory: Sequence[int], requests: int) -> float:
    """Bytes. memory: of the server, after each round of so many requests; three rounds or more."""
    return float(np.median([after - before for before, after in pairwise(memory)][1:])) / requests


def refused(attack: Attack, *, hangs_up: bool) -> Send:
    def send(server: Server) -> None:
        try:
            server.send(attack(server), hangs_up=hangs_up)
        except RequestRefused:
            return
        raise SystemExit("a request was answered that has to be refused")

    return send


def answered(server: Server) -> None:
    list(server.client.stream(PROMPT, max_tokens=TOKENS, temperature=0.0))


def cancelled(server: Server) -> None:
    next(server.client.stream(PROMPT, max_tokens=TOKENS, temperature=0.0))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layout", choices=("llmapi", "bls"), default="llmapi")
    parser.add_argument("--hang-up", action="store_true")
    asked = parser.parse_args()
    kinds: dict[str, Send] = {"answered": answered, "cancelled after a chunk": cancelled}
    kinds |= {
        name: refused(attack, hangs_up=asked.hang_up)
        for name, attack in (MALFORMED | HOSTILE).items()
    }
    grows = False
    with TritonServer(repository(QUICKSTART, asked.layout)) as started:
        server = Server.at(started.grpc_url)
        for name, send in kinds.items():
            memory = []
            for _ in range(asked.rounds):
                with ThreadPoolExecutor(CONCURRENCY) as pool:
                    list(pool.map(send, [server] * asked.requests))
                memory.append(sample_of(started.pid).memory)
            growth = growth_per_request(memory, asked.requests)
            grows = grows or growth > GROWTH
            rounds = " ".join(f"{size / 2**20:6.1f}" for size in memory)
            state = "GROWS" if growth > GROWTH else "holds"
            print(f"{name:34} {rounds} MiB {growth / 1024:8.1f} KiB a request  {state}", flush=True)
        server.close()
    return int(grows)


if __name__ == "__main__":
    sys.exit(main())
