"""The tables of a report, and how a number becomes the text of a cell.

Renderers print cells as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from toolkit import rounding

__all__ = ["DASH", "Table", "capital", "interval", "number", "percent", "size"]

DASH = "-"


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text cells; every row is as long as columns.

    definitions: names of the metrics that define its figures. text: all columns hold words. words:
    names of the columns that hold words. is_brief: a terminal shows it even without `full`.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    definitions: tuple[str, ...] = ()
    note: str = ""
    text: bool = False
    words: tuple[str, ...] = ()
    is_brief: bool = False

    def right(self, index: int) -> bool:
        """Whether a column holds numbers and is aligned to the right."""
        return index > 0 and not self.text and self.columns[index] not in self.words


def number(value: float | None, digits: int = 3) -> str:
    """A number with about `digits` significant digits; a dash for None."""
    if value is None:
        return DASH
    if 0 < abs(value) < 0.0001:
        return f"{value:.1e}"
    magnitude = math.floor(math.log10(abs(value))) if value else 0
    return f"{value:,.{max(0, digits - 1 - magnitude)}f}"


def capital(title: str) -> str:
    """A metric's title with a capital letter, for the start of a line."""
    return title[:1].upper() + title[1:]


def percent(value: float | None) -> str:
    return DASH if value is None else f"{value:.1%}"


def size(count: int | None) -> str:
    return DASH if count is None else rounding.size(count)


def interval(estimate: float | None, low: float | None, high: float | None) -> str:
    """An estimate with the ends of its interval, all to two decimals."""
    if estimate is None:
        return DASH
    if low is None or high is None:
        return f"{estimate:.2f}"
    return f"{estimate:.2f} ({low:.2f} to {high:.2f})"
