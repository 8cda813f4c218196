"""Plots of what was expected beside what was measured: speed-up over draft length and concurrency,
precisions, memory.

Each needs something that a plain validation does not make (advice, a grid, a sweep, a plan), and is
None where that is missing.
"""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.bench.definitions import METRICS
from toolkit.records.advice import Candidate, SpeedupPrediction
from toolkit.records.bench import BenchPoint
from toolkit.records.build import StageCost
from toolkit.records.measured import Ratio, Speedup
from toolkit.records.plan import StageMemory
from toolkit.records.report import ValidationReport
from toolkit.report.advice import deployed
from toolkit.report.cells import capital
from toolkit.report.svg import (
    ARM_CLASSES,
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Drawing,
    Plot,
    Scale,
    ticks,
)
from toolkit.words import DecodingMode

__all__ = [
    "deployed_draft_len",
    "draft_length_plot",
    "grid_plot",
    "measured_here",
    "measured_peak",
    "memory_plot",
    "speed_sweep_plot",
    "throughput_sweep_plot",
]

GB = 1e9
MODES: dict[DecodingMode, tuple[str, str]] = {
    "greedy": ("spec", "greedy"),
    "sampled": ("spec2", "sampled"),
}
FAR = 4  # a limit that lies this many times beyond the longest bar is said in words and not drawn


def deployed_draft_len(report: ValidationReport) -> int | None:
    """What the speculative arm was measured with."""
    lengths = [
        arm.draft_len
        for arm in (report.parity.arms if report.parity else ())
        if arm.arm == "speculative"
    ]
    return max(lengths, default=None)


def draft_length_plot(report: ValidationReport) -> Plot | None:
    """Lines: predicted for one request at a time, with their intervals. Dots: runs, of the
    advisor and of this report.
    """
    advice = report.advice
    best = deployed(advice) if advice is not None and advice.candidates else None
    if advice is None or best is None or not any(one.batch == 1 for one in best.predictions):
        return None
    drawing = Drawing(f"Speed-up over draft length with {best.name}, predicted and measured")
    series = {mode: _by_length(best, mode) for mode in MODES}
    entries = [entry for mode, entry in MODES.items() if series[mode]]
    longest = max(one.draft_len for one in best.predictions)
    measured = measured_here(report)
    runs = any(one.measured is not None for one in best.predictions)
    drawing.legend([*entries, ("dotmark", "measured")] if measured or runs else entries, LEFT)
    edges = [
        1.0,
        *(edge for one in best.predictions if one.batch == 1 for edge in (one.low, one.high)),
    ]
    edges += [
        edge
        for one in best.predictions
        for edge in (one.measured_low, one.measured_high)
        if edge is not None
    ]
    edges += [edge for _, speedup in measured for edge in (speedup.low, speedup.high)]
    x = Scale(0, longest, LEFT + 12, RIGHT - 12)
    y = Scale(min(0.9, *edges) * 0.95, max(edges) * 1.05, BOTTOM, TOP)
    drawing.y_axis(y, LEFT, RIGHT, ticks(y.low, y.high), f"{METRICS['speedup'].title}, times plain")
    drawing.x_axis(x, BOTTOM, BOTTOM, _whole(longest), "draft length, tokens; 0 is plain decoding")
    drawing.line(LEFT, y(1), RIGHT, y(1), "axis")
    for mode, (cls, label) in MODES.items():
        points = series[mode]
        if not points:
            continue
        ends = [(x(one.draft_len), y(one.high)) for one in points] + [
            (x(one.draft_len), y(one.low)) for one in points[::-1]
        ]
        drawing.path([(x(0), y(1)), *ends], f"band {cls}")
        drawing.path(
            [(x(0), y(1)), *((x(one.draft_len), y(one.speedup)) for one in points)], f"curve {cls}"
        )
        for one in points:
            if (
                one.measured is not None
                and one.measured_low is not None
                and one.measured_high is not None
            ):
                tip = (
                    f"{label}, length {one.draft_len}: run {one.measured:.2f}x, predicted"
                    f" {one.speedup:.2f}x"
                )
                low, high = y(one.measured_low), y(one.measured_high)
                drawing.whisker(x(one.draft_len), y(one.measured), low, high, cls, tip)
    length = deployed_draft_len(report)
    if length is not None and length <= longest:
        for i, (mode, speedup) in enumerate(measured):
            place = x(length) + (i - 0.5) * 7
            tip = (
                f"{mode}: {speedup.estimate:.2f}x on the endpoint ({speedup.low:.2f} to"
                f" {speedup.high:.2f})"
            )
            drawing.whisker(
                place, y(speedup.estimate), y(speedup.low), y(speedup.high), MODES[mode][0], tip
            )
    return Plot(
        "Speed-up over draft length",
        drawing.render(),
        f"{best.name}, one request at a time. Lines and bands: predicted from acceptance and costs"
        f" ({advice.costs_are}). "
        + (
            "Dots with whiskers: measured, those side by side on the endpoint. "
            if measured or runs
            else ""
        )
        + "A table below explains the gaps.",
        ("predicted_speedup", "speedup"),
    )


def grid_plot(report: ValidationReport) -> Plot | None:
    """Tokens per second of every pair of precisions with its interval, grouped by target; the
    best pair marked.
    """
    grid = report.grid
    if grid is None or not grid.cells:
        return None
    kept = {one.quant_algo for one in grid.targets if one.kl.high <= grid.max_kl}
    groups = {
        cell.target: [one for one in grid.cells if one.target == cell.target] for cell in grid.cells
    }
    height = TOP + sum(26 + 20 * len(cells) for cells in groups.values()) + 48
    drawing = Drawing("Tokens per second of every pair of precisions", height=height)
    names, bottom = LEFT + 120, height - 44
    scale = Scale(0, max(cell.tokens_per_s.high for cell in grid.cells) * 1.12 or 1, names, RIGHT)
    drawing.legend([("spec", f"keeps KL {grid.max_kl:g}"), ("bad", "does not")], LEFT)
    drawing.x_axis(scale, bottom, TOP, ticks(0, scale.high), "output tokens per second")
    y = float(TOP)
    for target, cells in groups.items():
        cls = "spec" if target in kept else "bad"
        drawing.text(8, y + 16, f"target {target}", cls="value")
        y += 26
        for cell in cells:
            speed = cell.tokens_per_s
            tip = (
                f"{target} with draft {cell.draft}: {speed.estimate:,.1f} tokens/s"
                f" ({speed.low:,.1f} to {speed.high:,.1f})"
            )
            drawing.text(names - 8, y + 10, cell.draft, "end", "tick")
            drawing.bar(scale(0), y, scale(speed.estimate) - scale(0), 13, f"{cls} soft", tip)
            drawing.bar(scale(speed.low), y + 4, scale(speed.high) - scale(speed.low), 5, cls, tip)
            if cell.best:
                drawing.text(scale(speed.high) + 6, y + 11, "best", cls="gatelabel")
            y += 20
    return Plot(
        "Precisions of target and draft",
        drawing.render(),
        f"Wide bars: speed of each pair at its best draft length, {grid.costs_are}, one request at"
        f" a time; narrow: its {grid.confidence:.0%} interval. Best is the fastest pair whose"
        f" target keeps KL {grid.max_kl:g} by its upper bound.",
        ("grid",),
    )


def _by_length(candidate: Candidate, mode: DecodingMode) -> list[SpeedupPrediction]:
    found = (
        one
        for one in candidate.predictions
        if one.mode == mode and one.batch == 1 and one.draft_len > 0
    )
    return sorted(found, key=lambda one: one.draft_len)


def measured_here(report: ValidationReport) -> list[tuple[DecodingMode, Speedup]]:
    """(mode, speed-up) at the deployed draft length, on the endpoint."""
    speedups: dict[DecodingMode, Speedup | None] = {
        "greedy": report.speedup,
        "sampled": report.sampled.speedup,
    }
    return [(mode, speedup) for mode, speedup in speedups.items() if speedup is not None]


def _whole(longest: int) -> list[float]:
    step = max(1, -(-longest // 8))
    return [float(value) for value in range(0, longest + 1, step)]


def _loads(report: ValidationReport) -> list[tuple[int, BenchPoint]]:
    return sorted(
        ((point.concurrency, point) for point in report.loads if point.concurrency),
        key=lambda one: one[0],
    )


def _crossover(drawing: Drawing, report: ValidationReport, x: Scale) -> None:
    """Where speculation stops paying, as far as it is known: the point, within what is shown on
    either side of it.
    """
    found = report.crossover
    if found is None or found.estimate is None:
        return
    drawing.line(x(found.estimate), TOP, x(found.estimate), BOTTOM, "gate")
    left = x(found.estimate) < (LEFT + RIGHT) / 2
    drawing.text(
        x(found.estimate) + (5 if left else -5),
        TOP + 10,
        f"crossing near {found.estimate:.1f}",
        "start" if left else "end",
        "gatelabel",
    )


def _concurrency(levels: Sequence[int]) -> Scale:
    return Scale(min(levels), max(*levels, min(levels) + 1), LEFT + 14, RIGHT - 14, log=True)


def throughput_sweep_plot(report: ValidationReport) -> Plot | None:
    """Tokens per second of both arms over the number of requests at once."""
    loads = _loads(report)
    known = [
        arm.tokens_per_s for _, point in loads for arm in point.arms if arm.tokens_per_s is not None
    ]
    if len(loads) < 2 or not known:
        return None
    drawing = Drawing("Throughput over concurrency of both arms")
    names = [arm.name for arm in loads[0][1].arms]
    drawing.legend([(ARM_CLASSES.get(name, "spec"), name) for name in names], LEFT)
    x, y = _concurrency([level for level, _ in loads]), Scale(0, max(known) * 1.1, BOTTOM, TOP)
    drawing.y_axis(y, LEFT, RIGHT, ticks(0, y.high), METRICS["throughput"].title)
    drawing.x_axis(x, BOTTOM, BOTTOM, [level for level, _ in loads], "requests at once")
    for index, name in enumerate(names):
        cls = ARM_CLASSES.get(name, "spec")
        points = [(level, point.arms[index].tokens_per_s) for level, point in loads]
        drawn = [(x(level), y(value)) for level, value in points if value is not None]
        drawing.path(drawn, f"curve {cls}", name)
        for (level, value), (left, top) in zip(
            [one for one in points if one[1] is not None], drawn, strict=True
        ):
            drawing.dot(
                left,
                top,
                4,
                cls,
                f"{name}, {level} at once: {value:,.1f} {METRICS['throughput'].unit}",
            )
    _crossover(drawing, report, x)
    return Plot(
        "Throughput over concurrency",
        drawing.render(),
        f"{capital(METRICS['throughput'].title)}, greedy.{_said(report)}",
        ("throughput",),
    )


def speed_sweep_plot(report: ValidationReport) -> Plot | None:
    """Speculative over plain with its interval, at every load: above 1 speculation pays."""
    found = [
        (level, ratio)
        for level, point in _loads(report)
        for ratio in point.ratios
        if ratio.metric == "speed"
    ]
    known = [(level, *edges) for level, ratio in found if (edges := _edges(ratio)) is not None]
    if len(known) < 2:
        return None
    drawing = Drawing("Speed-up over concurrency", height=HEIGHT)
    x = _concurrency([level for level, *_ in known])
    values = [value for _, *edges in known for value in edges]
    y = Scale(min(0.9, *values) * 0.95, max(1.1, *values) * 1.05, BOTTOM, TOP)
    drawing.y_axis(y, LEFT, RIGHT, ticks(y.low, y.high), f"{METRICS['speedup'].title}, times plain")
    drawing.x_axis(x, BOTTOM, BOTTOM, [level for level, *_ in known], "requests at once")
    drawing.line(LEFT, y(1), RIGHT, y(1), "axis")
    drawing.path([(x(level), y(estimate)) for level, estimate, _, _ in known], "curve spec")
    for level, estimate, low, high in known:
        tip = f"{level} at once: {estimate:.2f}x ({low:.2f} to {high:.2f})"
        drawing.whisker(x(level), y(estimate), y(low), y(high), "spec" if high >= 1 else "bad", tip)
    _crossover(drawing, report, x)
    return Plot(
        "Speed-up over concurrency",
        drawing.render(),
        "Speculative over plain, with 95% intervals. The solid line is 1x: no"
        f" gain.{_said(report)}",
        ("speed",),
    )


def _edges(ratio: Ratio) -> tuple[float, float, float] | None:
    if ratio.estimate is None or ratio.low is None or ratio.high is None:
        return None
    return ratio.estimate, ratio.low, ratio.high


def _said(report: ValidationReport) -> str:
    found = report.crossover
    return "" if found is None else f" Speculation is {found.detail}."


def measured_peak(stage: StageMemory, costs: Sequence[StageCost]) -> int | None:
    """The most of what a planned stage took when it ran. None for a GPU's memory, which is not
    what StageCost holds.
    """
    if stage.place != "the machine":
        return None
    peaks = [
        cost.peak_memory_bytes for cost in costs if cost.stage.partition("/")[0] == stage.stage
    ]
    return max((peak for peak in peaks if peak is not None), default=None)


def memory_plot(report: ValidationReport) -> Plot | None:
    """Planned and measured peak of every stage, as bars from zero."""
    stages = [(stage, measured_peak(stage, report.stages)) for stage in report.memory]
    if not stages:
        return None
    height = TOP + 20 + 62 * len(stages) + 44
    drawing = Drawing("Memory of every stage, planned and measured", height=height)
    drawing.legend([("plain", "planned"), ("spec", "measured")], LEFT + 26)
    longest = (
        max(
            [stage.total_bytes for stage, _ in stages]
            + [peak for _, peak in stages if peak is not None]
        )
        / GB
    )
    limits = [
        stage.available_bytes / GB for stage, _ in stages if stage.available_bytes is not None
    ]
    near = [limit for limit in limits if limit <= FAR * longest]
    bottom = height - 44
    x = Scale(0, max([longest * 1.2, *(limit * 1.05 for limit in near)]) or 1, LEFT + 26, RIGHT)
    drawing.x_axis(x, bottom, TOP, ticks(0, x.high), "GB at the peak")
    for i, (stage, peak) in enumerate(stages):
        top = TOP + 10 + 62 * i
        drawing.text(LEFT + 20, top + 28, stage.stage, "end")
        _memory_bar(
            drawing,
            x,
            top,
            stage.total_bytes,
            "plain",
            f"{stage.stage}: planned {stage.total_bytes / GB:.3g} GB",
        )
        if peak is not None:
            _memory_bar(
                drawing, x, top + 23, peak, "spec", f"{stage.stage}: measured {peak / GB:.3g} GB"
            )
        else:
            drawing.text(x(0) + 6, top + 38, "not measured", cls="tick")
        if stage.available_bytes is not None and stage.available_bytes / GB <= FAR * longest:
            at = x(stage.available_bytes / GB)
            drawing.line(at, top - 4, at, top + 50, "gate")
    there = [
        f"{stage.stage}: {stage.available_bytes / GB:,.0f} GB"
        for stage, _ in stages
        if stage.available_bytes is not None
    ]
    caption = (
        "What the plan expects of a stage beside the resident memory that it took. Measured is all"
        " of a process, loaded libraries included (about half a GB); the plan counts them where its"
        " parts in the table below say so."
    )
    caption += (
        f" Available: {', '.join(there)}{', the dashed line' if near else ''}." if there else ""
    )
    return Plot(
        "Memory, planned and measured", drawing.render(), caption, ("planned_memory", "peak_memory")
    )


def _memory_bar(drawing: Drawing, x: Scale, top: float, count: int, cls: str, tip: str) -> None:
    width = x(count / GB) - x(0)
    drawing.bar(x(0), top, width, 20, cls, tip)
    label = f"{count / GB:.3g}" if count >= 0.005 * GB else "below 0.01"
    if x(0) + width + 40 < WIDTH:
        drawing.text(x(0) + width + 5, top + 14, label, cls="value")
    else:
        drawing.text(x(0) + width - 5, top + 14, label, "end", "inbar")
