"""How figures are printed: bytes and times in a suitable unit, and enough decimals to see on which
side of a limit a figure is.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["decimals", "duration", "size"]

MAX_DECIMALS = 6  # figures that are still printed as equal then count as a tie


def decimals(values: Iterable[float], limit: float | None, least: int = 2) -> int:
    """The smallest number of decimals, from `least` to MAX_DECIMALS, with which no value that
    differs from the limit is printed like the limit.
    """
    if limit is None:
        return least
    different = [value for value in values if value != limit]
    for digits in range(least, MAX_DECIMALS):
        if all(f"{value:.{digits}f}" != f"{limit:.{digits}f}" for value in different):
            return digits
    return MAX_DECIMALS


def duration(seconds: float) -> str:
    """An estimated time, as exactly as an estimate is: seconds, minutes or hours."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def size(num_bytes: float) -> str:
    """Bytes with three digits and a decimal unit (1 kB = 1000 B), as memory and disks are sold."""
    value, unit = float(num_bytes), "B"
    for larger in ("kB", "MB", "GB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    digits = 2
    if unit == "B" or value >= 99.95:
        digits = 0
    elif value >= 9.995:
        digits = 1
    return f"{value:,.{digits}f} {unit}"
