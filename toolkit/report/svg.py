"""The SVG that a report needs: scales, ticks and marks. Colours are CSS classes, so a theme can
change them.

A drawing is WIDTH x HEIGHT units and scales with its column. Its text is sized for columns of 340
to 560 pixels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

__all__ = [
    "ARM_CLASSES",
    "BOTTOM",
    "HEIGHT",
    "LEFT",
    "RIGHT",
    "TOP",
    "WIDTH",
    "Drawing",
    "Plot",
    "Scale",
    "ticks",
]

WIDTH, HEIGHT = 440, 260
# Ends of the axes in a plot of the usual height.
LEFT, RIGHT, TOP, BOTTOM = 66, WIDTH - 14, 28, HEIGHT - 44
ARM_CLASSES = {"plain": "plain", "speculative": "spec"}


@dataclass(frozen=True, slots=True)
class Plot:
    """title: what is shown. caption: how to read it. definitions: names of the metrics that define
    its figures.
    """

    title: str
    svg: str
    caption: str
    definitions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Scale:
    """Linear map of [low, high] onto [start, end]; log10 with `log` (both ends above 0)."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, self.low))
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers (1, 2, 2.5 or 5 times a power of ten apart) within [low,
    high].
    """
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


@dataclass
class Drawing:
    """A drawing to which marks are added in order. Every text is escaped; classes and coordinates
    are not, since they are our own.
    """

    label: str
    width: float = WIDTH
    height: float = HEIGHT
    parts: list[str] = field(default_factory=list)

    def line(self, x1: float, y1: float, x2: float, y2: float, cls: str) -> None:
        self.parts.append(
            f'<line class="{cls}" x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}"/>'
        )

    def bar(self, x: float, y: float, width: float, height: float, cls: str, tip: str) -> None:
        shape = (
            f'x="{_n(x)}" y="{_n(y)}" width="{_n(max(width, 0))}" height="{_n(max(height, 0))}"'
            ' rx="2"'
        )
        self.parts.append(f'<rect class="{cls}" {shape}><title>{escape(tip)}</title></rect>')

    def dot(self, x: float, y: float, radius: float, cls: str, tip: str) -> None:
        self.parts.append(
            f'<circle class="{cls}" cx="{_n(x)}" cy="{_n(y)}"'
            f' r="{_n(radius)}"><title>{escape(tip)}</title></circle>'
        )

    def path(self, points: Iterable[tuple[float, float]], cls: str, tip: str = "") -> None:
        commands = " ".join(
            f"{'M' if i == 0 else 'L'}{_n(x)} {_n(y)}" for i, (x, y) in enumerate(points)
        )
        self.parts.append(f'<path class="{cls}" d="{commands}"><title>{escape(tip)}</title></path>')

    def whisker(self, x: float, middle: float, low: float, high: float, cls: str, tip: str) -> None:
        """Draw a dot with its vertical interval."""
        self.line(x, low, x, high, f"whisker {cls}")
        self.dot(x, middle, 4.5, f"{cls} ringed", tip)

    def text(
        self, x: float, y: float, text: str, anchor: str = "start", cls: str = "label"
    ) -> None:
        self.parts.append(
            f'<text class="{cls}" x="{_n(x)}" y="{_n(y)}"'
            f' text-anchor="{anchor}">{escape(text)}</text>'
        )

    def legend(self, entries: Sequence[tuple[str, str]], x: float, y: float = 12) -> None:
        """Draw entries side by side; an entry is (CSS class of its swatch, text)."""
        for cls, text in entries:
            if cls == "mark":  # drawn as a line in the plot
                self.line(x, y - 4, x + 11, y - 4, cls)
            else:
                self.bar(x, y - 9, 10, 10, cls, text)
            self.text(x + 15, y, text)
            x += 27 + 8 * len(text)

    def x_axis(self, scale: Scale, y: float, top: float, at: Sequence[float], unit: str) -> None:
        """Draw grid lines from `top` down to y, with the numbers and their unit below."""
        for value, label in zip(at, _labels(at), strict=True):
            x = scale(value)
            self.line(x, top, x, y, "grid")
            self.text(x, y + 16, label, "middle", "tick")
        self.text((scale.start + scale.end) / 2, y + 34, unit, "middle", "tick")

    def y_axis(
        self,
        scale: Scale,
        x: float,
        right: float,
        at: Sequence[float],
        unit: str,
        percent: bool = False,
    ) -> None:
        """Draw grid lines from x to `right`, with the numbers to their left and the unit at the
        edge, written upwards.
        """
        labels = [_percent(value) for value in at] if percent else _labels(at)
        for value, label in zip(at, labels, strict=True):
            y = scale(value)
            self.line(x, y, right, y, "grid")
            self.text(x - 6, y + 4, label, "end", "tick")
        middle = _n((scale.start + scale.end) / 2)
        shape = (
            f'class="tick" x="10" y="{middle}" text-anchor="middle" transform="rotate(-90 10'
            f' {middle})"'
        )
        self.parts.append(f"<text {shape}>{escape(unit)}</text>")

    def render(self) -> str:
        box = f'viewBox="0 0 {_n(self.width)} {_n(self.height)}"'
        return (
            f'<svg {box} role="img"'
            f' aria-label="{escape(self.label, quote=True)}">{"".join(self.parts)}</svg>'
        )


def _labels(values: Sequence[float]) -> list[str]:
    """Write all small numbers with an exponent if one needs it, so that 5e-5 and 1e-4 compare."""
    labels = [_tick(value) for value in values]
    if not any("e-" in label for label in labels):
        return labels
    return [
        _exponent(value) if 0 < abs(value) < 0.1 else label
        for value, label in zip(values, labels, strict=True)
    ]


def _exponent(value: float) -> str:
    digits, _, power = f"{value:.2e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"


def _tick(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}".replace("e-0", "e-")


def _percent(value: float) -> str:
    return f"{100 * value:.3g}%"


def _n(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")
