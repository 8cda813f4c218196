"""Many clients of a gateway at once, in this process: what each of them saw, counted."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.support.gateways import MODEL

__all__ = ["Crowd", "head_of", "idle", "requests", "slow_heads", "streams"]

BODY = {"model": MODEL, "prompt": "Hi", "max_tokens": 6}


@dataclass
class Crowd:
    """seen: status, or what else a client saw -> clients. answers: those that were no 200."""

    seen: Counter[str] = field(default_factory=Counter)
    answers: list[bytes] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def add(self, answer: bytes, began_s: float) -> None:
        self.seconds.append(time.monotonic() - began_s)
        status = answer[9:12].decode() if answer.startswith(b"HTTP/1.1 ") else "no answer"
        if status == "200" and b"text/event-stream" in answer and b"[DONE]" not in answer:
            status = "cut"
        self.seen[status] += 1
        if status != "200":
            self.answers.append(answer)


def head_of(body: dict[str, Any]) -> bytes:
    """A whole request, after whose answer the connection is closed."""
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def _answer(
    address: tuple[str, int], data: bytes, *, byte_s: float = 0.0, hold: asyncio.Event | None = None
) -> bytes:
    """What comes back until the connection is closed. byte_s: between single bytes."""
    try:
        reader, writer = await asyncio.open_connection(*address)
    except OSError:
        return b""
    try:
        for place in range(len(data) if byte_s else 0):
            writer.write(data[place : place + 1])
            await writer.drain()
            try:
                return await asyncio.wait_for(reader.read(), byte_s)
            except asyncio.TimeoutError:
                pass
        if not byte_s:
            writer.write(data)
        if hold is not None:
            await hold.wait()
        return await reader.read()
    except OSError:
        return b""
    finally:
        writer.close()


def _address(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


async def requests(url: str, count: int, concurrency: int) -> Crowd:
    """Short requests, each on a connection of its own, so many at a time."""
    crowd, left, address = Crowd(), iter(range(count)), _address(url)

    async def work() -> None:
        for _ in left:
            began_s = time.monotonic()
            crowd.add(await _answer(address, head_of(BODY)), began_s)

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return crowd


async def streams(url: str, count: int) -> Crowd:
    """Streams that all begin at once."""
    crowd, address = Crowd(), _address(url)

    async def one() -> None:
        began_s = time.monotonic()
        crowd.add(await _answer(address, head_of({**BODY, "stream": True})), began_s)

    await asyncio.gather(*(one() for _ in range(count)))
    return crowd


async def slow_heads(url: str, count: int, byte_s: float) -> Crowd:
    """Clients that send their heads byte by byte, until they are answered or closed."""
    crowd, address = Crowd(), _address(url)
    head = b"GET /health HTTP/1.1\r\n" + b"X-Padding: " + b"x" * 8000

    async def one() -> None:
        began_s = time.monotonic()
        crowd.add(await _answer(address, head, byte_s=byte_s), began_s)

    await asyncio.gather(*(one() for _ in range(count)))
    return crowd


async def idle(url: str, count: int) -> Crowd:
    """Connections that send nothing, until they are closed."""
    crowd, address = Crowd(), _address(url)

    async def one() -> None:
        began_s = time.monotonic()
        crowd.add(await _answer(address, b""), began_s)

    await asyncio.gather(*(one() for _ in range(count)))
    return crowd
