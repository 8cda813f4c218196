"""Compare the server's own counters with the client's sums: if they differ, one of them is wrong.

Counters are cumulative, so the difference over a window is taken: everything that one validation
sent, its warm-up included. The server publishes its counters with a short delay, so reading is
repeated until they agree, for a few seconds at most.
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
# Prefixes of counters that the server keeps per model, each under the model's label.
PER_MODEL = ("nv_", "vllm:")
# The names that servers give to requests, output tokens, drafted and accepted tokens, verify steps.
# The first family that the server has is used.
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
    """Read the Prometheus page at this URL: name -> value, summed over labels. Raises OSError if it
    cannot be read.

    model: leave out what Triton and vLLM counted for other models.
    """
    # The server is near, so a proxy of the environment is ignored.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(metrics_url, timeout=10) as response:
        return parse_counters(response.read().decode("utf-8", "replace"), model)


def parse_counters(page: str, model: str | None = None) -> dict[str, float]:
    """The samples of a page in Prometheus' text format. Lines that are not samples are skipped."""
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
    """What the server should have counted for these requests, under the server's names.

    known: the names of the counters that the server has; None stands for the toolkit's own. The
    result is empty if the server has none of the known families. A figure that the server does not
    report to its clients, such as the output tokens of some servers, is left out.
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
    """Compare the counters' growth since `before` with the client's counts.

    A check's `server` is None if the server has no such counter.
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
    """Read the counters until the known ones have not changed for `still_s`, for `settle_s` at
    most.
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
