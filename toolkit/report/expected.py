"""Plots of what was expected beside what was measured: speed-up over draft length and concurrency,
precisions, memory.

Each plot needs a record that validation alone does not make (advice, a grid, a sweep, a plan). A
function returns None if its record is missing.
"""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.bench.definitions import METRICS
from toolkit.records.advice import Candidate, GridCell, SpeedupPrediction
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
FAR = 4  # a limit above this many times the longest bar is written in the caption and not drawn


def deployed_draft_len(report: ValidationReport) -> int | None:
    """Return the longest draft that the speculative arm was measured with."""
    lengths = [
        arm.draft_len
        for arm in (report.parity.arms if report.parity else ())
        if arm.arm == "speculative"
    ]
    return max(lengths, default=None)


def draft_length_plot(report: ValidationReport) -> Plot | None:
    """Plot speed-up over draft length. Lines: the prediction for one request at a time, with its
    interval. Dots: runs by the advisor and by this validation.
    """
    advice = report.advice
    best = deployed(advice) if advice is not None and advice.candidates else None
    if (
        advice is None
        or best is None
        or not any(prediction.batch == 1 for prediction in best.predictions)
    ):
        return None
    drawing = Drawing(f"Speed-up over draft length with {best.name}, predicted and measured")
    series = {mode: _by_length(best, mode) for mode in MODES}
    entries = [entry for mode, entry in MODES.items() if series[mode]]
    longest = max(prediction.draft_len for prediction in best.predictions)
    measured = measured_here(report)
    has_runs = any(prediction.measured is not None for prediction in best.predictions)
    drawing.legend([*entries, ("dotmark", "measured")] if measured or has_runs else entries, LEFT)
    edges = [1.0]
    edges += [
        edge
        for prediction in best.predictions
        if prediction.batch == 1
        for edge in (prediction.low, prediction.high)
    ]
    edges += [
        edge
        for prediction in best.predictions
        for edge in (prediction.measured_low, prediction.measured_high)
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
        upper = [(x(point.draft_len), y(point.high)) for point in points]
        lower = [(x(point.draft_len), y(point.low)) for point in points[::-1]]
        drawing.path([(x(0), y(1)), *upper, *lower], f"band {cls}")
        middle = [(x(point.draft_len), y(point.speedup)) for point in points]
        drawing.path([(x(0), y(1)), *middle], f"curve {cls}")
        for point in points:
            if (
                point.measured is not None
                and point.measured_low is not None
                and point.measured_high is not None
            ):
                tip = (
                    f"{label}, length {point.draft_len}: run {point.measured:.2f}x, predicted"
                    f" {point.speedup:.2f}x"
                )
                low, high = y(point.measured_low), y(point.measured_high)
                drawing.whisker(x(point.draft_len), y(point.measured), low, high, cls, tip)
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
    caption = (
        f"{best.name}, one request at a time. Lines and bands: predicted from acceptance and costs"
        f" ({advice.costs_are}). "
    )
    if measured or has_runs:
        caption += (
            "Dots with whiskers: measured; a pair side by side was measured on the endpoint. "
        )
    caption += "A table below explains the gaps."
    return Plot(
        "Speed-up over draft length",
        drawing.render(),
        caption,
        ("predicted_speedup", "speedup"),
    )


def grid_plot(report: ValidationReport) -> Plot | None:
    """Plot tokens per second of every pair of precisions with its interval, grouped by target. The
    best pair is marked.
    """
    grid = report.grid
    if grid is None or not grid.cells:
        return None
    within_limit = {target.quant_algo for target in grid.targets if target.kl.high <= grid.max_kl}
    groups: dict[str, list[GridCell]] = {}
    for cell in grid.cells:
        groups.setdefault(cell.target, []).append(cell)
    height = TOP + sum(26 + 20 * len(cells) for cells in groups.values()) + 48
    drawing = Drawing("Tokens per second of every pair of precisions", height=height)
    names, bottom = LEFT + 120, height - 44
    scale = Scale(0, max(cell.tokens_per_s.high for cell in grid.cells) * 1.12 or 1, names, RIGHT)
    drawing.legend([("spec", f"within KL {grid.max_kl:g}"), ("bad", "beyond it")], LEFT)
    drawing.x_axis(scale, bottom, TOP, ticks(0, scale.high), "output tokens per second")
    y = float(TOP)
    for target, cells in groups.items():
        cls = "spec" if target in within_limit else "bad"
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
        f" a time. Narrow bars: its {grid.confidence:.0%} interval. Best: the fastest pair whose"
        f" target stays within KL {grid.max_kl:g} by its upper bound.",
        ("grid",),
    )


def _by_length(candidate: Candidate, mode: DecodingMode) -> list[SpeedupPrediction]:
    predictions = (
        prediction
        for prediction in candidate.predictions
        if prediction.mode == mode and prediction.batch == 1 and prediction.draft_len > 0
    )
    return sorted(predictions, key=lambda prediction: prediction.draft_len)


def measured_here(report: ValidationReport) -> list[tuple[DecodingMode, Speedup]]:
    """Return (mode, speed-up) pairs as measured on the endpoint at the deployed draft length."""
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
        key=lambda load: load[0],
    )


def _crossover(drawing: Drawing, report: ValidationReport, x: Scale) -> None:
    """Draw a line where speculation stops paying, if that is known. Its label goes to the side
    that has more room.
    """
    crossover = report.crossover
    if crossover is None or crossover.estimate is None:
        return
    place = x(crossover.estimate)
    drawing.line(place, TOP, place, BOTTOM, "gate")
    offset, anchor = (5, "start") if place < (LEFT + RIGHT) / 2 else (-5, "end")
    label = f"crossing near {crossover.estimate:.1f}"
    drawing.text(place + offset, TOP + 10, label, anchor, "gatelabel")


def _concurrency(levels: Sequence[int]) -> Scale:
    return Scale(min(levels), max(*levels, min(levels) + 1), LEFT + 14, RIGHT - 14, log=True)


def throughput_sweep_plot(report: ValidationReport) -> Plot | None:
    """Plot tokens per second of both arms over the number of requests at once."""
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
            [point for point in points if point[1] is not None], drawn, strict=True
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
        f"{capital(METRICS['throughput'].title)}, greedy.{_crossover_words(report)}",
        ("throughput",),
    )


def speed_sweep_plot(report: ValidationReport) -> Plot | None:
    """Plot speculative over plain with its interval at every load. Above 1 speculation pays."""
    ratios = [
        (level, ratio)
        for level, point in _loads(report)
        for ratio in point.ratios
        if ratio.metric == "speed"
    ]
    known = [(level, *edges) for level, ratio in ratios if (edges := _edges(ratio)) is not None]
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
        f" gain.{_crossover_words(report)}",
        ("speed",),
    )


def _edges(ratio: Ratio) -> tuple[float, float, float] | None:
    if ratio.estimate is None or ratio.low is None or ratio.high is None:
        return None
    return ratio.estimate, ratio.low, ratio.high


def _crossover_words(report: ValidationReport) -> str:
    return "" if report.crossover is None else f" Speculation is {report.crossover.detail}."


def measured_peak(stage: StageMemory, costs: Sequence[StageCost]) -> int | None:
    """Return the peak memory, in bytes, that a planned stage took when it ran.

    None for a stage that is planned on a GPU, since StageCost holds the machine's memory only.
    """
    if stage.place != "the machine":
        return None
    peaks = [
        cost.peak_memory_bytes for cost in costs if cost.stage.partition("/")[0] == stage.stage
    ]
    return max((peak for peak in peaks if peak is not None), default=None)


def memory_plot(report: ValidationReport) -> Plot | None:
    """Plot the planned and the measured peak of every stage as bars from zero."""
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
    available = [
        f"{stage.stage}: {stage.available_bytes / GB:,.0f} GB"
        for stage, _ in stages
        if stage.available_bytes is not None
    ]
    caption = (
        "What the plan expects a stage to take, beside the resident memory that it took. The"
        " measured figure is the whole process, loaded libraries included (about half a GB); the"
        " plan counts libraries only where the table below lists them."
    )
    if available:
        caption += f" Available: {', '.join(available)}{', the dashed line' if near else ''}."
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
