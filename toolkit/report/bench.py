"""Print the tables of a bench and of a comparison on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from toolkit.bench.definitions import LATENCIES, METRICS, PERCENTILES, heading
from toolkit.records.bench import BenchArm, BenchPoint, BenchRun, Comparison
from toolkit.records.measured import Finding, Gate, Latency, Ratio
from toolkit.report.acceptance import slice_name
from toolkit.report.cells import interval
from toolkit.words import Severity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

__all__ = ["print_comparison", "print_run"]

COLOURS = {"PASS": "bold green", "FAIL": "bold red", "INCONCLUSIVE": "bold yellow"}
MARKS: dict[Severity, str] = {
    "ok": "green",
    "note": "cyan",
    "warning": "yellow",
    "error": "red",
}


def print_run(run: BenchRun, console: Console) -> None:
    """Print the endpoints, the figures of every load, gates and findings, and the verdict last."""
    where = ", ".join(
        f"{endpoint.arm}: {endpoint.model} at {endpoint.address} ({endpoint.protocol})"
        for endpoint in run.endpoints
    )
    console.print(where, highlight=False, markup=False)
    for point in run.points:
        _point(point, console)
    if run.crossover is not None:
        near = ""
        if run.crossover.estimate is not None:
            near = f", crossing near {run.crossover.estimate:.1f}"
        console.print(
            f"speculation over concurrency: {run.crossover.detail}{near}",
            highlight=False,
            markup=False,
        )
    _gates(run.gates, console)
    _findings(run.findings, console)
    has_limits = any(gate.metric != "errors" for gate in run.gates)
    if run.verdict == "PASS" and not has_limits:
        console.print(
            "the only limit was on errors; set others with --gate",
            highlight=False,
            markup=False,
            style="dim",
        )
    console.print(run.verdict, style=COLOURS[run.verdict])


def print_comparison(comparison: Comparison, console: Console) -> None:
    for point in comparison.points:
        load = _load(point.concurrency, point.rate)
        how = "paired by prompt" if point.paired else "not paired"
        title = f"\n{point.arm} arm, {load}: B / A, {how}, {point.prompts} prompts"
        console.print(title, style="bold", highlight=False, markup=False)
        _ratios(point.ratios, console)
    _gates(comparison.gates, console)
    _findings(comparison.findings, console)
    console.print(comparison.verdict, style=COLOURS[comparison.verdict])


def _load(concurrency: int | None, rate: float | None) -> str:
    if concurrency is not None:
        return f"{concurrency} at a time"
    if rate is not None:
        return f"{rate:g} requests/s"
    return "trace"


def _point(point: BenchPoint, console: Console) -> None:
    from rich.table import Table

    rounds = f"{point.rounds} round{'s' if point.rounds > 1 else ''}"
    console.print(
        f"\n{_load(point.concurrency, point.rate)}, {rounds}", style="bold", highlight=False
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for arm in point.arms:
        table.add_column(arm.name, justify="right")
    rows = [_rows(arm) for arm in point.arms]
    for name in rows[0]:
        cells = [row[name] for row in rows]
        if any(cells):
            table.add_row(name, *(cell or "-" for cell in cells))
    console.print(table, highlight=False)
    for arm in point.arms:
        _slices(arm, console)
    if point.ratios:
        title = f"{point.arms[-1].name} / {point.arms[0].name}"
        console.print(title, style="bold", highlight=False, markup=False)
        _ratios(point.ratios, console)


def _slices(arm: BenchArm, console: Console) -> None:
    """Print the acceptance by length of the prompt, by domain and by reused prefix, if the arm has
    more than one of these.
    """
    from rich.table import Table
    from rich.text import Text

    if len(arm.acceptance_slices) < 2:
        return
    console.print(f"{arm.name}, by prompt", style="bold", highlight=False, markup=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for title in (
        "requests",
        heading("acceptance_length"),
        heading("acceptance_rate"),
        heading("acceptance_by_position"),
    ):
        table.add_column(title, justify="right")
    for part in arm.acceptance_slices:
        table.add_row(
            Text(slice_name(part)),
            f"{part.requests:,}",
            _number(part.length, 2) or "-",
            _number(part.rate, 2) or "-",
            " / ".join(_number(rate, 2) or "-" for rate in part.by_position) or "-",
        )
    console.print(table, highlight=False)


def _rows(arm: BenchArm) -> dict[str, str]:
    alpha = arm.acceptance.alpha
    alpha_cell = "" if alpha is None else interval(alpha.estimate, alpha.low, alpha.high)
    lag_cell = "" if arm.lag_p99_ms is None else f"{arm.lag_p50_ms:.2f} / {arm.lag_p99_ms:.2f}"
    rows = {
        "requests": f"{arm.requests}" + (f" ({arm.failed} failed)" if arm.failed else ""),
        "output tokens": _number(arm.output_tokens, 0),
        METRICS["throughput"].title: _number(arm.tokens_per_s),
        METRICS["requests_per_s"].title: _number(arm.requests_per_s, 2),
        heading("goodput"): _number(arm.goodput, 2),
        heading("acceptance_length"): _number(arm.acceptance.length, 2),
        heading("acceptance_rate"): _number(arm.acceptance.rate, 2),
        heading("acceptance_by_position"): _by_position(arm, "joint"),
        f"{heading('acceptance_by_position')}, conditional": _by_position(arm, "conditional"),
        heading("acceptance_alpha"): alpha_cell,
        _spread("lag", 50, 99): lag_cell,
    }
    return rows | {
        _spread(name, *PERCENTILES): _percentiles(arm.latencies[name]) for name in LATENCIES
    }


def _by_position(arm: BenchArm, rate: Literal["joint", "conditional"]) -> str:
    """Return the rate at every position of a block, such as `0.84 / 0.71 / 0.60`."""
    places = arm.acceptance.by_position
    return " / ".join(_number(getattr(place, rate), 2) or "-" for place in places)


def _spread(name: str, *percentiles: int) -> str:
    """Return a heading such as `TTFT p50/p90/p99 ms`."""
    metric = METRICS[name]
    return f"{metric.title} {'/'.join(f'p{q}' for q in percentiles)} {metric.unit}"


def _percentiles(latency: Latency) -> str:
    """Return p50, p90 and p99. A percentile that the samples do not support is a dash, and so is a
    gap of 0, which means that two chunks came in one read.
    """
    if latency.samples == 0:
        return ""
    values = (latency.p50, latency.p90, latency.p99)
    return " / ".join(map(_percentile, values))


def _percentile(value: float | None) -> str:
    if not value:
        return "-"
    return "<0.01" if value < 0.005 else f"{value:.2f}"


def _number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _ratios(ratios: Sequence[Ratio], console: Console) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("", "ratio", "95% interval"):
        table.add_column(title, justify="left" if not title else "right")
    for ratio in ratios:
        if ratio.estimate is not None:
            table.add_row(
                ratio.name, f"{ratio.estimate:.3f}", f"{ratio.low:.3f} to {ratio.high:.3f}"
            )
    console.print(table, highlight=False)


def _gates(gates: Sequence[Gate], console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, title=None)
    for title in ("gate", "", ""):
        table.add_column(title, overflow="fold")
    for gate in gates:
        detail = Text(gate.detail)
        if gate.next_step is not None:
            detail.append(f"\n-> {gate.next_step}")
        table.add_row(Text(gate.name), Text(gate.outcome, style=COLOURS[gate.outcome]), detail)
    console.print()
    console.print(table, highlight=False)


def _findings(findings: Sequence[Finding], console: Console) -> None:
    from rich.text import Text

    for finding in findings:
        console.print(
            Text.assemble((f"{finding.check}: ", MARKS[finding.severity]), finding.detail)
        )
