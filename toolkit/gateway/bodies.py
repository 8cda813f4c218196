"""A request's body: read within its limits, and understood as a JSON object.

Of a key that a body has twice, the last value counts, as in vLLM's server and others that read JSON
with their language's own parser.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

from starlette.requests import Request

from toolkit.gateway.protocol import Refusal

__all__ = ["INVALID", "body_of", "read_body"]

INVALID = "invalid_body"
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_body(request: Request, max_bytes: int, limit_s: float) -> bytes:
    """The request's body. Raises Refusal, and ClientDisconnect."""
    too_long = Refusal(
        f"the body has more than {max_bytes:,} bytes", status=413, code="body_too_large"
    )
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
        return await asyncio.wait_for(read(), limit_s)
    except asyncio.TimeoutError as error:  # another class than TimeoutError in Python 3.10
        what = f"the body has not come within {limit_s:g} s"
        raise Refusal(what, status=408, code="body_too_late") from error


def body_of(data: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raises Refusal."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Refusal(f"the body is not JSON: {error}", code=INVALID) from error
    if not isinstance(body, dict):
        raise Refusal("the body has to be a JSON object", code=INVALID)
    # JSON can spell half of a surrogate pair (a client that cut a text within an emoji does), which
    # no text in UTF-8 has. Names and keys would carry it as far as a prompt.
    if SURROGATE.search(data) and not _is_text(body):
        what = "the body has half of a surrogate pair, as where an emoji was cut in two"
        raise Refusal(what, code=INVALID)
    return body


def _is_text(body: dict[str, Any]) -> bool:
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        return False
    return True
