"""The connections of clients: how many there may be, and how long one may keep the gateway waiting.

uvicorn bounds the size of a request's head, and how long a connection is kept after an answer. It
waits without end for a head, so that a client that sends one byte at a time, or none, holds its
connection for ever; and it takes connections until no file is left to open. `Connection` adds both
bounds. A surplus connection is taken, read and told to come again; far above the bound, it is
closed at once.
"""

from __future__ import annotations

import asyncio
import json
import resource
from typing import Any

import h11
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from toolkit.errors import ServerError
from toolkit.gateway.protocol import Refusal

__all__ = ["HEAD_S", "Connection", "connections_for", "raise_open_files"]

HEAD_S = 10.0  # from the beginning of a connection, or of a head on it, to the end of the head
LEAST_CONNECTIONS = 4096
CONNECTIONS_PER_REQUEST = 4  # clients keep some, and some send what is refused
SURPLUS = 128  # connections above the bound that are told so
OTHER_FILES = 128  # the process's own, and connections to servers that it shares
MOST_FILES = 1 << 20  # asked for where there is no limit


class Connection(H11Protocol):
    """max_connections: of all clients. full: answers on a surplus one."""

    def __init__(
        self, *args: Any, max_connections: int, head_s: float, full: ASGIApp, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._max_connections, self._head_s, self._full = max_connections, head_s, full
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        surplus = len(self.connections) - self._max_connections
        if surplus > SURPLUS:
            transport.abort()
            return
        if surplus > 0:
            self.app = self._full
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._await_head()
        else:
            self._stop_awaiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_awaiting()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        """From now on, if not since earlier."""
        if self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(self._head_s, self._give_up)

    def _stop_awaiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        has_begun = self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]
        if has_begun and not self.transport.is_closing():
            what = f"the head of the request has not come within {self._head_s:g} s"
            body = json.dumps(Refusal(what, status=408).body()).encode()
            head = (
                "HTTP/1.1 408 Request Timeout\r\nconnection: close\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()


def connections_for(max_requests: int, open_files: int) -> int:
    """How many connections clients may have, if so many files may be open. A request takes a file
    on the servers' side, too.

    Raises ServerError if not even every request could have one.
    """
    room = open_files - max_requests - SURPLUS - OTHER_FILES
    if room < max_requests:
        needed = 2 * max_requests + SURPLUS + OTHER_FILES
        raise ServerError(
            f"gateway.max_requests {max_requests} needs {needed} open files, and this process may"
            f" have {open_files}",
            hint="Raise the hard limit (ulimit -Hn), or lower gateway.max_requests.",
        )
    return min(room, max(LEAST_CONNECTIONS, CONNECTIONS_PER_REQUEST * max_requests))


def raise_open_files() -> int:
    """Let this process open as many files as it may: how many these are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else hard
    if soft == resource.RLIM_INFINITY or soft >= most:
        return max(soft, most)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (OSError, ValueError):  # the kernel's own limit, or a container's
        return soft
    return most
