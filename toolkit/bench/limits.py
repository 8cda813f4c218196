"""Gates of a bench, as they are written on a command line: `ttft_p90<=200`, `tokens_per_s>=100`,
`speed>=1.2`.

A limit on something that was not measured FAILs and says so; one that too few samples support is
INCONCLUSIVE and says how many it takes. Requests that fail are judged whether asked or not, since
figures of the rest alone flatter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from toolkit.bench.definitions import LATENCIES, LATENCY_PERCENTILES, METRICS
from toolkit.bench.gate import gate_name, make_gate
from toolkit.bench.metrics import too_few_words
from toolkit.bench.verdict import FAIL, INCONCLUSIVE, PASS, outcome
from toolkit.errors import UsageError
from toolkit.records.bench import BenchArm, BenchPoint
from toolkit.records.measured import Direction, Gate, Scope
from toolkit.resampling import CONFIDENCE
from toolkit.rounding import decimals
from toolkit.words import GateOutcome

__all__ = ["Limit", "judge", "parse_goodput", "parse_limit", "straddled"]

FORM = re.compile(
    r"^\s*(?P<name>[a-z0-9_]+)\s*(?P<sign><=|>=)\s*(?P<limit>[0-9.]+(?:e-?[0-9]+)?)\s*$"
)
# metric -> field of BenchArm
RATES = {"throughput": "tokens_per_s", "requests_per_s": "requests_per_s", "goodput": "goodput"}
MEASURABLE: tuple[tuple[str, Scope], ...] = (
    *((name, Scope(percentile=q)) for name, q in LATENCY_PERCENTILES.values()),
    *((name, Scope(percentile=q, over="first_arm")) for name, q in LATENCY_PERCENTILES.values()),
    *((name, Scope()) for name in RATES),
    ("speed", Scope(over="first_arm")),
    ("errors", Scope()),
)
BY_NAME = {gate_name(metric, scope): (metric, scope) for metric, scope in MEASURABLE}
MORE_SAMPLES = "Raise --requests or --rounds."
TOO_NOISY = "Too close to call: run on an idle machine, or raise --max-rounds or --requests."


@dataclass(frozen=True, slots=True)
class Limit:
    """metric and scope: one of MEASURABLE. Latencies in ms, errors as a share of the requests."""

    metric: str
    scope: Scope
    direction: Direction
    limit: float

    @property
    def name(self) -> str:
        """As it is written on the command line."""
        return gate_name(self.metric, self.scope)


NO_ERRORS = Limit("errors", Scope(), "at_most", 0.0)


def parse_limit(text: str) -> Limit:
    """Raises UsageError for what is no limit."""
    match = FORM.match(text)
    hint = f"Write NAME<=NUMBER or NAME>=NUMBER. Names: {', '.join(BY_NAME)}."
    if match is None:
        raise UsageError(f"{text!r} is no limit", hint=hint)
    if match["name"] not in BY_NAME:
        raise UsageError(f"{match['name']!r} is not measured", hint=hint)
    direction: Direction = "at_least" if match["sign"] == ">=" else "at_most"
    return Limit(*BY_NAME[match["name"]], direction, _number(match["limit"], text))


def parse_goodput(text: str) -> dict[str, float]:
    """`ttft=200,tpot=25` -> {"ttft": 200.0, "tpot": 25.0}, in ms. Raises UsageError."""
    hint = f"Write NAME=MILLISECONDS, separated by commas. Names: {', '.join(LATENCIES)}."
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, sign, number = part.strip().partition("=")
        if not sign or name.strip() not in LATENCIES:
            raise UsageError(f"{part.strip()!r} is no limit of a latency", hint=hint)
        limits[name.strip()] = _number(number, part)
    return limits


def _number(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UsageError(f"{where!r} has no number for a limit", hint="Write it as 200 or 0.5.")
    return value


def straddled(gate: Gate) -> bool:
    """Whether more rounds could decide it."""
    return gate.outcome == INCONCLUSIVE


def judge(limits: Sequence[Limit], point: BenchPoint, *, at: bool = False) -> list[Gate]:
    """The gates of the last arm at one load, and one for failed requests. at: name the load,
    where there are several.
    """
    if at:
        limits = [_at(limit, point) for limit in limits]
    is_stated = any(limit.metric == "errors" for limit in limits)
    of_errors = [] if is_stated else [_at(NO_ERRORS, point) if at else NO_ERRORS]
    return [_judge(limit, point) for limit in (*of_errors, *limits)]


def _at(limit: Limit, point: BenchPoint) -> Limit:
    scope = replace(limit.scope, concurrency=point.concurrency, rate=point.rate)
    return replace(limit, scope=scope)


def _judge(limit: Limit, point: BenchPoint) -> Gate:
    if limit.metric == "errors":
        return _errors(point, limit)
    if limit.scope.over is not None:
        return _ratio(point, limit)
    if limit.scope.percentile is not None:
        return _latency(point.arms[-1], limit)
    return _rate(point.arms[-1], limit)


def _gate(
    limit: Limit, outcome: GateOutcome, measured: float | None, detail: str, next_step: str | None
) -> Gate:
    return make_gate(
        limit.metric,
        limit.scope,
        outcome,
        measured,
        limit.limit,
        detail,
        next_step,
        direction=limit.direction,
    )


def _errors(point: BenchPoint, limit: Limit) -> Gate:
    requests, failed = (
        sum(arm.requests for arm in point.arms),
        sum(arm.failed for arm in point.arms),
    )
    share = failed / requests
    good = share >= limit.limit if limit.direction == "at_least" else share <= limit.limit
    first = next((error for arm in point.arms for error in arm.errors), "")
    detail = f"{failed} of {requests} requests failed" + (
        f"; the most common: {first}" if first else ""
    )
    step = (
        None
        if good
        else "Fix the endpoint, or allow a share of failures with --gate 'errors<=0.01'."
    )
    return _gate(limit, PASS if good else FAIL, share, detail, step)


def _unmeasured(limit: Limit, why: str, step: str) -> Gate:
    return _gate(limit, FAIL, None, f"not measured: {why}", step)


def _latency(arm: BenchArm, limit: Limit) -> Gate:
    name, q = limit.metric, limit.scope.percentile
    assert q is not None  # a latency has one
    latency = arm.latencies[name]
    if latency.samples == 0:
        why = (
            "no request was answered"
            if arm.failed == arm.requests
            else f"this endpoint gives no {name}"
        )
        return _unmeasured(
            limit,
            why,
            "ITL and TPOT need a server that counts output tokens; gate icl or e2e instead.",
        )
    value, low, high = (getattr(latency, f"p{q}{end}") for end in ("", "_low", "_high"))
    if value is None:
        detail = f"no p{q}: {too_few_words(q, latency.unsupported[f'p{q}'])}"
        return _gate(limit, INCONCLUSIVE, None, detail, MORE_SAMPLES)
    digits = decimals((value, low, high), limit.limit)
    ends = f"{low:.{digits}f} to {high:.{digits}f}"
    detail = f"{value:.{digits}f} {METRICS[name].unit}, {CONFIDENCE:.0%} interval {ends}"
    return _judged(limit, value, low, high, detail)


def _rate(arm: BenchArm, limit: Limit) -> Gate:
    field = RATES[limit.metric]
    value = getattr(arm, field)
    if value is None:
        why = (
            "the server does not count output tokens"
            if limit.metric == "throughput"
            else "no limits make a request good"
        )
        return _unmeasured(
            limit,
            why,
            "State them with --goodput." if limit.metric == "goodput" else "Gate requests_per_s.",
        )
    rounds = getattr(arm, f"{field}_by_round")
    if len(rounds) < 2:
        detail = f"{value:.2f}, of one round, which has no spread to judge by"
        return _gate(limit, INCONCLUSIVE, value, detail, "Measure more: --rounds 3.")
    from scipy.stats import t

    half = float(
        t.ppf((1 + CONFIDENCE) / 2, len(rounds) - 1)
        * np.std(rounds, ddof=1)
        / math.sqrt(len(rounds))
    )
    low, high = float(np.mean(rounds)) - half, float(np.mean(rounds)) + half
    digits = decimals((value, low, high), limit.limit)
    ends = f"{low:.{digits}f} to {high:.{digits}f}"
    detail = f"{value:.{digits}f}, {CONFIDENCE:.0%} interval {ends} over {len(rounds)} rounds"
    return _judged(limit, value, low, high, detail)


def _ratio(point: BenchPoint, limit: Limit) -> Gate:
    wanted = (limit.metric, limit.scope.percentile)
    ratio = next((one for one in point.ratios if (one.metric, one.percentile) == wanted), None)
    if ratio is None:
        step = "Compare two: --against-plain, or --baseline URL."
        return _unmeasured(limit, "there is one arm", step)
    if ratio.estimate is None or ratio.low is None or ratio.high is None:
        reason = ratio.reason or "no samples"
        if ratio.too_few is not None:
            return _gate(limit, INCONCLUSIVE, None, reason, MORE_SAMPLES)
        return _unmeasured(limit, reason, "Fix the endpoint, or gate what it gives.")
    digits = decimals((ratio.estimate, ratio.low, ratio.high), limit.limit, least=3)
    ends = f"{ratio.low:.{digits}f} to {ratio.high:.{digits}f}"
    detail = f"{ratio.estimate:.{digits}f}, {CONFIDENCE:.0%} interval {ends}"
    return _judged(limit, ratio.estimate, ratio.low, ratio.high, detail)


def _judged(limit: Limit, value: float, low: float, high: float, detail: str) -> Gate:
    result = outcome(low, high, limit.limit, at_least=limit.direction == "at_least")
    steps = {
        PASS: None,
        FAIL: "Not met: fix the deployment or the limit.",
        INCONCLUSIVE: TOO_NOISY,
    }
    return _gate(limit, result, value, detail, steps[result])
