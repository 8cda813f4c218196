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
from dataclasses import dataclass

import numpy as np

from toolkit.bench.metrics import LATENCIES, PERCENTILES, too_few_words
from toolkit.bench.verdict import FAIL, INCONCLUSIVE, PASS, outcome
from toolkit.errors import UsageError
from toolkit.records.bench import BenchArm, BenchPoint
from toolkit.records.measured import Gate
from toolkit.resampling import CONFIDENCE
from toolkit.rounding import decimals

__all__ = ["Limit", "judge", "parse_goodput", "parse_limit", "straddled"]

FORM = re.compile(
    r"^\s*(?P<name>[a-z0-9_]+)\s*(?P<sign><=|>=)\s*(?P<limit>[0-9.]+(?:e-?[0-9]+)?)\s*$"
)
PERCENTILE_NAMES = tuple(f"{name}_p{q}" for name in LATENCIES for q in PERCENTILES)
RATES = ("tokens_per_s", "requests_per_s", "goodput")
NAMES = (
    *PERCENTILE_NAMES,
    *(f"{name}_ratio" for name in PERCENTILE_NAMES),
    *RATES,
    "speed",
    "errors",
)
TOO_NOISY = "Too close to call: run on an idle machine, or raise --max-rounds or --requests."


@dataclass(frozen=True, slots=True)
class Limit:
    """name: one of NAMES. Latencies in ms, errors as a share of the requests."""

    name: str
    at_least: bool
    limit: float


def parse_limit(text: str) -> Limit:
    """Raises UsageError for what is no limit."""
    match = FORM.match(text)
    hint = f"Write NAME<=NUMBER or NAME>=NUMBER. Names: {', '.join(NAMES)}."
    if match is None:
        raise UsageError(f"{text!r} is no limit", hint=hint)
    if match["name"] not in NAMES:
        raise UsageError(f"{match['name']!r} is not measured", hint=hint)
    return Limit(match["name"], match["sign"] == ">=", _number(match["limit"], text))


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
    suffix = (
        "" if not at else f"@{point.concurrency if point.concurrency is not None else point.rate:g}"
    )
    arm = point.arms[-1]
    stated = {limit.name for limit in limits}
    gates = [] if "errors" in stated else [_errors(point, Limit("errors", False, 0.0), suffix)]
    for limit in limits:
        if limit.name == "errors":
            gates.append(_errors(point, limit, suffix))
        elif limit.name in PERCENTILE_NAMES:
            gates.append(_latency(arm, limit, suffix))
        elif limit.name in RATES:
            gates.append(_rate(arm, limit, suffix))
        else:
            gates.append(_ratio(point, limit, suffix))
    return gates


def _errors(point: BenchPoint, limit: Limit, suffix: str) -> Gate:
    requests, failed = (
        sum(arm.requests for arm in point.arms),
        sum(arm.failed for arm in point.arms),
    )
    share = failed / requests
    good = share >= limit.limit if limit.at_least else share <= limit.limit
    first = next((error for arm in point.arms for error in arm.errors), "")
    detail = f"{failed} of {requests} requests failed" + (
        f"; the most common: {first}" if first else ""
    )
    step = (
        None
        if good
        else "Fix the endpoint, or allow a share of failures with --gate 'errors<=0.01'."
    )
    return Gate(f"errors{suffix}", PASS if good else FAIL, share, limit.limit, detail, step)


def _unmeasured(limit: Limit, suffix: str, why: str, step: str) -> Gate:
    return Gate(limit.name + suffix, FAIL, None, limit.limit, f"not measured: {why}", step)


def _latency(arm: BenchArm, limit: Limit, suffix: str) -> Gate:
    name, percentile = limit.name.rsplit("_", 1)
    latency = arm.latencies[name]
    if latency.samples == 0:
        why = (
            "no request was answered"
            if arm.failed == arm.requests
            else f"this endpoint gives no {name}"
        )
        return _unmeasured(
            limit,
            suffix,
            why,
            "ITL and TPOT need a server that counts output tokens; gate icl or e2e instead.",
        )
    value, low, high = (getattr(latency, percentile + end) for end in ("", "_low", "_high"))
    if value is None:
        lacking = latency.unsupported[percentile]
        detail = f"no {percentile}: {too_few_words(int(percentile[1:]), lacking)}"
        return Gate(
            limit.name + suffix,
            INCONCLUSIVE,
            None,
            limit.limit,
            detail,
            "Raise --requests or --rounds.",
        )
    digits = decimals((value, low, high), limit.limit)
    detail = (
        f"{value:.{digits}f} ms, {CONFIDENCE:.0%} interval {low:.{digits}f} to {high:.{digits}f}"
    )
    return _judged(limit, suffix, value, low, high, detail)


def _rate(arm: BenchArm, limit: Limit, suffix: str) -> Gate:
    value = getattr(arm, limit.name)
    if value is None:
        why = (
            "the server does not count output tokens"
            if limit.name == "tokens_per_s"
            else "no limits make a request good"
        )
        return _unmeasured(
            limit,
            suffix,
            why,
            "State them with --goodput." if limit.name == "goodput" else "Gate requests_per_s.",
        )
    rounds = getattr(arm, f"{limit.name}_by_round")
    if len(rounds) < 2:
        detail = f"{value:.2f}, of one round, which has no spread to judge by"
        return Gate(
            limit.name + suffix,
            INCONCLUSIVE,
            value,
            limit.limit,
            detail,
            "Measure more: --rounds 3.",
        )
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
    return _judged(limit, suffix, value, low, high, detail)


def _ratio(point: BenchPoint, limit: Limit, suffix: str) -> Gate:
    ratio = next(
        (ratio for ratio in point.ratios if ratio.name == limit.name.removesuffix("_ratio")), None
    )
    if ratio is None:
        return _unmeasured(
            limit, suffix, "there is one arm", "Compare two: --against-plain, or --baseline URL."
        )
    if ratio.estimate is None or ratio.low is None or ratio.high is None:
        reason = ratio.reason or "no samples"
        if ratio.too_few is not None:
            return Gate(
                limit.name + suffix,
                INCONCLUSIVE,
                None,
                limit.limit,
                reason,
                "Raise --requests or --rounds.",
            )
        return _unmeasured(limit, suffix, reason, "Fix the endpoint, or gate what it gives.")
    digits = decimals((ratio.estimate, ratio.low, ratio.high), limit.limit, least=3)
    ends = f"{ratio.low:.{digits}f} to {ratio.high:.{digits}f}"
    detail = f"{ratio.estimate:.{digits}f}, {CONFIDENCE:.0%} interval {ends}"
    return _judged(limit, suffix, ratio.estimate, ratio.low, ratio.high, detail)


def _judged(limit: Limit, suffix: str, value: float, low: float, high: float, detail: str) -> Gate:
    result = outcome(low, high, limit.limit, at_least=limit.at_least)
    steps = {
        PASS: None,
        FAIL: "Not met: fix the deployment or the limit.",
        INCONCLUSIVE: TOO_NOISY,
    }
    return Gate(limit.name + suffix, result, value, limit.limit, detail, steps[result])
