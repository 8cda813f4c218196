"""A running gateway over a scripted backend."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from toolkit.client import Chunk, Options, RequestRefused, Statistics
from toolkit.config.schema import GatewayConfig
from toolkit.gateway.app import Gateway
from toolkit.gateway.arms import SERVED, Arm, Arms, OneArm
from toolkit.gateway.backends import Piece
from toolkit.gateway.connections import HEAD_S
from toolkit.gateway.guard import Guard
from toolkit.gateway.program import run

MODEL = "tiny"
STATISTICS = Statistics(input_tokens=4, output_tokens=6, drafted=5, accepted=3, verify_steps=3)
WORDS = (" a", " b", " cé")


def render(messages: object) -> str:
    """A template for tests; it trusts its messages."""
    assert isinstance(messages, Sequence)
    return "".join(f"<{message['role']}>{message['content']}" for message in messages)


@dataclass
class ScriptedBackend:
    """Answers with `words`, two tokens each. delay_s: before every word. failure: is raised after
    `failing_after` words. hangs_after: nothing comes after so many words. text: overrides the words
    by what is asked.
    """

    words: Sequence[str] = WORDS
    delay_s: float = 0.0
    failure: Exception | None = None
    failing_after: int = 0
    hangs_after: int | None = None
    text: Callable[[str, Options], Sequence[str]] | None = None
    statistics: Statistics = STATISTICS
    url: str = "scripted"
    seen: list[tuple[str, Options, str]] = field(default_factory=list)
    running: int = 0
    left: int = 0
    is_closed: bool = False

    async def close(self) -> None:
        self.is_closed = True

    async def stream(
        self, prompt: str, options: Options, request_id: str, *, streams: bool, tells_accepted: bool
    ) -> AsyncIterator[Piece]:
        self.seen.append((prompt, options, request_id))
        if options.log_probs and self.statistics.log_probs is None:
            raise RequestRefused("the served model has no input 'return_log_probs'")
        self.running += 1
        is_over = False
        words = self.words if self.text is None else self.text(prompt, options)
        try:
            for number, word in enumerate(words):
                if self.hangs_after == number:
                    await asyncio.sleep(3600)
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if self.failure is not None and number == self.failing_after:
                    is_over = True
                    raise self.failure
                is_last = number == len(words) - 1
                is_over = is_last
                chunk = Chunk(
                    word,
                    (2 * number, 2 * number + 1),
                    2 * number + 2,
                    time.monotonic_ns(),
                    "length" if is_last else None,
                    None,
                    self.statistics if is_last else None,
                )
                yield Piece(chunk, 1 if tells_accepted else None)
        finally:
            self.running -= 1
            self.left += not is_over


@dataclass
class Served:
    """A gateway that runs in a thread of its own. lines: its log."""

    url: str
    gateway: Gateway
    backend: ScriptedBackend
    lines: list[str]


@contextmanager
def gateway(
    backend: ScriptedBackend | None = None,
    *,
    keys: tuple[str, ...] = (),
    arms: Arms | None = None,
    renders: Callable[[object], str] | None = render,
    now: Callable[[], float] = time.monotonic,
    max_connections: int | None = None,
    head_s: float = HEAD_S,
    **settings: Any,
) -> Iterator[Served]:
    """A gateway until the block ends. settings: keys of the YAML's section `gateway`."""
    backend = backend or ScriptedBackend()
    config = GatewayConfig(**{"stop_timeout_s": 1, **settings})
    guard = Guard(keys, config.requests_per_minute, config.max_requests, now)
    lines: list[str] = []
    made = Gateway(
        config,
        MODEL,
        arms or OneArm(Arm(SERVED, backend)),
        guard,
        renders,
        lambda token: f"t{token}",
        lines.append,
    )
    bounds = {"max_connections": max_connections, "head_s": head_s}
    with running(config, lambda: made, **bounds) as url:
        yield Served(url, made, backend, lines)


class _Stop(Exception):
    pass


@contextmanager
def running(config: GatewayConfig, make: Callable[[], Gateway], **bounds: Any) -> Iterator[str]:
    """Run the program in a thread until the block ends: its URL. bounds: of connections."""
    urls: list[str] = []
    failures: list[BaseException] = []
    is_ready, stops = threading.Event(), threading.Event()

    def check() -> None:
        if stops.is_set():
            raise _Stop

    def ready(url: str) -> None:
        urls.append(url)
        is_ready.set()

    def serve() -> None:
        try:
            run(config, make, ready=ready, check=check, **bounds)
        except _Stop:
            pass
        except BaseException as error:
            failures.append(error)
        finally:
            is_ready.set()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert is_ready.wait(30)
        if failures:
            raise failures[0]
        yield urls[0]
    finally:
        stops.set()
        thread.join(30)
        assert not thread.is_alive()


def post(url: str, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Any:
    """(status, headers, JSON or text) of a request."""
    import urllib.error
    import urllib.request

    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, dict(headers or {}), method="POST")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, dict(answer.headers), json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), json.loads(error.read())


def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come about within 10 s")


def sent(url: str, body: Any) -> socket.socket:
    """A connection that a completion was asked for over."""
    host, port = url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    connection = socket.create_connection((host, int(port)), timeout=30)
    connection.sendall(head.encode() + data)
    return connection
