"""The gateway's web application: OpenAI's endpoints, health, metrics and a page to try it.

    POST /v1/chat/completions, /v1/completions     GET /v1/models
    GET  /health    200 if a token was produced within the last seconds
    GET  /metrics   for Prometheus            GET /    the page
    GET  /rollout   the page of a roll-out, if one runs, and /rollout.json

Prompts and texts are never logged. /health and /metrics need no key. Clients are not told where the
servers behind the gateway are; the log is.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from toolkit.client import ClientError, Options
from toolkit.gateway.arms import Arm
from toolkit.gateway.backends import Overloaded
from toolkit.gateway.bodies import INVALID, body_of, read_body
from toolkit.gateway.faults import internal_error
from toolkit.gateway.metrics import CONTENT_TYPE
from toolkit.gateway.protocol import (
    MAX_SHOWN,
    Answers,
    Asked,
    Refusal,
    parse_completion,
)
from toolkit.gateway.sending import Answer
from toolkit.gateway.service import Gateway, new_id, refused

__all__ = ["Gateway", "make_app", "make_full"]

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,100}")
HEALTH_AGE_S = 10.0  # a token is news of the server's health for so long
HEALTH_TIMEOUT_S = 20.0
HEALTH_PROMPT = "Hello"
# A body of this size takes half a millisecond to be read and rendered. A larger one is given to a
# thread, which costs a millisecond while the event loop is busy.
READ_AT_ONCE_BYTES = 1 << 14

Parse = Callable[[Mapping[str, Any]], Asked]


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

    async def failed(request: Request, error: Exception) -> Response:
        request_id = new_id()
        gateway.tell_fault(error, request_id, request.url.path)
        return refused(internal_error(request_id), request_id)

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
        exception_handlers={404: _not_found, 405: _not_found, Exception: failed},
        lifespan=lifespan,
    )


def make_full(gateway: Gateway) -> ASGIApp:
    """What answers where there are too many connections."""

    async def full(scope: Scope, receive: Receive, send: Send) -> None:
        refusal = Refusal(
            "there are too many connections",
            status=503,
            code="overloaded",
            retry_after_s=gateway.guard.retry_after_s(),
        )
        response = gateway.refuse(refusal, new_id(), "-", "-")
        response.headers["Connection"] = "close"
        await response(scope, receive, send)

    return full


async def _not_found(request: Request, error: Exception) -> Response:
    """404, and 405, which has to say in `Allow` what may be sent."""
    status = getattr(error, "status_code", 404)
    allowed = (getattr(error, "headers", None) or {}).get("Allow")
    shown = f"{request.method} {request.url.path[:MAX_SHOWN]}"
    if allowed is None:
        known = (
            "/v1/chat/completions, /v1/completions, /v1/models, /health, /metrics, /rollout,"
            " /rollout.json, /"
        )
        return refused(
            Refusal(f"{shown} is not served here; there are {known}", status=404, code="not_found")
        )
    what = f"{shown} is not served; {allowed} is"
    response = refused(Refusal(what, status=status, code="method_not_allowed"))
    response.headers["Allow"] = allowed
    return response


async def _guarded(
    gateway: Gateway, request: Request, handle: Callable[[Gateway, Request], Awaitable[Response]]
) -> Response:
    try:
        gateway.guard.name(request.headers.get("authorization"))
        return await handle(gateway, request)
    except Refusal as refusal:
        return refused(refusal)


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
    """200 if every arm that clients need has produced a token lately; the state of every arm that
    may answer one is shown. A candidate that fails is no reason to take the gateway away: it is
    rolled back by what it does to its share of the clients. If nobody has asked for one,
    this does, once for all who ask at the same time: while a server hangs, they may come faster
    than a probe gives up.
    """
    if gateway.probe is None or gateway.probe.done():
        gateway.probe = asyncio.create_task(_states(gateway))
    states = await asyncio.shield(gateway.probe)
    needed = [arm.name for arm in gateway.arms.needed]
    is_ready = all(states.get(name) == "ready" for name in needed)
    body = {"status": "ready" if is_ready else "not ready", "arms": states}
    return JSONResponse(body, 200 if is_ready else 503, {} if is_ready else {"Retry-After": "5"})


async def _states(gateway: Gateway) -> dict[str, str]:
    arms = gateway.arms.open
    states = await asyncio.gather(*(_state(gateway, arm) for arm in arms))
    return {arm.name: state for arm, state in zip(arms, states, strict=True)}


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
        gateway.tell({"path": "/health", "arm": arm.name, "error": str(error)})
        return "busy" if isinstance(error, Overloaded) else "unavailable"
    except Exception as error:
        gateway.tell_fault(error, "health", "/health")
        return "unavailable"
    gateway.token_at_s[arm.name] = time.monotonic()
    return "ready"


async def _answer(gateway: Gateway, request: Request, path: str, parse: Parse) -> Response:
    arrived_ns = time.monotonic_ns()
    stated = request.headers.get("x-request-id", "")
    request_id = stated if REQUEST_ID.fullmatch(stated) else new_id()
    key = "-"
    try:
        key = gateway.guard.name(request.headers.get("authorization"))
        gateway.guard.count(key)
        config = gateway.config
        data = await read_body(request, config.max_body_bytes, config.request_timeout_s)
        with gateway.refusing_faults(request_id, path):
            asked = await _asked(gateway, data, parse)
        _check_model(gateway, asked.model)
        if gateway.guard.keys:
            asked = dataclasses.replace(asked, key=key)
    except ClientDisconnect:
        return Response(status_code=400)
    except Refusal as refusal:
        return gateway.refuse(refusal, request_id, path, key)
    answers = Answers(asked, request_id, int(time.time()))
    session = request.headers.get("x-session-id") or asked.session or request_id
    return Answer(gateway, answers, session, arrived_ns, path, key)


async def _asked(gateway: Gateway, data: bytes, parse: Parse) -> Asked:
    """What a body asks for. Raises Refusal."""

    def asked() -> Asked:
        try:
            return parse(body_of(data))
        except RecursionError as error:
            raise Refusal("the body is nested too deeply", code=INVALID) from error

    if len(data) <= READ_AT_ONCE_BYTES:
        return asked()
    return await asyncio.get_running_loop().run_in_executor(gateway.reader, asked)
