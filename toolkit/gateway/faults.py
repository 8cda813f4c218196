"""What nobody expects to go wrong in a request: a fault of the gateway itself.

The log has where it happened. It has no message of the exception, which may quote what a client
sent, and prompts and texts are never logged. Clients are told the request's id, by which the log
can be searched, and nothing else.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import Any

from toolkit.gateway.protocol import Refusal

__all__ = ["INTERNAL", "described", "internal_error"]

INTERNAL = "internal_error"


def internal_error(request_id: str) -> Refusal:
    """What clients are told."""
    what = f"the gateway has failed at this request; its log has more under the id {request_id}"
    return Refusal(what, status=500, code=INTERNAL)


def described(error: BaseException) -> dict[str, Any]:
    """What the log is told: the exception's type and its traceback, the causes first."""
    lines = []
    for cause in reversed(list(_chain(error))):
        for frame in traceback.extract_tb(cause.__traceback__):
            lines.append(f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}")
        lines.append(_name(cause))
    return {"fault": _name(error), "traceback": lines}


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception, then what it came from."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        is_hidden = current.__suppress_context__
        current = current.__cause__ or (None if is_hidden else current.__context__)


def _name(error: BaseException) -> str:
    kind = type(error)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{module}{kind.__qualname__}"
