"""Two saved runs of `toolkit bench` judged: is B slower than A by more than the tolerance?

Where both sent the same prompts, requests pair by prompt, and what the prompts differ by cancels;
else each run is drawn on its own, and the intervals are wider. Either way the runs were not
interleaved: what the machine did differently in between is in the ratio and not in its interval,
which is said. Endpoints that can run at once are better compared in one run (--baseline).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from toolkit.bench import metrics
from toolkit.bench.gate import load_name, make_gate
from toolkit.bench.runner import SCHEMA_VERSION, speed_ratio
from toolkit.bench.verdict import FAIL, INCONCLUSIVE, PASS, outcome, verdict
from toolkit.client import RequestTiming, Statistics
from toolkit.errors import UsageError
from toolkit.pipeline.saved import read_saved
from toolkit.records.bench import BenchPoint, BenchRequest, BenchRun, ComparedPoint, Comparison
from toolkit.records.codec import from_json
from toolkit.records.measured import Direction, Finding, Gate, Ratio, Scope
from toolkit.words import GateOutcome

__all__ = ["compare_runs", "read_run"]

Rows: TypeAlias = dict[int, dict[int, BenchRequest]]  # round -> index -> request
JUDGED = (
    "speed",
    *(f"{name}_{q}" for name in ("ttft", "tpot", "e2e") for q in ("p50", "p90", "p99")),
)


def read_run(path: Path) -> BenchRun:
    """A saved run. Raises UsageError for a file that is none."""
    hint = "Give a file that `toolkit bench ... --out FILE` wrote."
    try:
        data = read_saved(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot be read: {error}", where=path, hint=hint) from error
    found = data.get("schema_version")
    if found != SCHEMA_VERSION:
        raise UsageError(f"not a run of schema {SCHEMA_VERSION} but {found}", where=path, hint=hint)
    try:
        run = from_json(BenchRun, data)
    except ValueError as error:
        raise UsageError(f"not a saved run: {error}", where=path, hint=hint) from error
    if not _is_whole(run):
        raise UsageError(
            "the requests of this run are not all there, or have counts that cannot be",
            where=path,
            hint=hint,
        )
    return run


def _is_whole(run: BenchRun) -> bool:
    """Has every arm some, and the same ones in every round? Somebody may have edited the file."""
    for at, point in enumerate(run.points):
        rounds = [_rows(run, at, arm.name) for arm in point.arms]
        if not rounds or not all(
            rows and len({frozenset(row) for row in rows.values()}) == 1 for rows in rounds
        ):
            return False
    counts = [count for one in run.requests for _, count in one.chunks if count is not None]
    return min(counts, default=0) >= 0


def compare_runs(a: BenchRun, b: BenchRun, *, tolerance: float = 0.05, seed: int = 0) -> Comparison:
    """B against A, for every load and arm that both have. Gates: B is at most `tolerance` slower,
    per figure and percentile.

    Raises UsageError where they have no load in common.
    """
    points: list[ComparedPoint] = []
    gates: list[Gate] = []
    findings = [
        Finding(
            "design",
            "warning",
            "two runs at two times: drift of the machine between them is not in the intervals",
        )
    ]
    for at_a, point in enumerate(a.points):
        for at_b, other in enumerate(b.points):
            if _load(a, point) != _load(b, other):
                continue
            shared = [
                arm.name for arm in other.arms if arm.name in {arm.name for arm in point.arms}
            ]
            for name in shared or [other.arms[-1].name]:
                in_a = name if name in shared else point.arms[-1].name
                rows = _rows(a, at_a, in_a), _rows(b, at_b, name)
                compared = _point(*rows, other, name, seed)
                scope = Scope(arm=name, concurrency=other.concurrency, rate=other.rate)
                points.append(compared)
                gates += [_errors(*rows, scope), *_gates(compared, tolerance, scope)]
    if not points:
        said = " and ".join(
            ", ".join(load_name(point.concurrency, point.rate) for point in run.points)
            for run in (a, b)
        )
        raise UsageError(
            f"the runs have no load in common: {said}",
            hint="Run both with the same --concurrency or --rate.",
        )
    for name in ("max_tokens", "temperature"):
        if a.settings.get(name) != b.settings.get(name):
            detail = f"{name} differs: {a.settings.get(name)} and {b.settings.get(name)}"
            findings.append(Finding("settings", "warning", detail))
    if any(not point.paired for point in points):
        findings.append(
            Finding(
                "prompts",
                "warning",
                "the runs sent different prompts, so requests could not be paired",
            )
        )
    return Comparison(verdict(gates), tuple(gates), tolerance, tuple(points), tuple(findings))


def _load(run: BenchRun, point: BenchPoint) -> tuple[int | None, float | None, str]:
    return (
        point.concurrency,
        point.rate,
        run.settings.get("arrivals", "") if point.concurrency is None else "",
    )


def _rows(run: BenchRun, point: int, arm: str) -> Rows:
    rows: Rows = {}
    for one in run.requests:
        if (one.point, one.arm) == (point, arm):
            rows.setdefault(one.round, {})[one.index] = one
    return rows


def _point(a: Rows, b: Rows, point: BenchPoint, arm: str, seed: int) -> ComparedPoint:
    rounds = sorted(set(a) & set(b))
    paired = bool(rounds) and all(
        {i: one.prompt for i, one in a[r].items()} == {i: one.prompt for i, one in b[r].items()}
        for r in rounds
    )
    grids = [
        [[_timing(run[r][i]) for i in sorted(run[r])] for r in (rounds if paired else sorted(run))]
        for run in (b, a)
    ]
    ratios = (
        speed_ratio(grids[0], grids[1], paired=paired, seed=seed),
        *metrics.latency_ratios(grids[0], grids[1], paired=paired, seed=seed),
    )
    return ComparedPoint(point.concurrency, point.rate, arm, paired, len(grids[0][0]), ratios)


def _timing(one: BenchRequest) -> RequestTiming | None:
    if one.error is not None:
        return None
    figures = Statistics(
        one.input_tokens, one.output_tokens, one.drafted, one.accepted, one.verify_steps
    )
    return RequestTiming(
        "", "", (), one.finish_reason, one.sent_ns, one.chunks, figures, one.due_ns
    )


def _gates(point: ComparedPoint, tolerance: float, scope: Scope) -> list[Gate]:
    """A percentile that neither run could support, or a figure that the endpoints do not give, is
    not judged; but the ratio of something that only the one has, or of nothing at all, fails.
    """
    ratios = {ratio.name: ratio for ratio in point.ratios}
    gates = [
        _gate(ratios[name], 1 - tolerance if name == "speed" else 1 + tolerance, scope)
        for name in JUDGED
        if ratios[name].estimate is not None
    ]
    if gates:
        return gates
    lacking = ratios["e2e_p50"]
    result: GateOutcome = FAIL if lacking.too_few is None else INCONCLUSIVE
    step = (
        "Save longer runs (--requests, --rounds)."
        if result == INCONCLUSIVE
        else "Measure again, with an endpoint that answers."
    )
    detail = f"nothing can be compared: {lacking.reason}"
    scope = replace(scope, over="run_a")
    direction: Direction = "at_most"  # of most that it would have judged
    return [make_gate("comparison", scope, result, None, None, detail, step, direction=direction)]


def _gate(ratio: Ratio, limit: float, scope: Scope) -> Gate:
    assert ratio.estimate is not None and ratio.low is not None and ratio.high is not None
    result = outcome(ratio.low, ratio.high, limit, at_least=ratio.metric == "speed")
    faster = ratio.high < 1 if ratio.metric != "speed" else ratio.low > 1
    detail = f"B / A {ratio.estimate:.3f}, 95% interval {ratio.low:.3f} to {ratio.high:.3f}" + (
        "; B is better" if faster else ""
    )
    steps = {
        PASS: None,
        FAIL: "B is slower than A by more than the tolerance.",
        INCONCLUSIVE: (
            "Not shown either way: save longer runs on an idle machine, or allow more with"
            " --tolerance."
        ),
    }
    scope = replace(scope, percentile=ratio.percentile, over="run_a")
    return make_gate(ratio.metric, scope, result, ratio.estimate, limit, detail, steps[result])


def _errors(a: Rows, b: Rows, scope: Scope) -> Gate:
    """Failed requests have no latency, so a run that fails more often must not win by it."""
    shares = []
    for run in (a, b):
        requests = [one for row in run.values() for one in row.values()]
        shares.append((sum(one.error is not None for one in requests), len(requests)))
    (in_a, of_a), (in_b, of_b) = shares
    good = in_b * of_a <= in_a * of_b
    detail = f"{in_b} of {of_b} requests of B failed, {in_a} of {of_a} of A"
    step = None if good else "Fix B: its figures are of the requests that it did answer."
    return make_gate(
        "errors", scope, PASS if good else FAIL, in_b / of_b, in_a / of_a, detail, step
    )
