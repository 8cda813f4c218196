"""Acceptance over time, by domain and by length of the prompt: where drafts agree less, and whether
they agree less than they did.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from toolkit.bench.definitions import heading
from toolkit.records.measured import AcceptanceSlice, AcceptanceWindow
from toolkit.records.report import ValidationReport
from toolkit.report.cells import DASH, Table, number, percent
from toolkit.report.svg import BOTTOM, LEFT, RIGHT, TOP, Drawing, Plot, Scale, ticks

__all__ = ["acceptance_plots", "acceptance_tables", "slice_name"]

SHOWN_POSITIONS = 6  # of a draft, in a plot; longer drafts are hardly accepted beyond
SHOWN_SLICES = 12
NAME_LENGTH = 19  # characters of a group beside its bar
LABEL_PX = 17  # between two labels at the ends of lines
NAMES = {"new_prefix": "new to the KV cache", "reused_prefix": "began in the KV cache"}


def acceptance_tables(report: ValidationReport) -> list[Table]:
    """Return the tables that the report has data for."""
    tables: list[Table] = []
    if len(report.acceptance_slices) > 1:
        tables.append(_slices(report.acceptance_slices))
    for words, windows in _windows(report):
        tables.append(_over_time(words, windows))
    return tables


def acceptance_plots(report: ValidationReport) -> Iterator[Plot]:
    """Return the plots that the report has data for. Over time the open loop is plotted, if there
    is one, since its requests come as clients send them.
    """
    for words, windows in _windows(report)[-1:]:
        if any(window.by_position for window in windows):
            yield _time_plot(words, windows)
    if len(report.acceptance_slices) > 1:
        yield _slices_plot(report.acceptance_slices)


def _windows(report: ValidationReport) -> list[tuple[str, Sequence[AcceptanceWindow]]]:
    """Return (of what, the windows): of the greedy requests, and of the open loop."""
    found: list[tuple[str, Sequence[AcceptanceWindow]]] = []
    if report.acceptance_over_time:
        found.append(("greedy", report.acceptance_over_time))
    if report.load is not None and report.load.point is not None:
        deployed = report.load.point.arms[-1]
        if deployed.acceptance_over_time:
            found.append(
                (f"open loop, {report.load.rate:g} requests/s", deployed.acceptance_over_time)
            )
    return found


def slice_name(part: AcceptanceSlice) -> str:
    """What a table or a plot calls the slice, such as `code` or `13 to 40 tokens`."""
    if part.of == "domain":
        return part.name
    return NAMES.get(part.of, f"{part.least:,} to {part.most:,} tokens")


def _slices(slices: Sequence[AcceptanceSlice]) -> Table:
    positions = max(len(part.by_position) for part in slices)
    rows = [
        (
            slice_name(part),
            f"{part.requests:,}",
            number(part.length),
            percent(part.rate),
            *_cells(part.by_position, positions),
        )
        for part in slices
    ]
    lengths = (heading("acceptance_length"), heading("acceptance_rate"))
    return Table(
        "Acceptance by prompt, greedy",
        ("prompts", "requests", *lengths, *_headings(positions)),
        tuple(rows),
        ("acceptance_length", "acceptance_rate", "acceptance_by_position"),
        "Requests of all rounds, by length of the prompt, and by the `domain` of its line. Drafts"
        " may agree less far from what they were trained on, such as behind long prompts.",
    )


def _over_time(words: str, windows: Sequence[AcceptanceWindow]) -> Table:
    positions = max(len(window.by_position) for window in windows)
    rows = tuple(
        (
            f"{window.begin_s:.0f} to {window.end_s:.0f} s",
            f"{window.requests:,}",
            number(window.length),
            percent(window.rate),
            *_cells(window.by_position, positions),
        )
        for window in windows
    )
    return Table(
        f"Acceptance over time, {words}",
        (
            "sent within",
            "requests",
            heading("acceptance_length"),
            heading("acceptance_rate"),
            *_headings(positions),
        ),
        rows,
        ("acceptance_length", "acceptance_rate", "acceptance_by_position"),
        "Windows of equally many requests. The prompts come in random order, so a change over time"
        " is the server's.",
    )


def _headings(positions: int) -> tuple[str, ...]:
    return tuple(f"position {i + 1}" for i in range(positions))


def _cells(rates: Sequence[float | None], positions: int) -> list[str]:
    return [percent(rates[i]) if i < len(rates) else DASH for i in range(positions)]


def _time_plot(words: str, windows: Sequence[AcceptanceWindow]) -> Plot:
    """Plot a line per position of the draft. A later position is never accepted more often, so the
    lines do not cross, and numbers at their ends tell them apart.
    """
    drawing = Drawing("Acceptance by draft position over time")
    x = Scale(windows[0].begin_s, windows[-1].end_s, LEFT + 8, RIGHT - 24)
    y = Scale(0, 1, BOTTOM, TOP)
    drawing.x_axis(x, BOTTOM, TOP, ticks(x.low, x.high), "s after the first request")
    drawing.y_axis(
        y, LEFT, RIGHT, (0, 0.25, 0.5, 0.75, 1.0), "drafted tokens accepted", percent=True
    )
    positions = min(SHOWN_POSITIONS, max(len(window.by_position) for window in windows))
    label_y = 0.0
    for i in range(positions):
        points = [
            ((window.begin_s + window.end_s) / 2, rate, window)
            for window in windows
            if i < len(window.by_position) and (rate := window.by_position[i]) is not None
        ]
        drawing.path(
            [(x(at), y(rate)) for at, rate, _ in points], "curve spec", f"position {i + 1}"
        )
        for at, rate, window in points:
            tip = (
                f"position {i + 1}, {window.begin_s:.0f} to {window.end_s:.0f} s: {rate:.1%} in"
                f" {window.requests:,} requests"
            )
            drawing.dot(x(at), y(rate), 3.2, "spec", tip)
        if points:
            label_y = max(y(points[-1][1]) + 4, label_y + LABEL_PX)
            drawing.text(RIGHT - 14, label_y, str(i + 1), "middle", "value")
    return Plot(
        "Acceptance by position over time",
        drawing.render(),
        f"A line per position in the draft, {words}. The prompts come in random order: if the lines"
        " fall, the draft's cache or the server changes, not the text.",
        ("acceptance_by_position",),
    )


def _slices_plot(slices: Sequence[AcceptanceSlice]) -> Plot:
    """Plot the acceptance length of each group of prompts as bars from one token per step."""
    shown = [part for part in slices if part.length is not None][:SHOWN_SLICES]
    height = 24 + 26 * len(shown) + 44
    left = LEFT + 96.0
    drawing = Drawing("Acceptance length by group of prompts", height=height)
    longest = max((part.length or 1.0) for part in shown)
    scale = Scale(1, max(1.2, longest * 1.08), left, RIGHT - 26)
    bottom = height - 44
    drawing.x_axis(scale, bottom, 12, ticks(1, scale.high), heading("acceptance_length"))
    for number_of, part in enumerate(shown):
        length, top = part.length or 1.0, 18 + 26 * number_of
        tip = f"{slice_name(part)}: {length:.2f} in {part.requests:,} requests"
        drawing.bar(left, top, scale(length) - left, 18, "spec", tip)
        name = slice_name(part).removesuffix(" tokens")
        shown_name = name if len(name) <= NAME_LENGTH else f"{name[: NAME_LENGTH - 1]}…"
        drawing.text(left - 6, top + 13, shown_name, "end")
        drawing.text(scale(length) + 5, top + 13, f"{length:.2f}", cls="value")
    return Plot(
        "Acceptance by group of prompts",
        drawing.render(),
        "Tokens per verify step, greedy, by length of the prompt in tokens and by domain; 1 is what"
        " plain decoding gives.",
        ("acceptance_length",),
    )
