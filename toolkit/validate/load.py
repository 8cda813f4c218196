"""Judge an open loop by the limits of validation.load.

The arm that is deployed is judged; the plain one beside it shows what speculation changes. A rate
that the search did not find fails, with the share that the lowest probe kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from toolkit.bench.gate import make_gate
from toolkit.bench.limits import judge, parse_limit
from toolkit.bench.load import load_limits, needed_seconds
from toolkit.bench.proportions import clopper_pearson
from toolkit.bench.verdict import FAIL, INCONCLUSIVE, PASS, outcome
from toolkit.config.schema import LoadGates
from toolkit.records.bench import BenchArm, BenchPoint, BenchRun
from toolkit.records.load import LoadRun
from toolkit.records.measured import Finding, Gate, Scope
from toolkit.rounding import decimals

__all__ = ["judge_load", "load_findings"]

# Of a bench's findings, those that concern a report: others name options of its command line.
TOLD = ("errors", "lag", "streaming", "tokens")
KEPT_UP = 0.9  # share of the due rate that an arm has to answer, not to fall behind
TOO_SLOW = (
    "Not met at this rate: lower validation.load.rate, serve with more or faster hardware, or raise"
    " validation.load.{key}."
)
TOO_CLOSE = "Too close to call: raise validation.load.max_seconds, or run on an idle machine."
TOO_FEW = "Too few requests at this rate: validation.load.max_seconds: {seconds} gives enough."


def judge_load(load: LoadRun, limits: LoadGates) -> list[Gate]:
    """Return the gates of an open loop: one per stated limit, and one on failed requests."""
    if load.point is None:
        return [_no_rate(load, limits)]
    deployed = replace(load.point, arms=load.point.arms[-1:])
    gates = judge([parse_limit(text) for text in load_limits(limits)], deployed, at=True)
    judged = [gate for gate in gates if gate.metric != "errors"]
    return [
        _errors(deployed, limits),
        *(replace(gate, next_step=_next_step(gate, load.point, limits)) for gate in judged),
    ]


def load_findings(load: LoadRun, run: BenchRun | None) -> Iterator[Finding]:
    """Return what a reader should know about the open loop and no gate judges."""
    if run is not None:
        yield from (finding for finding in run.findings if finding.check in TOLD)
    if load.point is None or load.rate is None:
        return
    point, rate = load.point, load.rate
    for arm in point.arms:
        answered = _answered_per_s(arm, point.rounds)
        if answered < KEPT_UP * rate:
            is_deployed = arm is point.arms[-1]
            detail = (
                f"the {arm.name} arm answered {answered:.3g} of {rate:g} requests/s: its queue grew"
                " for as long as requests came, and so did its latencies"
            )
            yield Finding("load", "warning" if is_deployed else "note", detail)
    yield from _later_than_plain(load)
    if len(point.arms) == 1:
        detail = (
            "the open loop has no plain arm: two servers do not fit beside each other, or nothing"
            " speculates"
        )
        yield Finding("load", "note", detail)


def _later_than_plain(load: LoadRun) -> Iterator[Finding]:
    """Say so if speculation slows requests down at this rate, whatever it does for one alone."""
    if load.point is None or len(load.point.arms) == 1:
        return
    plain, deployed = (arm.latencies["e2e"] for arm in load.point.arms)
    if plain.p50_high is None or deployed.p50_low is None or deployed.p50_low <= plain.p50_high:
        return
    detail = (
        f"at {load.rate:g} requests/s half of the requests take more than {deployed.p50:,.0f} ms"
        f" with speculation and {plain.p50:,.0f} without: drafts cost more than they save when"
        " requests run together. speculation.adaptive or speculation.draft_len_schedule drafts less"
        " then"
    )
    yield Finding("load", "warning", detail)


def _answered_per_s(arm: BenchArm, rounds: int) -> float:
    """Answered requests per second, without the time that the last answer of each round takes
    where nothing waits.
    """
    answered = arm.requests - arm.failed
    ttft, tpot, e2e = (arm.latencies[name].curve for name in ("ttft", "tpot", "e2e"))
    unqueued_ms = e2e[0] if e2e else 0.0
    if ttft and tpot and arm.output_tokens is not None:
        # The median of all answers would hold the queue itself.
        unqueued_ms = ttft[0] + tpot[50] * (arm.output_tokens / answered - 1)
    return answered / max(arm.window_s - rounds * unqueued_ms / 1000, 1e-9)


def _no_rate(load: LoadRun, limits: LoadGates) -> Gate:
    lowest = min(load.probes, key=lambda probe: probe.rate)
    detail = (
        f"no rate was found that keeps the limits: at {lowest.rate:g} requests/s"
        f" {lowest.good_share:.1%} of {lowest.requests} requests do, and {lowest.failed} failed"
    )
    step = (
        "One request at a time is too slow for validation.load.goodput: raise these limits, or"
        " serve with faster hardware. A search that ended early takes more"
        " validation.load.search_seconds."
    )
    scope = Scope(rate=lowest.rate)
    return make_gate(
        "goodput_share", scope, FAIL, lowest.good_share, limits.min_goodput, detail, step
    )


def _errors(point: BenchPoint, limits: LoadGates) -> Gate:
    """Judge failed requests by exact bounds. No number of requests proves that none ever fails, so
    a limit of 0 passes if none did.
    """
    (arm,) = point.arms
    limit, share = limits.max_errors, arm.failed / arm.requests
    low, high = clopper_pearson(arm.failed, arm.requests)
    if limit == 0:
        low = high = share
    result = outcome(low, high, limit, at_least=False)
    detail = f"{arm.failed} of {arm.requests:,} requests failed"
    if limit > 0:
        digits = decimals([100 * value for value in (share, low, high)], 100 * limit, least=1)
        detail += f", exact bounds {low:.{digits}%} to {high:.{digits}%}"
    detail += f"; the most common: {next(iter(arm.errors))}" if arm.errors else ""
    steps = {
        PASS: None,
        FAIL: (
            "Lower validation.load.rate, or raise triton.max_queue_size where requests were"
            " refused, or allow failures with validation.load.max_errors."
        ),
        INCONCLUSIVE: TOO_CLOSE,
    }
    return make_gate("errors", Scope(rate=point.rate), result, share, limit, detail, steps[result])


def _next_step(gate: Gate, point: BenchPoint, limits: LoadGates) -> str | None:
    """Return what to do, in terms of the YAML instead of `toolkit bench`'s options."""
    if gate.outcome == PASS:
        return None
    if gate.outcome == INCONCLUSIVE and gate.measured is None and point.rate is not None:
        seconds = 10 * math.ceil(needed_seconds(point.rate, len(point.arms), limits) / 10)
        return TOO_FEW.format(seconds=seconds)
    if gate.outcome == INCONCLUSIVE:
        return TOO_CLOSE
    key = "goodput or min_goodput"
    if gate.scope.percentile is not None:
        key = f"max_{gate.metric}_p{gate.scope.percentile}_ms"
    return TOO_SLOW.format(key=key)
