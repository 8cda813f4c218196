"""What the gateway's application serves with: `Gateway`. It counts, logs and refuses.

Prompts and texts are never logged.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from toolkit.client import ClientError
from toolkit.config.schema import GatewayConfig
from toolkit.gateway.answering import HUNG_UP
from toolkit.gateway.arms import Arms, Finished
from toolkit.gateway.faults import described, internal_error
from toolkit.gateway.guard import Guard
from toolkit.gateway.metrics import Metrics
from toolkit.gateway.protocol import KNOWN, Asked, Refusal, parse_chat

__all__ = ["Gateway", "Render", "new_id", "refused"]

Render = Callable[[object], str]


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
    # One: the interpreter's lock lets no second one help, and each takes time from the event loop.
    reader: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "reader"))

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
        self.reader.shutdown()

    @contextmanager
    def refusing_faults(self, request_id: str, path: str) -> Iterator[None]:
        """Whatever is unexpected in the block is logged, and becomes a Refusal with 500."""
        try:
            yield
        except (Refusal, ClientError, ClientDisconnect):
            raise
        except Exception as error:
            self.tell_fault(error, request_id, path)
            raise internal_error(request_id) from error

    def tell_fault(self, error: BaseException, request_id: str, path: str) -> None:
        """Log what was not expected."""
        self.tell({"id": request_id, "path": path, **described(error)})

    def tell(self, line: Mapping[str, Any]) -> None:
        """Log a line."""
        self.log(json.dumps({"time": _now(), **line}))

    def refuse(self, refusal: Refusal, request_id: str, path: str, key: str) -> Response:
        """Count and log a request that goes to no arm: its answer. The log has the code and the
        key that is at fault. It does not have the message, which may hold what the client sent.
        """
        self.metrics.requests.labels(path, "-", str(refusal.status)).inc()
        line = {
            "id": request_id,
            "path": path,
            "arm": "-",
            "key": key,
            "status": str(refusal.status),
            "error": refusal.code or "refused",
            **({"param": name} if (name := refusal.parameter) in KNOWN else {}),
        }
        self.tell(line)
        return refused(refusal, request_id)

    def note(self, request: Finished, path: str, key: str) -> None:
        """Count and log a request, and tell whoever chooses the arms."""
        metrics, arm, statistics = self.metrics, request.arm, request.statistics
        status = HUNG_UP if request.status is None else str(request.status)
        metrics.requests.labels("shadow" if request.is_shadow else path, arm, status).inc()
        if request.ttft_ns is not None:
            metrics.ttft.labels(arm).observe(request.ttft_ns / 1e9)
        if request.status == 200:
            self.token_at_s[arm] = time.monotonic()
        elif request.is_unavailable:  # until a probe, or another request, has a token again
            self.token_at_s.pop(arm, None)
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
        self.tell(line)
        self.arms.finished(request)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def refused(refusal: Refusal, request_id: str | None = None) -> Response:
    headers = {} if request_id is None else {"X-Request-Id": request_id}
    if refusal.retry_after_s is not None:
        headers["Retry-After"] = str(refusal.retry_after_s)
    if refusal.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(refusal.body(), refusal.status, headers)


def new_id() -> str:
    return f"req-{secrets.token_hex(12)}"
