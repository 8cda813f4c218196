"""Many connections, and slow ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from tests.support.crowds import Crowd, idle, requests, slow_heads, streams
from tests.support.gateways import MODEL, ScriptedBackend, gateway, post
from toolkit.errors import ServerError
from toolkit.gateway.backends import Piece
from toolkit.gateway.connections import SURPLUS, connections_for, raise_open_files

BODY = {"model": MODEL, "prompt": "Hi", "max_tokens": 6}
HALF = b"POST /v1/completions HTTP/1.1\r\nHost"


@contextlib.contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        yield connection


def all_of(connection: socket.socket) -> bytes:
    """What comes until the connection is closed."""
    data = b""
    while part := connection.recv(10_000):
        data += part
    return data


def test_a_head_that_does_not_come_is_not_awaited() -> None:
    with gateway(head_s=0.5) as served, connected(served.url) as connection:
        connection.sendall(HALF)
        answer = all_of(connection)
    assert answer.startswith(b"HTTP/1.1 408 ")
    body = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert body["error"]["message"] == "the head of the request has not come within 0.5 s"


def test_a_connection_that_says_nothing_is_closed() -> None:
    with gateway(head_s=0.5) as served, connected(served.url) as connection:
        assert all_of(connection) == b""


def test_bytes_of_a_head_do_not_prolong_it() -> None:
    """Each one would, if the limit were one of silence."""
    with gateway(head_s=1.0) as served:
        crowd = asyncio.run(slow_heads(served.url, 50, 0.1))
        assert crowd.seen == {"408": 50}
        assert post(served.url, "/v1/completions", BODY)[0] == 200


@pytest.mark.parametrize("sent", [HALF, b"x"])
def test_the_second_head_of_a_connection_has_the_same_limit(sent: bytes) -> None:
    """Also where it follows a body that was announced and is not read: uvicorn forgets its limit of
    a kept connection with the first byte.
    """
    length = 2 if sent == HALF else 1000
    first = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n{}" % length
    with gateway(head_s=0.5) as served, connected(served.url) as connection:
        connection.sendall(first)
        assert connection.recv(10_000).startswith(b"HTTP/1.1 200 ")
        connection.sendall(sent)
        answer = all_of(connection)
    assert (b"HTTP/1.1 408 " in answer) == (sent == HALF)


def test_an_answer_takes_longer_than_a_head_may() -> None:
    backend = ScriptedBackend(delay_s=0.3)
    with gateway(backend, head_s=0.2) as served:
        status, _, body = post(served.url, "/v1/completions", BODY)
    assert (status, body["choices"][0]["text"]) == (200, " a b cé")


def test_a_surplus_connection_is_told_to_come_again() -> None:
    data = json.dumps(BODY).encode()
    whole = HALF + b": x\r\nContent-Length: %d\r\n\r\n" % len(data) + data
    with gateway(max_connections=2) as served, contextlib.ExitStack() as kept:
        first, _, surplus = (kept.enter_context(connected(served.url)) for _ in range(3))
        surplus.sendall(whole)
        head, _, body = all_of(surplus).partition(b"\r\n\r\n")  # and it is closed
        first.sendall(whole)
        assert first.recv(10_000).startswith(b"HTTP/1.1 200 ")
        page = served.gateway.metrics.page().decode()
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"\r\nretry-after: 1" in head
    error = json.loads(body)["error"]
    assert (error["code"], error["message"]) == ("overloaded", "there are too many connections")
    assert 'requests_total{arm="-",path="-",status="503"} 1.0' in page


def test_far_more_connections_are_closed_at_once() -> None:
    with gateway(max_connections=2) as served:
        crowd = asyncio.run(_rush(served.url, 2 + SURPLUS, 50))
        assert crowd.seen == {"no answer": 50}
        assert post(served.url, "/v1/completions", BODY)[0] == 200


async def _rush(url: str, held: int, count: int) -> Crowd:
    host, port = url.removeprefix("http://").split(":")
    writers = [(await asyncio.open_connection(host, int(port)))[1] for _ in range(held)]
    crowd = await requests(url, count, 1)
    for writer in writers:
        writer.close()
    return crowd


def test_idle_connections_keep_nobody_out_and_end() -> None:
    with gateway(head_s=1.0) as served:
        seen: list[object] = []
        crowd = threading.Thread(
            target=lambda: seen.append(asyncio.run(idle(served.url, 300)).seen)
        )
        crowd.start()
        assert post(served.url, "/v1/completions", BODY)[0] == 200
        crowd.join(30)
    assert seen == [{"no answer": 300}]


def test_short_requests_at_many_a_time_are_all_answered() -> None:
    with gateway() as served:
        crowd = asyncio.run(requests(served.url, 500, 50))
    assert crowd.seen == {"200": 500}, crowd.answers[:3]


class Waiting(ScriptedBackend):
    """Says its first word when it is told to."""

    may_begin: Callable[[], bool] = staticmethod(lambda: True)

    async def stream(self, *arguments: Any, **options: Any) -> AsyncIterator[Piece]:
        while not self.may_begin():
            await asyncio.sleep(0.01)
        async for piece in super().stream(*arguments, **options):
            yield piece


def test_streams_without_a_place_are_told_to_come_again_and_the_others_are_whole() -> None:
    backend = Waiting()
    with gateway(backend, max_requests=20) as served:
        backend.may_begin = lambda: len(served.lines) >= 80  # of those that are refused
        crowd = asyncio.run(streams(served.url, 100))
    assert served.gateway.guard.running == 0
    assert crowd.seen == {"200": 20, "503": 80}
    assert all(b"\r\nretry-after: " in answer for answer in crowd.answers)


@pytest.mark.parametrize(
    ("max_requests", "files", "connections"),
    [
        (256, 1 << 20, 4096),
        (5000, 1 << 20, 20_000),
        (256, 2048, 2048 - 256 - SURPLUS - 128),
        (256, 768, 256),
    ],
)
def test_connections_are_bound_by_requests_and_by_files(
    max_requests: int, files: int, connections: int
) -> None:
    assert connections_for(max_requests, files) == connections


def test_too_few_files_for_the_requests_are_refused() -> None:
    with pytest.raises(ServerError, match="needs 768 open files, and this process may have 767"):
        connections_for(256, 767)


def test_as_many_files_as_the_hard_limit_allows() -> None:
    program = (
        "import resource\n"
        "from toolkit.gateway.connections import raise_open_files\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 300))\n"
        "print(raise_open_files(), resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout == "300 (300, 300)\n", done.stderr


def test_the_limit_of_this_process_is_known() -> None:
    assert raise_open_files() == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
