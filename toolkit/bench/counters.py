"""Compare the server's own counters with the client's sums: if they differ, one of them is wrong.

Counters are cumulative, so the difference over a window is taken: everything that one validation
sent, its warm-up included. The server publishes its counters with a short delay, so reading is
repeated until they agree, for a few seconds at most.

Where a server does not tell the draft tokens of each request, its counters tell the acceptance of
all requests in the window together, those of other clients included. vLLM counts them as in
vllm/v1/spec_decode/metrics.py: a draft is one block of draft tokens, which one verify step judges.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from toolkit.bench.metrics import positions
from toolkit.records.measured import Acceptance, CounterCheck, Finding

if TYPE_CHECKING:
    from toolkit.client import RequestTiming

__all__ = [
    "SETTLE_S",
    "client_counts",
    "counted_acceptance",
    "counters_finding",
    "foreign_requests",
    "has_equal_blocks",
    "has_speculation",
    "pooled",
    "read_counters",
    "reconcile",
    "settled",
    "under_toolkit_names",
]

SETTLE_S = 3.0
POLL_S = 0.1
STILL_S = 0.5
SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
MODEL_LABEL = re.compile(r'(?:^|,)model(?:_name)?="(?P<model>[^"]*)"')
# Prefixes of counters that the server keeps per model, each under the model's label.
PER_MODEL = ("nv_", "vllm:")
# Accepted draft tokens by their place in the block, from 0; the samples are kept apart.
ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
POSITION_LABEL = re.compile(r'(?:^|,)position="(?P<position>\d+)"')
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
    {
        "requests": "vllm:request_success_total",
        "output_tokens": "vllm:generation_tokens_total",
        "drafted": "vllm:spec_decode_num_draft_tokens_total",
        "accepted": "vllm:spec_decode_num_accepted_tokens_total",
        "verify_steps": "vllm:spec_decode_num_drafts_total",
    },
    {"requests": "nv_inference_request_success"},
)
VLLM = FAMILIES[1]


def read_counters(metrics_url: str, model: str | None = None) -> dict[str, float]:
    """Read the Prometheus page at this URL: name -> value, summed over labels, such as engines.
    Raises OSError, ValueError or HTTPException if it cannot be read.

    Accepted tokens by position keep that label in the name: `NAME{position="0"}`. model: leave out
    what Triton and vLLM counted for other models. A vLLM server that names a single model has
    counted the asked one there: it may be an alias or an adapter of it.
    """
    # The server is near, so a proxy of the environment is ignored.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(metrics_url, timeout=10) as response:
        return parse_counters(response.read().decode("utf-8", "replace"), model)


def parse_counters(page: str, model: str | None = None) -> dict[str, float]:
    """The samples of a page in Prometheus' text format. Lines that are not samples are skipped."""
    samples = [match for line in page.splitlines() if (match := SAMPLE.match(line)) is not None]
    others = {prefix: _other_models(samples, prefix, model) for prefix in PER_MODEL}
    totals: dict[str, float] = {}
    for sample in samples:
        name = sample["name"]
        if any(name.startswith(prefix) and _model(sample) in others[prefix] for prefix in others):
            continue
        if name == ACCEPTED_AT and (place := POSITION_LABEL.search(sample["labels"] or "")):
            name = accepted_at(int(place["position"]))
        with contextlib.suppress(ValueError):
            totals[name] = totals.get(name, 0.0) + float(sample["value"])
    return totals


def _model(sample: re.Match[str]) -> str | None:
    label = MODEL_LABEL.search(sample["labels"] or "")
    return None if label is None else label["model"]


def _other_models(
    samples: Sequence[re.Match[str]], prefix: str, model: str | None
) -> set[str | None]:
    """The models whose samples are left out."""
    names = {_model(sample) for sample in samples if sample["name"].startswith(prefix)} - {None}
    is_alias = prefix == "vllm:" and model not in names and len(names) == 1
    if model is None or is_alias:
        return set()
    return names - {model}


def accepted_at(position: int) -> str:
    """The name under which `read_counters` gives vLLM's accepted tokens at this position."""
    return f'{ACCEPTED_AT}{{position="{position}"}}'


def under_toolkit_names(counters: Mapping[str, float]) -> dict[str, float]:
    """The counters of the first known family under the names of the toolkit's own, where the
    meaning is the same; other counters are left out.
    """
    family = _family(counters)
    return {FAMILIES[0][what]: counters[name] for what, name in family.items() if name in counters}


def _family(names: Iterable[str]) -> dict[str, str]:
    """The first family whose requests are counted; empty if none is."""
    known = set(names)
    return next((family for family in FAMILIES if family["requests"] in known), {})


def has_speculation(counters: Mapping[str, float]) -> bool:
    """Whether the server counts drafted and accepted tokens and verify steps."""
    family = _family(counters)
    return all(family.get(what) in counters for what in ("drafted", "accepted", "verify_steps"))


def counted_acceptance(now: Mapping[str, float], before: Mapping[str, float]) -> Acceptance | None:
    """The acceptance of everything that the server did between two readings of its counters.

    None if it counts no speculation, or was started anew between them. vLLM does not count drafted
    tokens by position: a position's `drafted` is the number of verify steps, as in vLLM's own
    rates, which is exact if `has_equal_blocks`. There is no alpha, since nothing tells prompts
    apart.
    """
    if not has_speculation(now):
        return None
    family = _family(now)
    drafted, accepted, steps = (
        _growth(family[what], now, before) for what in ("drafted", "accepted", "verify_steps")
    )
    places = sum(name.startswith(ACCEPTED_AT) for name in now)
    accepted_by_position = [_growth(accepted_at(i), now, before) for i in range(places)]
    if min(drafted, accepted, steps, *accepted_by_position) < 0:
        return None
    return Acceptance(
        rate=accepted / drafted if drafted else None,
        length=1 + accepted / steps if steps else None,
        drafted=drafted,
        accepted=accepted,
        verify_steps=steps,
        by_position=positions([steps] * places, accepted_by_position) if steps else (),
    )


def pooled(parts: Sequence[Acceptance]) -> Acceptance:
    """The acceptance of several windows together: the counts are summed first and then divided."""
    drafted, accepted, steps = (
        sum(getattr(part, name) for part in parts)
        for name in ("drafted", "accepted", "verify_steps")
    )
    rows = [part.by_position for part in parts if part.by_position]
    columns = list(zip(*rows, strict=True))
    return Acceptance(
        rate=accepted / drafted if drafted else None,
        length=1 + accepted / steps if steps else None,
        drafted=drafted,
        accepted=accepted,
        verify_steps=steps,
        by_position=positions(
            [sum(place.drafted for place in column) for column in columns],
            [sum(place.accepted for place in column) for column in columns],
        ),
    )


def has_equal_blocks(acceptance: Acceptance) -> bool:
    """Whether every block had a draft token at every position that is counted."""
    return acceptance.drafted == acceptance.verify_steps * len(acceptance.by_position)


def client_counts(
    requests: Sequence[RequestTiming], known: Iterable[str] | None = None
) -> dict[str, int]:
    """What the server should have counted for these requests, under the server's names.

    known: the names of the counters that the server has; None stands for the toolkit's own. The
    result is empty if the server has none of the known families. A figure that the server does not
    report to its clients, such as the output tokens of some servers, is left out.
    """
    family = _family(FAMILIES[0].values() if known is None else known)
    expected: dict[str, int] = {}
    for what, name in family.items():
        if what == "requests":
            expected[name] = len(requests)
            continue
        values = [getattr(request.statistics, what) for request in requests]
        if known is None or any(value is not None for value in values):
            expected[name] = sum(value or 0 for value in values)
    if family is VLLM:
        expected |= _accepted_by_position(requests)
    return expected


def _accepted_by_position(requests: Sequence[RequestTiming]) -> dict[str, int]:
    rows = [request.statistics.accepted_by_position or () for request in requests]
    return {
        accepted_at(i): sum(row[i] for row in rows if i < len(row))
        for i in range(max(map(len, rows), default=0))
    }


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
    if foreign := foreign_requests(checks):
        why = f"{foreign} requests of other clients were served in the same time"
    if failed:
        why = f"{failed} requests failed, which the server may count"
    detail = f"the server's counters differ from the client's own counts: {listed}; {why}"
    return Finding("counters", "warning", detail)


def foreign_requests(checks: Sequence[CounterCheck]) -> int:
    """How many more requests the server counted than we sent: those of other clients."""
    names = {family["requests"] for family in FAMILIES}
    return sum(
        max(0, check.server - check.client)
        for check in checks
        if check.name in names and check.server is not None
    )


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
    known |= {name for name in seen if name.startswith(ACCEPTED_AT)}
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
    server = _growth(name, now, before) if name in now else None
    return CounterCheck(name, client=count, server=server, matches=server == count)


def _growth(name: str, now: Mapping[str, float], before: Mapping[str, float]) -> int:
    return round(now.get(name, 0.0) - before.get(name, 0.0))
