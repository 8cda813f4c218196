"""The server's own counters, beside what its client added up: a disagreement means that one of them is wrong.

Counters are cumulative, so they are differenced over the window: everything that one validation sent, its warm-up included.
The server publishes them with a short delay, so reading waits until they agree, for a few seconds at most.
"""

from __future__ import annotations

import math
import re
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from toolkit.records import CounterCheck

if TYPE_CHECKING:
    from toolkit.client import RequestTiming

__all__ = ["client_counts", "read_counters", "reconcile"]

SETTLE_S = 3.0
POLL_S = 0.1
SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{.*\})?\s+(?P<value>\S+)")


def read_counters(metrics_url: str) -> dict[str, float]:
    """Name -> value, summed over labels, of a Prometheus page; whole URL. Raises OSError when it cannot be read."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the server is near; no proxy stands between
    with opener.open(metrics_url, timeout=10) as response:
        return parse_counters(response.read().decode("utf-8"))


def parse_counters(page: str) -> dict[str, float]:
    """The samples of a page in Prometheus' text format."""
    totals: dict[str, float] = {}
    for line in page.splitlines():
        if (match := SAMPLE.match(line)) is not None:
            totals[match["name"]] = totals.get(match["name"], 0.0) + float(match["value"])
    return totals


def client_counts(requests: Sequence[RequestTiming]) -> dict[str, int]:
    """What the server should have counted for these requests, under its own names."""

    def total(name: str) -> int:
        return sum(getattr(request.statistics, name) or 0 for request in requests)

    return {
        "toolkit_requests": len(requests),
        "toolkit_output_tokens": total("output_tokens"),
        "toolkit_draft_tokens": total("drafted"),
        "toolkit_accepted_draft_tokens": total("accepted"),
        "toolkit_verify_steps": total("verify_steps"),
    }


def reconcile(
    read: Callable[[], Mapping[str, float]],
    before: Mapping[str, float],
    expected: Mapping[str, int],
    *,
    settle_s: float = SETTLE_S,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[CounterCheck, ...]:
    """Difference the counters against `before`, and compare with the client's counts; server None: it has no such counter."""
    polls = math.ceil(settle_s / POLL_S)
    while True:
        now = read()
        checks = tuple(_check(name, count, now, before) for name, count in expected.items())
        if all(check.matches for check in checks) or polls == 0:
            return checks
        sleep(POLL_S)
        polls -= 1


def _check(name: str, count: int, now: Mapping[str, float], before: Mapping[str, float]) -> CounterCheck:
    server = round(now[name] - before.get(name, 0.0)) if name in now else None
    return CounterCheck(name, client=count, server=server, matches=server == count)
