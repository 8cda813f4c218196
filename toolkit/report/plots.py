"""The plots of a report. Each takes records, returns an SVG drawing and answers one question."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.bench.definitions import METRICS
from toolkit.records.build import QuantizationQuality
from toolkit.records.judged import Parity
from toolkit.records.measured import Acceptance, Arm, Arms, Metric
from toolkit.records.report import ValidationReport
from toolkit.report.acceptance import acceptance_plots
from toolkit.report.cells import capital
from toolkit.report.expected import (
    draft_length_plot,
    grid_plot,
    memory_plot,
    speed_sweep_plot,
    throughput_sweep_plot,
)
from toolkit.report.load import load_plots
from toolkit.report.svg import ARM_CLASSES, BOTTOM, LEFT, RIGHT, TOP, Drawing, Plot, Scale, ticks
from toolkit.words import Role

__all__ = ["Plot", "plots"]


def plots(report: ValidationReport) -> list[Plot]:
    """Return the plots that the report has data for."""
    return list(_plots(report))


def _plots(report: ValidationReport) -> Iterator[Plot]:
    if report.speedup is not None:
        yield speedup_plot(report)
    yield throughput_plot(report)
    if report.acceptance is not None and report.acceptance.by_position:
        yield acceptance_plot(report)
    yield from acceptance_plots(report)
    for plot in (
        draft_length_plot(report),
        grid_plot(report),
        throughput_sweep_plot(report),
        speed_sweep_plot(report),
    ):
        if plot is not None:
            yield plot
    if report.load is not None:
        yield from load_plots(report.load, report.gates)
    if report.arms.speculative is not None:
        yield prompts_plot(report.arms.plain, report.arms.speculative)
    for name in ("e2e", "itl", "ttft", "icl"):
        if report.arms.plain.latencies[name].curve:
            yield latency_plot(report.arms, METRICS[name])
    qualities: dict[Role, QuantizationQuality | None] = {
        "target": report.quality.target,
        "draft": report.quality.draft,
    }
    for role, quality in qualities.items():
        if quality is not None and quality.layers:
            yield layer_kl_plot(role, quality)
            yield layers_plot(role, quality)
    diverging = [
        parity
        for parity in (report.parity, report.sampled.parity)
        if parity is not None and parity.divergences
    ]
    if any(
        divergence.margin is not None for parity in diverging for divergence in parity.divergences
    ):
        yield margins_plot(diverging)
    memory = memory_plot(report)
    if memory is not None:
        yield memory


def speedup_plot(report: ValidationReport) -> Plot:
    """Plot the speed-up and its interval at each temperature, beside the gate and 1x."""
    speedups = [
        ("greedy", report.speedup),
        (f"T = {report.sampled.temperature:g}", report.sampled.speedup),
    ]
    rows = [(label, speedup) for label, speedup in speedups if speedup is not None]
    limit = next((gate.limit for gate in report.gates if gate.metric == "speedup"), None)
    marks = [
        1.0,
        *([] if limit is None else [limit]),
        *(s.high for _, s in rows),
        *(s.low for _, s in rows),
    ]
    drawing = Drawing("Speed-up with its interval against the gate", height=190)
    bottom = 190 - 44
    scale = Scale(min(marks) * 0.92, max(marks) * 1.06, LEFT + 26, RIGHT)
    drawing.x_axis(
        scale, bottom, TOP, ticks(scale.low, scale.high), "speculative / plain tokens per second"
    )
    drawing.line(scale(1), TOP, scale(1), bottom, "axis")
    caption = "Dot: estimate; bar: 95% interval. The solid line is 1x: no gain."
    if limit is not None:
        drawing.line(scale(limit), TOP - 6, scale(limit), bottom, "gate")
        is_right = scale(limit) > (LEFT + RIGHT) / 2
        offset, anchor = (-5, "end") if is_right else (5, "start")
        drawing.text(scale(limit) + offset, TOP - 2, f"gate {limit:g}x", anchor, "gatelabel")
        caption += " To pass, the whole bar has to be right of the gate."
    for i, (label, speedup) in enumerate(rows):
        y = TOP + 32 + i * 44
        tip = (
            f"{label}: {speedup.estimate:.3f}x, {speedup.confidence:.0%} interval {speedup.low:.3f}"
            f" to {speedup.high:.3f}"
        )
        drawing.bar(
            scale(speedup.low), y - 4, scale(speedup.high) - scale(speedup.low), 8, "spec soft", tip
        )
        drawing.dot(scale(speedup.estimate), y, 6, "spec", tip)
        drawing.text(LEFT + 20, y + 4, label, "end")
        drawing.text(scale(speedup.estimate), y - 12, f"{speedup.estimate:.2f}x", "middle", "value")
    return Plot(
        capital(METRICS["speedup"].title),
        drawing.render(),
        caption,
        ("speedup",),
    )


def throughput_plot(report: ValidationReport) -> Plot:
    """Plot tokens per second of every arm as bars from zero."""
    groups = [("greedy", report.arms), (f"T = {report.sampled.temperature:g}", report.sampled.arms)]
    arms = [(label, name, arm) for label, pair in groups for name, arm in _arms(pair)]
    height = 46 + 30 * len(arms) + 12 * (len(groups) - 1) + 40
    drawing = Drawing("Output tokens per second of both arms", height=height)
    drawing.legend([(ARM_CLASSES[name], name) for name, _ in _arms(report.arms)], LEFT + 26)
    bottom = height - 44
    scale = Scale(0, max(arm.tokens_per_s for _, _, arm in arms) * 1.16 or 1, LEFT + 26, RIGHT)
    drawing.x_axis(
        scale,
        bottom,
        TOP,
        ticks(0, scale.high),
        f"{METRICS['tokens_per_s'].title}, one request at a time",
    )
    y = TOP + 6.0
    for index, (label, name, arm) in enumerate(arms):
        if index and arms[index - 1][0] != label:
            y += 12
        tip = f"{name}, {label}: {arm.output_tokens:,} tokens in {arm.request_time_s:,.1f} s"
        drawing.bar(scale(0), y, scale(arm.tokens_per_s) - scale(0), 22, ARM_CLASSES[name], tip)
        drawing.text(scale(arm.tokens_per_s) + 6, y + 15, f"{arm.tokens_per_s:,.0f}", cls="value")
        if name == "plain":
            drawing.text(LEFT + 20, y + 15, label, "end")
        y += 30
    return Plot(
        capital(METRICS["tokens_per_s"].title),
        drawing.render(),
        "The time includes prefill and streaming.",
        ("tokens_per_s",),
    )


def acceptance_plot(report: ValidationReport) -> Plot:
    """Plot joint acceptance rates as bars and conditional ones as lines, by draft position."""
    measured: list[tuple[str, str, Acceptance]] = []
    for label, cls, acceptance in (
        ("greedy", "spec", report.acceptance),
        (f"T = {report.sampled.temperature:g}", "spec2", report.sampled.acceptance),
    ):
        if acceptance is not None:
            measured.append((label, cls, acceptance))
    drawing = Drawing("Acceptance by draft position")
    drawing.legend(
        [*((cls, label) for label, cls, _ in measured), ("mark", "if all before it were accepted")],
        LEFT,
    )
    scale = Scale(0, 1, BOTTOM, TOP)
    drawing.y_axis(
        scale, LEFT, RIGHT, (0, 0.25, 0.5, 0.75, 1.0), "drafted tokens accepted", percent=True
    )
    positions = max(len(acceptance.by_position) for _, _, acceptance in measured)
    slot = (RIGHT - LEFT) / positions
    width = min(46.0, slot * 0.86 / len(measured))
    for i in range(positions):
        start = LEFT + slot * (i + 0.5) - width * len(measured) / 2
        drawing.text(LEFT + slot * (i + 0.5), BOTTOM + 16, str(i + 1), "middle", "tick")
        for j, (label, cls, acceptance) in enumerate(measured):
            if i >= len(acceptance.by_position):
                continue
            position = acceptance.by_position[i]
            if position.joint is None:
                continue
            x, y = start + j * width, scale(position.joint)
            tip = (
                f"{label}, position {i + 1}: {position.joint:.1%} ({position.accepted:,} of"
                f" {position.drafted:,} drafted)"
            )
            drawing.bar(x + 1, y, width - 2, BOTTOM - y, cls, tip)
            if width >= 44 and BOTTOM - y >= 20:
                drawing.text(x + width / 2, BOTTOM - 6, f"{position.joint:.0%}", "middle", "inbar")
            if position.conditional is not None:
                drawing.line(
                    x + 1,
                    scale(position.conditional),
                    x + width - 1,
                    scale(position.conditional),
                    "mark",
                )
    drawing.text((LEFT + RIGHT) / 2, BOTTOM + 34, "position in the draft", "middle", "tick")
    return Plot(
        capital(METRICS["acceptance_by_position"].title),
        drawing.render(),
        "Bars: share of drafted tokens at this position that the target accepted. Lines: the same,"
        " counting only steps that accepted every token before it; if the lines fall, the draft"
        " loses the thread.",
        ("acceptance_by_position",),
    )


def prompts_plot(plain: Arm, speculative: Arm) -> Plot:
    """Plot the ratio of every prompt, sorted. It shows whether all prompts gain or only a few."""
    pairs = zip(speculative.tokens_per_s_by_prompt, plain.tokens_per_s_by_prompt, strict=True)
    ratios = sorted(
        (fast / slow, index) for index, (fast, slow) in enumerate(pairs) if slow > 0 and fast > 0
    )
    drawing = Drawing("Speed-up of every prompt, sorted")
    values = [ratio for ratio, _ in ratios] or [1.0]
    scale = Scale(min(0.9, *values) * 0.95, max(1.1, *values) * 1.05, BOTTOM, TOP)
    drawing.y_axis(
        scale, LEFT, RIGHT, ticks(scale.low, scale.high), f"{METRICS['speedup'].title}, times plain"
    )
    drawing.line(LEFT, scale(1), RIGHT, scale(1), "axis")
    along = Scale(0, max(1, len(ratios) - 1), LEFT + 8, RIGHT - 8)
    for i, (ratio, index) in enumerate(ratios):
        cls = "spec" if ratio >= 1 else "bad"
        drawing.line(along(i), scale(1), along(i), scale(ratio), f"stem {cls}")
        drawing.dot(along(i), scale(ratio), 3.2, cls, f"prompt {index + 1}: {ratio:.2f}x")
    drawing.text(
        (LEFT + RIGHT) / 2,
        BOTTOM + 24,
        "prompts, from the slowest to the fastest",
        "middle",
        "tick",
    )
    slower = sum(ratio < 1 for ratio in values)
    count = "None is" if slower == 0 else f"{slower} of {len(ratios)} are"
    caption = f"Each dot is a prompt, all its rounds together. {count} slower with speculation."
    return Plot("Speed-up of every prompt, greedy", drawing.render(), caption, ("tokens_per_s",))


def latency_plot(arms: Arms, metric: Metric) -> Plot:
    """Plot the cumulative distributions of both arms, up to the larger p99."""
    title = capital(metric.spelled_out)
    drawing = Drawing(f"{title}: cumulative distribution of both arms")
    pairs = [
        (arm_name, arm.latencies[metric.name])
        for arm_name, arm in _arms(arms)
        if arm.latencies[metric.name].curve
    ]
    drawing.legend([(ARM_CLASSES[arm_name], arm_name) for arm_name, _ in pairs], LEFT)
    low = min(latency.curve[0] for _, latency in pairs)
    high = max(latency.curve[99] for _, latency in pairs)
    pad = max((high - low) * 0.05, high * 0.02, 1e-3)
    x = Scale(max(0.0, low - pad), high + pad, LEFT + 16, RIGHT)
    y = Scale(0, 1, BOTTOM, TOP)
    drawing.x_axis(x, BOTTOM, TOP, ticks(x.low, x.high), metric.unit)
    drawing.y_axis(y, LEFT, RIGHT, (0, 0.5, 0.9, 1.0), "samples at or below", percent=True)
    for arm_name, latency in pairs:
        cls = ARM_CLASSES[arm_name]
        points = [(x(value), y(i / 100)) for i, value in enumerate(latency.curve[:100])]
        drawing.path(points, f"curve {cls}", f"{arm_name}: {latency.samples:,} samples")
        if latency.p50 is not None:
            drawing.dot(
                x(latency.p50), y(0.5), 4.5, cls, f"{arm_name}: p50 {latency.p50:.2f} {metric.unit}"
            )
        if latency.p90 is not None:
            drawing.dot(
                x(latency.p90), y(0.9), 4.5, cls, f"{arm_name}: p90 {latency.p90:.2f} {metric.unit}"
            )
    caption = (
        "Share of samples at or below a latency, temperature 0, up to p99. Further left is better;"
        " dots: p50 and p90."
    )
    return Plot(title, drawing.render(), caption, (metric.name, "percentiles"))


def layer_kl_plot(role: Role, quality: QuantizationQuality) -> Plot:
    """Plot the KL that each decoder layer costs if it alone is quantized, in the model's order."""
    drawing = Drawing(f"KL that every layer of the {role} costs when it alone is quantized")
    layers = quality.layer_kl
    worst = max(layers, key=lambda layer: layer.kl)
    prefix, factor = "", 1.0
    if worst.kl < 0.01:  # such numbers in whole nats would be too wide for the margin
        prefix, factor = "milli", 1000.0
    scale = Scale(0, factor * worst.kl * 1.08 or 1e-3, BOTTOM, TOP)
    drawing.y_axis(
        scale,
        LEFT,
        RIGHT,
        ticks(0, scale.high),
        f"{METRICS['layer_kl'].title}, {prefix}{METRICS['layer_kl'].unit}",
    )
    slot = (RIGHT - LEFT) / len(layers)
    width = min(24.0, max(1.0, slot - 2))
    step = -(-len(layers) // 16)
    for i, layer in enumerate(layers):
        middle, y = LEFT + slot * (i + 0.5), scale(factor * layer.kl)
        tip = f"{layer.layer}: {layer.kl:.2g} nats"
        drawing.bar(middle - width / 2, y, width, BOTTOM - y, "spec", tip)
        if i % step == 0:
            drawing.text(middle, BOTTOM + 16, str(i), "middle", "tick")
    drawing.text((LEFT + RIGHT) / 2, BOTTOM + 34, "decoder layer", "middle", "tick")
    caption = (
        f"KL of the source with this layer quantized and no other, over {quality.layer_kl_tokens:,}"
        f" tokens. {worst.layer} costs most, {worst.kl:.2g} nats; all together"
        f" {quality.kl_mean:.2g}, over {quality.tokens:,} tokens."
    )
    return Plot(f"KL by layer: {role}", drawing.render(), caption, ("layer_kl", "kl_mean"))


def layers_plot(role: Role, quality: QuantizationQuality) -> Plot:
    """Plot the relative error of every quantized linear layer, in the model's order."""
    drawing = Drawing(f"Quantization error of every layer of the {role}")
    scale = Scale(
        0, max(layer.relative_error for layer in quality.layers) * 1.08 or 1e-6, BOTTOM, TOP
    )
    drawing.y_axis(
        scale,
        LEFT,
        RIGHT,
        ticks(0, scale.high),
        f"{METRICS['layer_error'].title} of its output",
        percent=True,
    )
    slot = (RIGHT - LEFT) / len(quality.layers)
    for i, layer in enumerate(quality.layers):
        y = scale(layer.relative_error)
        width = min(24.0, max(1.0, slot - 1))
        x = LEFT + slot * (i + 0.5) - width / 2
        drawing.bar(x, y, width, BOTTOM - y, "spec", f"{layer.layer}: {layer.relative_error:.2%}")
    worst = max(quality.layers, key=lambda layer: layer.relative_error)
    drawing.text(
        (LEFT + RIGHT) / 2, BOTTOM + 24, "linear layers, from input to output", "middle", "tick"
    )
    caption = (
        "Relative error of a layer's output on held-out text. The largest is"
        f" {worst.relative_error:.2%}, at {worst.layer}."
    )
    return Plot(f"Quantization error by layer: {role}", drawing.render(), caption, ("layer_error",))


def margins_plot(parities: list[Parity]) -> Plot:
    """Plot where divergences happened and how undecided the reference was there."""
    divergences = [
        divergence
        for parity in parities
        for divergence in parity.divergences
        if divergence.margin is not None
    ]
    limit = parities[0].near_tie_margin
    drawing = Drawing("Reference margin at every divergence")
    gaps = [
        max(divergence.plain_gap or 0.0, divergence.speculative_gap or 0.0, 1e-5)
        for divergence in divergences
    ]
    low, high = min(*gaps, limit or 1e-4, 1e-3) / 2, max(*gaps, limit, 1e-2) * 2
    y = Scale(low, high, BOTTOM, TOP, log=True)
    x = Scale(0, max(divergence.position for divergence in divergences) + 1, LEFT + 6, RIGHT)
    drawing.y_axis(
        y,
        LEFT,
        RIGHT,
        [10.0**k for k in range(-6, 4) if low <= 10.0**k <= high],
        "gap to the best, logits",
    )
    drawing.x_axis(x, BOTTOM, BOTTOM, ticks(0, x.high), "output token at which the texts diverge")
    if limit > 0:
        drawing.line(LEFT, y(limit), RIGHT, y(limit), "gate")
        drawing.text(RIGHT, y(limit) - 6, f"near-tie up to {limit:g}", "end", "gatelabel")
    for divergence, gap in zip(divergences, gaps, strict=True):
        position = divergence.position + 1
        tip = (
            f"prompt {divergence.prompt_index + 1}, token {position}: {divergence.kind},"
            f" {divergence.detail}"
        )
        cls = "spec" if divergence.kind == "equivalent" else "bad"
        drawing.dot(x(position), y(gap), 5, cls, tip)
    caption = (
        "How far below the reference's best score (logits) the worse of the two chosen tokens lies."
        " Below the line, rounding explains the difference. Above the line, it does not."
    )
    return Plot("Divergences", drawing.render(), caption, ("parity",))


def _arms(arms: Arms) -> list[tuple[str, Arm]]:
    return [
        ("plain", arms.plain),
        *([] if arms.speculative is None else [("speculative", arms.speculative)]),
    ]
