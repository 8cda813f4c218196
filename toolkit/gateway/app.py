"""The gateway's web application: OpenAI's endpoints, health, metrics and a page to try it.

    POST /v1/chat/completions, /v1/completions     GET /v1/models
    GET  /health    200 if a token was produced within the last seconds
    GET  /metrics   for Prometheus            GET /    the page
    GET  /rollout   the page of a roll-out, if one runs, and /rollout.json

Prompts and texts are never logged. /health and /metrics need no key.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import re
import secrets
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from toolkit.client import ClientError, Options
from toolkit.config.schema import GatewayConfig
from toolkit.gateway.answering import HUNG_UP, Running, error_event, refusal_of, watched
from toolkit.gateway.arms import Arm, Arms, Finished
from toolkit.gateway.guard import Guard
from toolkit.gateway.metrics import CONTENT_TYPE, Metrics
from toolkit.gateway.protocol import (
    MAX_SHOWN,
    Answers,
    Asked,
    Refusal,
    parse_chat,
    parse_completion,
)

__all__ = ["Gateway", "make_app"]

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,100}")
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
HEALTH_AGE_S = 10.0  # a token is news of the server's health for so long
HEALTH_TIMEOUT_S = 20.0
HEALTH_PROMPT = "Hello"
READING_S = 10.0  # what a client has to read the rest, after request_timeout_s
SHADOWS = 32  # copies at a time; a busy gateway drops copies before it drops requests

Render = Callable[[object], str]
Parse = Callable[[Mapping[str, Any]], Asked]


@dataclass
class Gateway:
    """What the application serves with.

    model: its name for clients. render: applies the chat template; None: there is none. log: takes
    a line per request. spell: the text of a token, for log-probabilities.
    """

    config: GatewayConfig
    model: str
    arms: Arms
    guard: Guard
    render: Render | None = None
    spell: Callable[[int], str] = str
    log: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)
    metrics: Metrics = field(default_factory=Metrics)
    token_at_s: dict[str, float] = field(default_factory=dict)  # arm -> when it last produced one
    shadows: set[asyncio.Task[None]] = field(default_factory=set)
    probe: asyncio.Task[dict[str, str]] | None = None  # of all who ask for the health now
    tickets: Iterator[int] = field(default_factory=itertools.count)

    def chat(self, body: Mapping[str, Any]) -> Asked:
        return parse_chat(body, self.render)

    async def close(self) -> None:
        tasks = [*self.shadows, *([] if self.probe is None else [self.probe])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for arm in self.arms.all:
            await arm.backend.close()
        self.arms.close()

    def refuse(self, refusal: Refusal, request_id: str, path: str, key: str) -> Response:
        """Count and log a request that goes to no arm: its answer. The message is not logged, since
        it may hold what the client sent.
        """
        self.metrics.requests.labels(path, "-", str(refusal.status)).inc()
        line = {
            "time": _now(),
            "id": request_id,
            "path": path,
            "arm": "-",
            "key": key,
            "status": str(refusal.status),
            "error": refusal.code or "refused",
        }
        self.log(json.dumps(line))
        return _refused(refusal, request_id)

    def note(self, request: Finished, path: str, key: str) -> None:
        """Count and log a request, and tell whoever chooses the arms."""
        metrics, arm, statistics = self.metrics, request.arm, request.statistics
        status = HUNG_UP if request.status is None else str(request.status)
        metrics.requests.labels("shadow" if request.is_shadow else path, arm, status).inc()
        if request.ttft_ns is not None:
            metrics.ttft.labels(arm).observe(request.ttft_ns / 1e9)
            self.token_at_s[arm] = time.monotonic()
        if request.status == 200:
            metrics.e2e.labels(arm).observe(request.e2e_ns / 1e9)
        icl = metrics.icl.labels(arm)
        for gap_ns in request.gaps_ns:
            icl.observe(gap_ns / 1e9)
        metrics.tokens.labels(arm).inc(statistics.output_tokens or 0)
        metrics.drafted.labels(arm).inc(statistics.drafted or 0)
        metrics.accepted.labels(arm).inc(statistics.accepted or 0)
        if statistics.draft_failure is not None:
            metrics.draft_failures.labels(arm).inc()
        line = {
            "time": _now(),
            "id": request.request_id,
            "path": path,
            "arm": arm,
            "key": key,
            "status": status,
            "input_tokens": statistics.input_tokens,
            "output_tokens": statistics.output_tokens,
            "drafted": statistics.drafted,
            "accepted": statistics.accepted,
            "ttft_ms": None if request.ttft_ns is None else round(request.ttft_ns / 1e6, 3),
            "e2e_ms": round(request.e2e_ns / 1e6, 3),
            **({"shadow": True} if request.is_shadow else {}),
            **({"draft_failure": failure} if (failure := statistics.draft_failure) else {}),
            **({"error": request.error} if request.error else {}),
        }
        self.log(json.dumps(line))
        self.arms.finished(request)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def make_app(gateway: Gateway) -> Starlette:
    """The application. It closes the gateway's connections when it ends."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await gateway.close()

    def completions(path: str, parse: Parse) -> Route:
        async def answer(request: Request) -> Response:
            return await _answer(gateway, request, path, parse)

        return Route(path, answer, methods=["POST"])

    async def models(request: Request) -> Response:
        return await _guarded(gateway, request, _models)

    async def health(request: Request) -> Response:
        return await _health(gateway)

    async def metrics(request: Request) -> Response:
        gateway.metrics.running.set(gateway.guard.running)
        return Response(gateway.metrics.page(), media_type=CONTENT_TYPE)

    def page(name: str) -> Callable[[Request], Awaitable[Response]]:
        async def show(request: Request) -> Response:
            text = resources.files("toolkit.gateway").joinpath(name).read_text(encoding="utf-8")
            return HTMLResponse(text, headers={"Cache-Control": "no-store"})

        return show

    async def rollout(request: Request) -> Response:
        return await _guarded(gateway, request, _rollout)

    return Starlette(
        routes=[
            completions("/v1/chat/completions", gateway.chat),
            completions("/v1/completions", parse_completion),
            Route("/v1/models", models),
            Route("/v1/models/{model:path}", models),
            Route("/health", health),
            Route("/metrics", metrics),
            Route("/", page("page.html")),
            Route("/rollout", page("rollout.html")),
            Route("/rollout.json", rollout),
        ],
        exception_handlers={404: _not_found, 405: _not_found},
        lifespan=lifespan,
    )


async def _not_found(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    known = "/v1/chat/completions, /v1/completions, /v1/models, /health, /metrics, /rollout and /"
    what = f"{request.method} {request.url.path} is not served here; {known} are"
    return _refused(Refusal(what, status=status, code="not_found"))


def _refused(refusal: Refusal, request_id: str | None = None) -> Response:
    headers = {} if request_id is None else {"X-Request-Id": request_id}
    if refusal.retry_after_s is not None:
        headers["Retry-After"] = str(refusal.retry_after_s)
    if refusal.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(refusal.body(), refusal.status, headers)


async def _guarded(
    gateway: Gateway, request: Request, handle: Callable[[Gateway, Request], Awaitable[Response]]
) -> Response:
    try:
        gateway.guard.name(request.headers.get("authorization"))
        return await handle(gateway, request)
    except Refusal as refusal:
        return _refused(refusal)


async def _models(gateway: Gateway, request: Request) -> Response:
    model = {"id": gateway.model, "object": "model", "created": 0, "owned_by": "toolkit"}
    name = request.path_params.get("model")
    if name is None:
        return JSONResponse({"object": "list", "data": [model]})
    _check_model(gateway, name)
    return JSONResponse(model)


async def _rollout(gateway: Gateway, request: Request) -> Response:
    summary = gateway.arms.summary()
    if summary is None:
        raise Refusal("no roll-out runs here: see toolkit rollout", status=404, code="not_found")
    return JSONResponse(summary, headers={"Cache-Control": "no-store"})


def _check_model(gateway: Gateway, name: str) -> None:
    if name != gateway.model:
        raise Refusal(
            f"the model {name[:MAX_SHOWN]!r} is not served here; {gateway.model!r} is",
            status=404,
            parameter="model",
            code="model_not_found",
        )


async def _health(gateway: Gateway) -> Response:
    """200 if every arm that clients need has produced a token lately. If nobody has asked for one,
    this does, once for all who ask at the same time: while a server hangs, they may come faster
    than a probe gives up.
    """
    if gateway.probe is None or gateway.probe.done():
        gateway.probe = asyncio.create_task(_states(gateway))
    states = await asyncio.shield(gateway.probe)
    is_ready = all(state == "ready" for state in states.values())
    body = {"status": "ready" if is_ready else "not ready", "arms": states}
    return JSONResponse(body, 200 if is_ready else 503, {} if is_ready else {"Retry-After": "5"})


async def _states(gateway: Gateway) -> dict[str, str]:
    return {arm.name: await _state(gateway, arm) for arm in gateway.arms.needed}


async def _state(gateway: Gateway, arm: Arm) -> str:
    if time.monotonic() - gateway.token_at_s.get(arm.name, -HEALTH_AGE_S) < HEALTH_AGE_S:
        return "ready"
    options = arm.options(Options(max_tokens=1, temperature=0.0))

    async def probe() -> None:
        stream = arm.backend.stream(
            HEALTH_PROMPT, options, "health", streams=False, tells_accepted=False
        )
        async for _ in stream:
            pass

    try:
        await asyncio.wait_for(probe(), HEALTH_TIMEOUT_S)
    except asyncio.TimeoutError:
        return f"no token within {HEALTH_TIMEOUT_S:g} s"
    except ClientError as error:
        return str(error)
    gateway.token_at_s[arm.name] = time.monotonic()
    return "ready"


async def _answer(gateway: Gateway, request: Request, path: str, parse: Parse) -> Response:
    arrived_ns = time.monotonic_ns()
    stated = request.headers.get("x-request-id", "")
    request_id = stated if REQUEST_ID.fullmatch(stated) else f"req-{secrets.token_hex(12)}"
    key = "-"
    try:
        key = gateway.guard.name(request.headers.get("authorization"))
        gateway.guard.count(key)
        config = gateway.config
        body = await _body(request, config.max_body_bytes, config.request_timeout_s)
        try:
            asked = parse(body)
        except RecursionError as error:
            raise Refusal("the body is nested too deeply") from error
        _check_model(gateway, asked.model)
        if gateway.guard.keys:
            asked = dataclasses.replace(asked, key=key)
    except ClientDisconnect:
        return Response(status_code=400)
    except Refusal as refusal:
        return gateway.refuse(refusal, request_id, path, key)
    answers = Answers(asked, request_id, int(time.time()))
    session = request.headers.get("x-session-id") or asked.session or request_id
    return _Answer(gateway, answers, session, arrived_ns, path, key)


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
            async for _ in shadow.pieces():
                pass
        except ClientError as error:
            refusal = refusal_of(error, 1)
            status, failure = refusal.status, refusal.message
        gateway.note(shadow.finished(status, failure), "shadow", "-")

    task = asyncio.get_running_loop().create_task(send())
    gateway.shadows.add(task)
    task.add_done_callback(gateway.shadows.discard)


async def _body(request: Request, max_bytes: int, limit_s: float) -> dict[str, Any]:
    """The request's JSON object. Raises Refusal."""
    too_long = Refusal(f"the body has more than {max_bytes:,} bytes", status=413)
    if int(request.headers.get("content-length") or 0) > max_bytes:
        raise too_long

    async def read() -> bytes:
        data = b""
        async for part in request.stream():
            data += part
            if len(data) > max_bytes:
                raise too_long
        return data

    try:
        data = await asyncio.wait_for(read(), limit_s)
    except asyncio.TimeoutError as error:  # another class than TimeoutError in Python 3.10
        raise Refusal(f"the body has not come within {limit_s:g} s", status=408) from error
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Refusal(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refusal("the body has to be a JSON object")
    # JSON can spell half of a surrogate pair (a client that cut a text within an emoji does), which
    # no text in UTF-8 has. Names and keys would carry it as far as a prompt.
    if SURROGATE.search(data) and not _is_text(body):
        raise Refusal("the body has half of a surrogate pair, as where an emoji was cut in two")
    return body


def _is_text(body: dict[str, Any]) -> bool:
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        return False
    return True


class _Answer(Response):
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
                running = _begun(gateway, answers, self._session, self._arrived_ns)
                await self._run(running, scope, receive, send)
        except Refusal as refusal:
            refused = gateway.refuse(refusal, answers.id, self._path, self._key)
            await refused(scope, receive, send)

    async def _run(self, running: Running, scope: Scope, receive: Receive, send: Send) -> None:
        status: int | None = None
        failure: str | None = None
        try:
            left = asyncio.create_task(_left(receive))
            task = asyncio.create_task(self._send(running, scope, receive, send))
            limit_s = self._gateway.config.request_timeout_s
            if await watched(task, left, limit_s + min(limit_s, READING_S)):
                status, failure = task.result()
        finally:
            self._gateway.note(running.finished(status, failure), self._path, self._key)

    async def _send(
        self, running: Running, scope: Scope, receive: Receive, send: Send
    ) -> tuple[int | None, str | None]:
        """Returns the status that was sent, and why it is not 200; None if the client has left."""
        id_ = running.answers.id
        try:
            if not running.asked.streams:
                content = await running.whole(self._gateway.spell)
                headers = {"X-Request-Id": id_, **_speculation_headers(running)}
                await JSONResponse(content, 200, headers)(scope, receive, send)
                return 200, None
            return await self._stream(running, send)
        except ClientError as error:
            refusal = refusal_of(error, self._gateway.guard.retry_after_s())
            await _refused(refusal, id_)(scope, receive, send)
            return refusal.status, refusal.message
        except OSError:  # uvicorn: the client has left
            return None, None

    async def _stream(self, running: Running, send: Send) -> tuple[int | None, str | None]:
        events = running.events()
        try:
            first = await anext(events)
            await send(_stream_start(running.answers.id))
            await send(_part(first))
            status: int | None = 200
            failure = None
            try:
                async for event in events:
                    await send(_part(event))
            except ClientError as error:
                refusal = refusal_of(error, self._gateway.guard.retry_after_s())
                status, failure = refusal.status, refusal.message
                await send(_part(error_event(refusal)))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return status, failure
        finally:
            with suppress(RuntimeError):
                await events.aclose()  # type: ignore[attr-defined]


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
