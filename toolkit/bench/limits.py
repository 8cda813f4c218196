"""Gates of a bench, as they are written on a command line: `ttft_p90<=200`, `tokens_per_s>=100`,
`speed>=1.2`.

If the metric of a limit was not measured, its gate FAILs and says so. If there are too few samples,
the gate is INCONCLUSIVE and says how many are needed. Failed requests are always judged, since the
figures of the other requests alone look better than the endpoint is.
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

LIMIT_FORMAT = re.compile(
    r"^\s*(?P<name>[a-z0-9_]+)\s*(?P<sign><=|>=)\s*(?P<limit>[0-9.]+(?:e-?[0-9]+)?)\s*$"
)
# metric -> field of BenchArm
RATES = {
    "throughput": "tokens_per_s",
    "requests_per_s": "requests_per_s",
    "goodput": "goodput",
    "acceptance_rate": "acceptance_rate",
    "acceptance_length": "acceptance_length",
}
MEASURABLE: tuple[tuple[str, Scope], ...] = (
    *((name, Scope(percentile=q)) for name, q in LATENCY_PERCENTILES.values()),
    *((name, Scope(percentile=q, over="first_arm")) for name, q in LATENCY_PERCENTILES.values()),
    *((name, Scope()) for name in RATES),
    ("goodput_share", Scope()),
    ("speed", Scope(over="first_arm")),
    ("errors", Scope()),
)
BY_NAME = {gate_name(metric, scope): (metric, scope) for metric, scope in MEASURABLE}
NO_LATENCY_LIMITS = "no latency limits are stated"
STATE_LATENCY_LIMITS = "State limits of latencies with --goodput."
MORE_SAMPLES = "Raise --requests or --rounds."
TOO_NOISY = "Too close to call: run on an idle machine, or raise --max-rounds or --requests."


@dataclass(frozen=True, slots=True)
class Limit:
    """A bound that a user states on one metric.

    metric and scope: one pair of MEASURABLE. limit: in ms for latencies, a share of the requests
    for errors.
    """

    metric: str
    scope: Scope
    direction: Direction
    limit: float

    @property
    def name(self) -> str:
        """The name on the command line."""
        return gate_name(self.metric, self.scope)


NO_ERRORS = Limit("errors", Scope(), "at_most", 0.0)


def parse_limit(text: str) -> Limit:
    """Read `NAME<=NUMBER` or `NAME>=NUMBER`. Raises UsageError for other text."""
    match = LIMIT_FORMAT.match(text)
    hint = f"Write NAME<=NUMBER or NAME>=NUMBER. Names: {', '.join(BY_NAME)}."
    if match is None:
        raise UsageError(f"{text!r} is not a limit", hint=hint)
    if match["name"] not in BY_NAME:
        raise UsageError(f"{match['name']!r} is not measured", hint=hint)
    direction: Direction = "at_least" if match["sign"] == ">=" else "at_most"
    return Limit(*BY_NAME[match["name"]], direction, _number(match["limit"], text))


def parse_goodput(text: str) -> dict[str, float]:
    """Read `ttft=200,tpot=25` as {"ttft": 200.0, "tpot": 25.0}, in ms. Raises UsageError."""
    hint = f"Write NAME=MILLISECONDS, separated by commas. Names: {', '.join(LATENCIES)}."
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, sign, number = part.strip().partition("=")
        if not sign or name.strip() not in LATENCIES:
            raise UsageError(f"{part.strip()!r} is not a limit of a latency", hint=hint)
        limits[name.strip()] = _number(number, part)
    return limits


def _number(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UsageError(f"{where!r} does not end in a number", hint="Write it as 200 or 0.5.")
    return value


def straddled(gate: Gate) -> bool:
    """Whether more rounds could decide the gate."""
    return gate.outcome == INCONCLUSIVE


def judge(limits: Sequence[Limit], point: BenchPoint, *, at: bool = False) -> list[Gate]:
    """Judge the last arm at one load: a gate per limit, and one for the failed requests of all
    arms.

    at: put the load into the gates' names, for runs with several loads.
    """
    if at:
        limits = [_at(limit, point) for limit in limits]
    is_stated = any(limit.metric == "errors" for limit in limits)
    if not is_stated:
        no_errors = _at(NO_ERRORS, point) if at else NO_ERRORS
        limits = [no_errors, *limits]
    return [_judge(limit, point) for limit in limits]


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
    if limit.metric == "goodput_share":
        return _goodput_share(point.arms[-1], limit)
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
    requests = sum(arm.requests for arm in point.arms)
    failed = sum(arm.failed for arm in point.arms)
    share = failed / requests
    is_met = share >= limit.limit if limit.direction == "at_least" else share <= limit.limit
    most_common = next((error for arm in point.arms for error in arm.errors), "")
    detail = f"{failed} of {requests} requests failed"
    detail += f"; the most common: {most_common}" if most_common else ""
    if is_met:
        return _gate(limit, PASS, share, detail, None)
    step = "Fix the endpoint, or allow a share of failures with --gate 'errors<=0.01'."
    return _gate(limit, FAIL, share, detail, step)


def _unmeasured(limit: Limit, reason: str, step: str) -> Gate:
    return _gate(limit, FAIL, None, f"not measured: {reason}", step)


def _latency(arm: BenchArm, limit: Limit) -> Gate:
    name, q = limit.metric, limit.scope.percentile
    assert q is not None  # a limit of a latency always has a percentile
    latency = arm.latencies[name]
    if latency.samples == 0:
        reason = f"this endpoint gives no {name}"
        if arm.failed == arm.requests:
            reason = "no request was answered"
        step = "ITL and TPOT need a server that counts output tokens; gate icl or e2e instead."
        return _unmeasured(limit, reason, step)
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
    if value is None and limit.metric == "goodput":
        return _unmeasured(limit, NO_LATENCY_LIMITS, STATE_LATENCY_LIMITS)
    if value is None and limit.metric in ("acceptance_rate", "acceptance_length"):
        return _unmeasured(
            limit,
            "the endpoint tells nothing of draft tokens",
            "Name its Prometheus page with --metrics-url, or switch speculation on.",
        )
    if value is None:
        return _unmeasured(
            limit, "the server does not count output tokens", "Gate requests_per_s instead."
        )
    rounds = getattr(arm, f"{field}_by_round")
    if len(rounds) < 2:
        detail = f"{value:.2f} in one round; an interval needs at least two"
        return _gate(limit, INCONCLUSIVE, value, detail, "Measure more: --rounds 3.")
    from scipy.stats import t

    half_width = float(
        t.ppf((1 + CONFIDENCE) / 2, len(rounds) - 1)
        * np.std(rounds, ddof=1)
        / math.sqrt(len(rounds))
    )
    mean = float(np.mean(rounds))
    low, high = mean - half_width, mean + half_width
    digits = decimals((value, low, high), limit.limit)
    ends = f"{low:.{digits}f} to {high:.{digits}f}"
    detail = f"{value:.{digits}f}, {CONFIDENCE:.0%} interval {ends} over {len(rounds)} rounds"
    return _judged(limit, value, low, high, detail)


def _goodput_share(arm: BenchArm, limit: Limit) -> Gate:
    share = arm.goodput_share
    if share is None:
        return _unmeasured(limit, NO_LATENCY_LIMITS, STATE_LATENCY_LIMITS)
    digits = decimals(
        [100 * value for value in (share.estimate, share.low, share.high)],
        100 * limit.limit,
        least=1,
    )
    ends = f"{share.low:.{digits}%} to {share.high:.{digits}%}"
    detail = (
        f"{share.estimate:.{digits}%} of {arm.requests:,} requests, {CONFIDENCE:.0%} interval"
        f" {ends}"
    )
    return _judged(limit, share.estimate, share.low, share.high, detail)


def _ratio(point: BenchPoint, limit: Limit) -> Gate:
    by_metric = {(ratio.metric, ratio.percentile): ratio for ratio in point.ratios}
    ratio = by_metric.get((limit.metric, limit.scope.percentile))
    if ratio is None:
        step = "Measure two arms: --against-plain, or --baseline URL."
        return _unmeasured(limit, "there is only one arm", step)
    if ratio.estimate is None or ratio.low is None or ratio.high is None:
        reason = ratio.reason or "no samples"
        if ratio.too_few is not None:
            return _gate(limit, INCONCLUSIVE, None, reason, MORE_SAMPLES)
        return _unmeasured(limit, reason, "Fix the endpoint, or gate a figure that it gives.")
    digits = decimals((ratio.estimate, ratio.low, ratio.high), limit.limit, least=3)
    ends = f"{ratio.low:.{digits}f} to {ratio.high:.{digits}f}"
    detail = f"{ratio.estimate:.{digits}f}, {CONFIDENCE:.0%} interval {ends}"
    return _judged(limit, ratio.estimate, ratio.low, ratio.high, detail)


def _judged(limit: Limit, value: float, low: float, high: float, detail: str) -> Gate:
    result = outcome(low, high, limit.limit, at_least=limit.direction == "at_least")
    steps = {
        PASS: None,
        FAIL: "Not met: improve the deployment, or change the limit.",
        INCONCLUSIVE: TOO_NOISY,
    }
    return _gate(limit, result, value, detail, steps[result])
