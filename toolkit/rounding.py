"""How figures are printed: bytes in the unit that suits, and decimals enough to see on which
side of a limit a figure lies.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["decimals", "size"]

MOST = 6  # what is still equal then is a tie to anybody


def decimals(values: Iterable[float], limit: float | None, least: int = 2) -> int:
    """The fewest, from `least` on, with which no value that differs from the limit is printed as
    the limit.
    """
    if limit is None:
        return least
    different = [value for value in values if value != limit]
    for digits in range(least, MOST):
        if all(f"{value:.{digits}f}" != f"{limit:.{digits}f}" for value in different):
            return digits
    return MOST


def size(num_bytes: float) -> str:
    """Three digits, in powers of a thousand, as GPUs' memory and disks are sold."""
    value, unit = float(num_bytes), "B"
    for larger in ("kB", "MB", "GB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    digits = 0 if unit == "B" or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:,.{digits}f} {unit}"
