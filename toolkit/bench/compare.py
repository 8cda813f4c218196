"""Judge two saved runs of `toolkit bench`: is B slower than A by more than the tolerance?

If both runs sent the same prompts, requests are paired by prompt, and the differences between
prompts cancel. Otherwise each run is resampled on its own, and the intervals are wider. In both
cases the runs were not interleaved: if the machine changed between them, the change is in the ratio
but not in its interval. A finding tells the reader so. If both endpoints can run at the same time,
compare them in one run (--baseline).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from toolkit.bench import metrics
from toolkit.bench.gate import load_name, make_gate
from toolkit.bench.runner import READABLE_VERSIONS, SCHEMA_VERSION, speed_ratio
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
    """Read a saved run. Raises UsageError if the file is not one."""
    hint = "Give a file that `toolkit bench ... --out FILE` wrote."
    try:
        data = read_saved(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot be read: {error}", where=path, hint=hint) from error
    version = data.get("schema_version")
    if version not in READABLE_VERSIONS:
        raise UsageError(
            f"schema {version} is not {SCHEMA_VERSION}, which this version reads",
            where=path,
            hint=hint,
        )
    try:
        run = from_json(BenchRun, data)
    except ValueError as error:
        raise UsageError(f"not a saved run: {error}", where=path, hint=hint) from error
    if not _is_whole(run):
        raise UsageError(
            "requests of this run are missing, or have impossible counts",
            where=path,
            hint=hint,
        )
    return run


def _is_whole(run: BenchRun) -> bool:
    """Whether every arm has requests, and the same ones in every round: a user may have edited the
    file.
    """
    for at, point in enumerate(run.points):
        rounds = [_rows(run, at, arm.name) for arm in point.arms]
        if not rounds or not all(
            rows and len({frozenset(row) for row in rows.values()}) == 1 for rows in rounds
        ):
            return False
    counts = [count for request in run.requests for _, count in request.chunks if count is not None]
    return min(counts, default=0) >= 0


def compare_runs(a: BenchRun, b: BenchRun, *, tolerance: float = 0.05, seed: int = 0) -> Comparison:
    """Compare B with A at every load that both have, for every arm that both have. There is a gate
    per figure and percentile: B is slower by at most `tolerance`.

    Raises UsageError if the runs have no load in common.
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
        loads = " and ".join(
            ", ".join(load_name(point.concurrency, point.rate) for point in run.points)
            for run in (a, b)
        )
        raise UsageError(
            f"the runs have no load in common: {loads}",
            hint="Run both with the same --concurrency or --rate.",
        )
    for name in ("max_tokens", "max_tokens_from", "temperature"):
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
    arrivals = run.settings.get("arrivals", "") if point.concurrency is None else ""
    return point.concurrency, point.rate, arrivals


def _rows(run: BenchRun, point: int, arm: str) -> Rows:
    rows: Rows = {}
    for request in run.requests:
        if (request.point, request.arm) == (point, arm):
            rows.setdefault(request.round, {})[request.index] = request
    return rows


def _point(a: Rows, b: Rows, point: BenchPoint, arm: str, seed: int) -> ComparedPoint:
    rounds = sorted(set(a) & set(b))
    paired = bool(rounds) and all(_prompts(a[r]) == _prompts(b[r]) for r in rounds)
    grids = [
        [[_timing(run[r][i]) for i in sorted(run[r])] for r in (rounds if paired else sorted(run))]
        for run in (b, a)
    ]
    ratios = (
        speed_ratio(grids[0], grids[1], paired=paired, seed=seed),
        *metrics.latency_ratios(grids[0], grids[1], paired=paired, seed=seed),
    )
    return ComparedPoint(point.concurrency, point.rate, arm, paired, len(grids[0][0]), ratios)


def _prompts(row: dict[int, BenchRequest]) -> dict[int, str]:
    return {index: request.prompt for index, request in row.items()}


def _timing(request: BenchRequest) -> RequestTiming | None:
    if request.error is not None:
        return None
    statistics = Statistics(
        request.input_tokens,
        request.output_tokens,
        request.drafted,
        request.accepted,
        request.verify_steps,
    )
    return RequestTiming(
        "",
        "",
        (),
        request.finish_reason,
        request.sent_ns,
        request.chunks,
        statistics,
        request.due_ns,
    )


def _gates(point: ComparedPoint, tolerance: float, scope: Scope) -> list[Gate]:
    """One gate per ratio that has an estimate.

    A percentile with too few samples and a figure that the endpoints do not give are not judged. If
    no ratio is left, one gate says that nothing can be compared: it is INCONCLUSIVE if only samples
    are missing, else FAIL.
    """
    ratios = {ratio.name: ratio for ratio in point.ratios}
    gates = [
        _gate(ratios[name], 1 - tolerance if name == "speed" else 1 + tolerance, scope)
        for name in JUDGED
        if ratios[name].estimate is not None
    ]
    if gates:
        return gates
    e2e = ratios["e2e_p50"]
    result: GateOutcome = FAIL
    step = "Measure again, with an endpoint that answers."
    if e2e.too_few is not None:
        result, step = INCONCLUSIVE, "Save longer runs (--requests, --rounds)."
    detail = f"nothing can be compared: {e2e.reason}"
    scope = replace(scope, over="run_a")
    direction: Direction = "at_most"  # as most of the gates that are missing here
    return [make_gate("comparison", scope, result, None, None, detail, step, direction=direction)]


def _gate(ratio: Ratio, limit: float, scope: Scope) -> Gate:
    assert ratio.estimate is not None and ratio.low is not None and ratio.high is not None
    result = outcome(ratio.low, ratio.high, limit, at_least=ratio.metric == "speed")
    is_faster = ratio.high < 1 if ratio.metric != "speed" else ratio.low > 1
    detail = f"B / A {ratio.estimate:.3f}, 95% interval {ratio.low:.3f} to {ratio.high:.3f}"
    detail += "; B is better" if is_faster else ""
    steps = {
        PASS: None,
        FAIL: "B is slower than A by more than the tolerance.",
        INCONCLUSIVE: (
            "The interval contains the limit: save longer runs on an idle machine, or raise"
            " --tolerance."
        ),
    }
    scope = replace(scope, percentile=ratio.percentile, over="run_a")
    return make_gate(ratio.metric, scope, result, ratio.estimate, limit, detail, steps[result])


def _errors(a: Rows, b: Rows, scope: Scope) -> Gate:
    """A failed request has no latency, so a run with more failures must not win by them."""
    shares = []
    for run in (a, b):
        requests = [request for row in run.values() for request in row.values()]
        shares.append((sum(request.error is not None for request in requests), len(requests)))
    (in_a, of_a), (in_b, of_b) = shares
    result: GateOutcome = PASS
    step = None
    if in_b * of_a > in_a * of_b:
        result, step = FAIL, "Fix B: its figures come only from the requests that it answered."
    detail = f"{in_b} of {of_b} requests of B failed, {in_a} of {of_a} of A"
    return make_gate("errors", scope, result, in_b / of_b, in_a / of_a, detail, step)
