"""The server's own counters, beside what its client added up: a disagreement means that one of them
is wrong.

Counters are cumulative, so they are differenced over the window: everything that one validation
sent, its warm-up included. The server publishes them with a short delay, so reading waits until
they agree, for a few seconds at most.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from toolkit.records.measured import CounterCheck, Finding

if TYPE_CHECKING:
    from toolkit.client import RequestTiming

__all__ = [
    "SETTLE_S",
    "client_counts",
    "counters_finding",
    "read_counters",
    "reconcile",
    "settled",
]

SETTLE_S = 3.0
POLL_S = 0.1
STILL_S = 0.5
SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
MODEL_LABEL = re.compile(r'(?:^|,)model(?:_name)?="(?P<model>[^"]*)"')
PER_MODEL = (
    "nv_",
    "vllm:",
)  # families that count every model of the server, each under its own label
# What a server calls requests, output tokens, drafted and accepted tokens, verify steps. The first
# family that it has is taken.
FAMILIES: tuple[dict[str, str], ...] = (
    {
        "requests": "toolkit_requests",
        "output_tokens": "toolkit_output_tokens",
        "drafted": "toolkit_draft_tokens",
        "accepted": "toolkit_accepted_draft_tokens",
        "verify_steps": "toolkit_verify_steps",
    },
    {"requests": "vllm:request_success_total", "output_tokens": "vllm:generation_tokens_total"},
    {"requests": "nv_inference_request_success"},
)


def read_counters(metrics_url: str, model: str | None = None) -> dict[str, float]:
    """Name -> value, summed over labels, of a Prometheus page; whole URL. Raises OSError when it
    cannot be read.

    model: leave out what Triton and vLLM counted for other models.
    """
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({})
    )  # the server is near; no proxy stands between
    with opener.open(metrics_url, timeout=10) as response:
        return parse_counters(response.read().decode("utf-8", "replace"), model)


def parse_counters(page: str, model: str | None = None) -> dict[str, float]:
    """The samples of a page in Prometheus' text format; lines that are none are skipped."""
    totals: dict[str, float] = {}
    for line in page.splitlines():
        if (match := SAMPLE.match(line)) is None:
            continue
        label = MODEL_LABEL.search(match["labels"] or "")
        if (
            model is not None
            and label is not None
            and label["model"] != model
            and match["name"].startswith(PER_MODEL)
        ):
            continue
        with contextlib.suppress(ValueError):
            totals[match["name"]] = totals.get(match["name"], 0.0) + float(match["value"])
    return totals


def client_counts(
    requests: Sequence[RequestTiming], known: Iterable[str] | None = None
) -> dict[str, int]:
    """What the server should have counted for these requests, under its own names.

    known: names of the counters that it has; without it, ours. Empty where it has none of those
    that we know. What the client was not told, such as the output tokens of a server that counts
    them only for itself, is left out.
    """
    names = set(FAMILIES[0].values() if known is None else known)
    family = next((family for family in FAMILIES if family["requests"] in names), {})
    expected: dict[str, int] = {}
    for what, name in family.items():
        if what == "requests":
            expected[name] = len(requests)
            continue
        values = [getattr(request.statistics, what) for request in requests]
        if known is None or any(value is not None for value in values):
            expected[name] = sum(value or 0 for value in values)
    return expected


def reconcile(
    read: Callable[[], Mapping[str, float]],
    before: Mapping[str, float],
    expected: Mapping[str, int],
    *,
    settle_s: float = SETTLE_S,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[CounterCheck, ...]:
    """Difference the counters against `before`, and compare with the client's counts; server
    None: it has no such counter.
    """
    polls = math.ceil(settle_s / POLL_S)
    while True:
        now = read()
        checks = tuple(_check(name, count, now, before) for name, count in expected.items())
        if all(check.matches for check in checks) or polls == 0:
            return checks
        sleep(POLL_S)
        polls -= 1


def counters_finding(checks: Sequence[CounterCheck], *, unread: str, failed: int = 0) -> Finding:
    """What the comparison says. unread: why nothing was compared; failed: requests of ours that
    the server may have counted all the same.
    """
    if not checks:
        return Finding("counters", "warning", unread)
    wrong = [check for check in checks if not check.matches]
    if not wrong:
        detail = f"{len(checks)} counters of the server equal the client's own counts"
        return Finding("counters", "ok", detail)
    listed = ", ".join(f"{check.name} {check.server} against {check.client}" for check in wrong)
    why = "another client was served, or one is wrong"
    if failed:
        why = f"{failed} requests failed, which the server may count"
    detail = f"the server's counters differ from the client's own counts: {listed}; {why}"
    return Finding("counters", "warning", detail)


def settled(
    read: Callable[[], Mapping[str, float]],
    *,
    still_s: float = STILL_S,
    settle_s: float = SETTLE_S,
    sleep: Callable[[float], None] = time.sleep,
) -> Mapping[str, float]:
    """The counters once those that we know have stood still for `still_s`; as they are after
    settle_s at the latest.
    """
    known = {name for family in FAMILIES for name in family.values()}
    seen, still = read(), 0.0
    for _ in range(math.ceil(settle_s / POLL_S)):
        if still >= still_s:
            break
        sleep(POLL_S)
        now = read()
        same = all(now.get(name) == seen.get(name) for name in known)
        seen, still = now, still + POLL_S if same else 0.0
    return seen


def _check(
    name: str, count: int, now: Mapping[str, float], before: Mapping[str, float]
) -> CounterCheck:
    server = round(now[name] - before.get(name, 0.0)) if name in now else None
    return CounterCheck(name, client=count, server=server, matches=server == count)
