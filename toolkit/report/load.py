"""The tables and plots of an open loop: what both arms do at the judged rate, and how the rate was
found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from toolkit.bench.definitions import METRICS, PERCENTILES, heading
from toolkit.records.bench import BenchArm, BenchPoint
from toolkit.records.load import LoadRun
from toolkit.records.measured import Gate, Latency
from toolkit.report.cells import DASH, Table, capital, number, percent
from toolkit.report.svg import ARM_CLASSES, BOTTOM, LEFT, RIGHT, TOP, Drawing, Plot, Scale, ticks

__all__ = ["load_plots", "load_tables"]

JUDGED = ("ttft", "tpot", "itl", "e2e")  # latencies with a limit in validation.load
PLOTTED = ("ttft", "e2e")  # besides those with a limit
MOST_TICKS = 6


def load_tables(load: LoadRun | None) -> list[Table]:
    """Return the table of the judged run, and that of the search for its rate."""
    tables: list[Table] = []
    if load is None:
        return tables
    if load.point is not None:
        tables.append(_judged(load, load.point))
    if load.probes:
        tables.append(_search(load))
    return tables


def _judged(load: LoadRun, point: BenchPoint) -> Table:
    arms = point.arms
    rows = [
        ("requests", *(f"{arm.requests:,}" for arm in arms)),
        (METRICS["errors"].title, *(f"{arm.failed:,}" for arm in arms)),
        (
            f"answered {METRICS['requests_per_s'].title}",
            *(number(arm.requests_per_s) for arm in arms),
        ),
        (METRICS["throughput"].title, *(number(arm.tokens_per_s, 4) for arm in arms)),
    ]
    if load.goodput_ms:
        rows += [
            (heading("goodput_share"), *(_share(arm) for arm in arms)),
            (heading("goodput"), *(number(arm.goodput) for arm in arms)),
        ]
    for name in JUDGED:
        for q in PERCENTILES:
            label = f"{METRICS[name].title} p{q}, {METRICS[name].unit}"
            rows.append((label, *(_percentile(arm.latencies[name], q) for arm in arms)))
    if any(arm.acceptance.length is not None for arm in arms):
        rows.append(
            (heading("acceptance_length"), *(number(arm.acceptance.length) for arm in arms))
        )
    rows.append(
        (
            f"{METRICS['lag'].title} p99, {METRICS['lag'].unit}",
            *(number(a.lag_p99_ms) for a in arms),
        )
    )
    limits = ", ".join(f"{name} {limit:,g} ms" for name, limit in load.goodput_ms.items())
    note = (
        f"{capital(load.arrivals)} arrivals, temperature {load.temperature:g}, {point.rounds}"
        f" rounds in which the arms take turns. The first {load.lead_in:,} requests of each are not"
        f" judged: they fill an idle server. p99 takes {load.needed:,} answers per arm. Latencies"
        " count from when a request was due."
    )
    note += f" Limits of one request: {limits}." if limits else ""
    return Table(
        f"Open loop, {load.rate:g} requests/s",
        ("", *(arm.name for arm in arms)),
        tuple(rows),
        ("throughput", "goodput_share", "goodput", *JUDGED, "percentiles", "lag"),
        note,
        is_brief=True,
    )


def _share(arm: BenchArm) -> str:
    share = arm.goodput_share
    if share is None:
        return DASH
    return f"{percent(share.estimate)} ({percent(share.low)} to {percent(share.high)})"


def _percentile(latency: Latency, q: int) -> str:
    value, low, high = (getattr(latency, f"p{q}{end}") for end in ("", "_low", "_high"))
    if value is None or low is None:
        return number(value)
    return f"{number(value)} ({number(low)} to {number(high)})"


def _search(load: LoadRun) -> Table:
    rows = tuple(
        (
            f"{probe.rate:g}",
            f"{probe.requests / probe.rate:.0f}",
            f"{probe.requests:,}",
            f"{probe.failed:,}",
            percent(probe.good_share),
            "yes" if probe.is_kept else "no",
        )
        for probe in load.probes
    )
    allowed = (1 - load.min_goodput) / 2
    return Table(
        "Search for the rate",
        (
            "requests/s due",
            "seconds",
            "requests",
            METRICS["errors"].title,
            heading("goodput_share"),
            "kept",
        ),
        rows,
        ("goodput_share",),
        "In the order of the search, the deployed arm alone. A rate is kept if at most"
        f" {percent(allowed)} of its requests miss a limit: half of what the gate allows, since a"
        " short run leaves more to chance. The longer runs at the end confirm the rate, or step"
        " back.",
    )


def load_plots(load: LoadRun, gates: Sequence[Gate]) -> Iterator[Plot]:
    """Return a plot per latency that is judged, and one of the search."""
    if load.probes:
        yield _search_plot(load)
    if load.point is None:
        return
    limits = {
        gate.metric: gate.limit
        for gate in gates
        if gate.scope.rate is not None and gate.scope.percentile is not None
    }
    for name in JUDGED:
        has_curve = any(arm.latencies[name].curve for arm in load.point.arms)
        if has_curve and (name in PLOTTED or name in limits):
            yield _latency_plot(load, load.point, name, limits.get(name))


def _latency_plot(load: LoadRun, point: BenchPoint, name: str, limit: float | None) -> Plot:
    """Plot the cumulative distributions of both arms, up to p99. The axis is logarithmic, since an
    arm that falls behind is slower by orders of magnitude.
    """
    metric = METRICS[name]
    title = f"{capital(metric.spelled_out)}, {load.rate:g} requests/s"
    drawing = Drawing(f"{title}: cumulative distribution of both arms")
    pairs = [(arm.name, arm.latencies[name]) for arm in point.arms if arm.latencies[name].curve]
    drawing.legend([(_class(arm_name), arm_name) for arm_name, _ in pairs], LEFT)
    edges = [value for _, latency in pairs for value in (latency.curve[0], latency.curve[99])]
    edges += [] if limit is None else [limit]
    low, high = max(min(edges), 1e-3) * 0.9, max(*edges, 2e-3) * 1.15
    x, y = Scale(low, high, LEFT + 8, RIGHT - 4, log=True), Scale(0, 1, BOTTOM, TOP)
    drawing.x_axis(x, BOTTOM, TOP, _log_ticks(low, high), metric.unit)
    drawing.y_axis(y, LEFT, RIGHT, (0, 0.5, 0.9, 1.0), "samples at or below", percent=True)
    for arm_name, latency in pairs:
        points = [(x(value), y(i / 100)) for i, value in enumerate(latency.curve[:100])]
        drawing.path(
            points, f"curve {_class(arm_name)}", f"{arm_name}: {latency.samples:,} samples"
        )
        if latency.p99 is not None and latency.p99_low is not None:
            tip = (
                f"{arm_name}: p99 {latency.p99:.2f} {metric.unit}, 95% interval"
                f" {latency.p99_low:.2f} to {latency.p99_high:.2f}"
            )
            drawing.dot(x(latency.p99), y(0.99), 4.5, _class(arm_name), tip)
    caption = (
        "Share of samples at or below a latency, up to p99 (the dot). The axis is logarithmic."
    )
    if limit is not None:
        drawing.line(x(limit), TOP, x(limit), BOTTOM, "gate")
        is_right = x(limit) > (LEFT + RIGHT) / 2
        offset, anchor = (-5, "end") if is_right else (5, "start")
        drawing.text(x(limit) + offset, BOTTOM - 8, f"p99 at most {limit:g}", anchor, "gatelabel")
        caption += " To pass, p99 with its interval has to be left of the gate."
    return Plot(title, drawing.render(), caption, (name, "percentiles"))


def _search_plot(load: LoadRun) -> Plot:
    """Plot the share of requests within the limits over the rate."""
    drawing = Drawing("Requests within the limits over the rate")
    rates = [probe.rate for probe in load.probes]
    low, high = min(rates) * 0.9, max(rates) * 1.1
    x, y = Scale(low, high, LEFT + 8, RIGHT - 4, log=True), Scale(0, 1, BOTTOM, TOP)
    drawing.legend([("spec", "kept"), ("bad", "not kept")], LEFT)
    drawing.x_axis(x, BOTTOM, TOP, _log_ticks(low, high), "requests due per second")
    drawing.y_axis(y, LEFT, RIGHT, (0, 0.25, 0.5, 0.75, 1.0), "within all limits", percent=True)
    drawing.line(LEFT, y(load.min_goodput), RIGHT, y(load.min_goodput), "gate")
    # On the right, above the line: rates that high were not kept, so no dot is there.
    label = f"at least {load.min_goodput:.0%}"
    drawing.text(RIGHT - 4, y(load.min_goodput) - 5, label, "end", "gatelabel")
    ordered = sorted(load.probes, key=lambda probe: probe.rate)
    drawing.path([(x(p.rate), y(p.good_share)) for p in ordered], "curve spec", "the deployed arm")
    for probe in ordered:
        tip = f"{probe.rate:g} requests/s: {probe.good_share:.1%} of {probe.requests} requests"
        cls = "spec" if probe.is_kept else "bad"
        drawing.dot(x(probe.rate), y(probe.good_share), 4.5, cls, tip)
    chosen = "No rate was kept." if load.rate is None else f"Judged: {load.rate:g} requests/s."
    limits = ", ".join(f"{name} {limit:,g} ms" for name, limit in load.goodput_ms.items())
    return Plot(
        "Search for the rate",
        drawing.render(),
        f"A dot per short run. Limits of one request: {limits}. {chosen}",
        ("goodput_share",),
    )


def _class(arm_name: str) -> str:
    return ARM_CLASSES.get(arm_name, "plain" if arm_name == "baseline" else "spec")


def _log_ticks(low: float, high: float) -> list[float]:
    """Round numbers within [low, high], for a logarithmic axis: 1, 2 and 5 times powers of ten, or
    fewer of them where they would not have room.
    """
    for factors in ((1, 2, 5), (1,)):
        marks = [
            factor * 10.0**power
            for power in range(-4, 8)
            for factor in factors
            if low <= factor * 10.0**power <= high
        ]
        if len(marks) <= MOST_TICKS:
            break
    return marks if len(marks) > 1 else ticks(low, high, 4)
