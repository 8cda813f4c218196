"""Run the gateway's application until it is told to stop: `run(...)`."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import uvicorn

from toolkit.config.schema import GatewayConfig
from toolkit.errors import ServerError
from toolkit.gateway.app import Gateway, make_app, make_full
from toolkit.gateway.connections import HEAD_S, Connection, connections_for, raise_open_files
from toolkit.process.placement import Visitor

__all__ = ["run"]

CHECK_INTERVAL_S = 0.5
BACKLOG = 2048
SWITCH_S = 0.0005


def run(
    config: GatewayConfig,
    make_gateway: Callable[[], Gateway],
    *,
    ready: Callable[[str], None],
    check: Callable[[], None] = lambda: None,
    max_connections: int | None = None,
    head_s: float = HEAD_S,
) -> None:
    """Serve until Ctrl-C or SIGTERM; running requests then have `gateway.stop_timeout_s` to end.

    make_gateway: is called inside the event loop, to which its connections belong, and once the
    address is this process's. ready: is told the URL when requests are taken. check: raises an
    error when there is nothing left to serve, which ends the gateway. max_connections: of clients;
    None: by the requests and the files that the process may open. Raises ServerError if the address
    cannot be listened on.
    """
    if max_connections is None:
        max_connections = connections_for(config.max_requests, raise_open_files())
    # gRPC's own thread hands its news over under the interpreter's lock, for which it would wait up
    # to 5 ms while this thread is busy.
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        asyncio.run(_run(config, make_gateway, ready, check, max_connections, head_s))
    finally:
        sys.setswitchinterval(before)


async def _run(
    config: GatewayConfig,
    make_gateway: Callable[[], Gateway],
    ready: Callable[[str], None],
    check: Callable[[], None],
    max_connections: int,
    head_s: float,
) -> None:
    listening = _listen(config.host, config.port)
    try:
        gateway = make_gateway()
    except BaseException:
        listening.close()
        raise
    connection = partial(
        Connection, max_connections=max_connections, head_s=head_s, full=make_full(gateway)
    )
    server = uvicorn.Server(
        uvicorn.Config(
            make_app(gateway),
            http=connection,  # type: ignore[arg-type]
            ws="none",
            log_config=None,
            log_level="error",  # no line per client that speaks no HTTP
            access_log=False,
            server_header=False,
            lifespan="on",
            timeout_graceful_shutdown=config.stop_timeout_s,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    # A signal that uvicorn raises again ends the loop before anybody asks how this task ended.
    serving.add_done_callback(lambda task: task.cancelled() or task.exception())
    watching = asyncio.create_task(_watch(server, check))
    host, port = listening.getsockname()[:2]
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    if server.started:
        ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
    await asyncio.wait({serving, watching}, return_when=asyncio.FIRST_COMPLETED)
    if watching.done():  # nothing is left to serve: its error is more than that of a signal
        server.should_exit = True
        await serving
        watching.result()
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching
    serving.result()


async def _watch(server: uvicorn.Server, check: Callable[[], None]) -> None:
    visitor = Visitor()
    try:
        while not server.should_exit:
            check()
            visitor.move()
            await asyncio.sleep(CHECK_INTERVAL_S)
    finally:
        visitor.leave()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise ServerError(
            f"the gateway cannot listen on {host}:{port} ({error.strerror})",
            hint="Name another port: --set gateway.port=0 takes a free one.",
        ) from error
    listening.setblocking(False)
    return listening
