"""An answer on its way to the client, while the server still writes it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from toolkit.client import ClientError
from toolkit.gateway.answering import Running, error_event, refusal_of, watched
from toolkit.gateway.faults import INTERNAL
from toolkit.gateway.protocol import Answers, Refusal
from toolkit.gateway.service import Gateway, refused

__all__ = ["Answer"]

READING_S = 10.0  # what a client has to read the rest, after request_timeout_s
SHADOWS = 32  # copies at a time; a busy gateway drops copies before it drops requests
END: dict[str, Any] = {"type": "http.response.body", "body": b"", "more_body": False}


class Answer(Response):
    """Sends the answer while it comes. It holds the request's place until the end.

    A request without a place goes to no arm: its refusal says nothing about a deployment.
    """

    def __init__(
        self,
        gateway: Gateway,
        answers: Answers,
        session: str,
        arrived_ns: int,
        path: str,
        key: str,
    ) -> None:
        self._gateway, self._answers, self._session = gateway, answers, session
        self._arrived_ns, self._path, self._key = arrived_ns, path, key
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway, answers = self._gateway, self._answers
        try:
            with gateway.guard.place():
                with gateway.refusing_faults(answers.id, self._path):
                    running = _begun(gateway, answers, self._session, self._arrived_ns)
                await self._run(running, scope, receive, send)
        except Refusal as refusal:
            response = gateway.refuse(refusal, answers.id, self._path, self._key)
            await response(scope, receive, send)

    async def _run(self, running: Running, scope: Scope, receive: Receive, send: Send) -> None:
        status: int | None = None
        failure: str | None = None
        try:
            left = asyncio.create_task(_left(receive))
            task = asyncio.create_task(self._send(running, scope, receive, _Sender(send)))
            limit_s = self._gateway.config.request_timeout_s
            if await watched(task, left, limit_s + min(limit_s, READING_S)):
                status, failure = task.result()
        except ClientDisconnect:
            pass
        except Exception:
            status, failure = 500, INTERNAL
            raise
        finally:
            self._gateway.note(running.finished(status, failure), self._path, self._key)

    async def _send(
        self, running: Running, scope: Scope, receive: Receive, send: _Sender
    ) -> tuple[int, str | None]:
        """Returns the status that was sent, and why it is not 200. Raises ClientDisconnect."""
        gateway, id_ = self._gateway, running.answers.id
        try:
            with gateway.refusing_faults(id_, self._path):
                if running.asked.streams:
                    await self._stream(running, send)
                else:
                    content = await running.whole(gateway.spell)
                    headers = {"X-Request-Id": id_, **_speculation_headers(running)}
                    await JSONResponse(content, 200, headers)(scope, receive, send)
            return 200, None
        except ClientError as error:
            refusal = refusal_of(error, gateway.guard.retry_after_s(), running.asked.kind)
            failure = str(error)
        except Refusal as fault:
            refusal, failure = fault, str(fault.code)
        if send.has_begun:
            await send(_part(error_event(refusal)))
            await send(END)
        else:
            await refused(refusal, id_)(scope, receive, send)
        return refusal.status, failure

    async def _stream(self, running: Running, send: Send) -> None:
        events = running.events()
        try:
            first = await anext(events)
            await send(_stream_start(running.answers.id))
            await send(_part(first))
            async for event in events:
                await send(_part(event))
            await send(END)
        finally:
            with suppress(RuntimeError):
                await events.aclose()  # type: ignore[attr-defined]


class _Sender:
    """Sends, and knows whether the head of the answer is out. Raises ClientDisconnect where the
    server says so of a client that has left.
    """

    def __init__(self, send: Send) -> None:
        self._send, self.has_begun = send, False

    async def __call__(self, message: Message) -> None:
        self.has_begun = True
        try:
            await self._send(message)
        except OSError as error:
            raise ClientDisconnect from error


def _stream_start(request_id: str) -> dict[str, Any]:
    headers = {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache",
        "x-accel-buffering": "no",  # of nginx: chunks pass at once
        "x-request-id": request_id,
    }
    return {
        "type": "http.response.start",
        "status": 200,
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }


def _part(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": True}


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _speculation_headers(running: Running) -> dict[str, str]:
    statistics = running.statistics
    if statistics.drafted is None or statistics.accepted is None:
        return {}
    return {"X-Accepted-Draft-Tokens": f"{statistics.accepted}/{statistics.drafted}"}


def _begun(gateway: Gateway, answers: Answers, session: str, arrived_ns: int) -> Running:
    """The request at the arm that is to answer it. Perhaps another arm gets a copy."""
    asked, ticket = answers.asked, f"{next(gateway.tickets)}"
    prompt = repr((asked.prompt, asked.options)) if asked.options.temperature == 0 else None
    choice = gateway.arms.choose(session, ticket, prompt)
    running = Running(choice.arm, asked, answers, arrived_ns, ticket)
    if choice.shadow is not None:
        running.keeps_text = True
        shadow = Running(choice.shadow, asked, answers, arrived_ns, ticket, is_shadow=True)
        _cast(gateway, shadow)
    return running


def _cast(gateway: Gateway, shadow: Running) -> None:
    """Send a copy of the request, whose answer only the roll-out sees."""
    if len(gateway.shadows) >= SHADOWS:
        return
    shadow.keeps_text = True

    async def send() -> None:
        status, failure = 200, None
        try:
            with gateway.refusing_faults(shadow.answers.id, "shadow"):
                async for _ in shadow.pieces():
                    pass
        except ClientError as error:
            status, failure = refusal_of(error, 1).status, str(error)
        except Refusal as refusal:
            status, failure = refusal.status, refusal.code
        gateway.note(shadow.finished(status, failure), "shadow", "-")

    task = asyncio.get_running_loop().create_task(send())
    gateway.shadows.add(task)
    task.add_done_callback(gateway.shadows.discard)
