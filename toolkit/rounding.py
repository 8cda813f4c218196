"""How many decimals a figure is printed with beside its limit: enough to see on which side of it it lies."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["decimals"]

MOST = 6  # what is still equal then is a tie to anybody


def decimals(values: Iterable[float], limit: float | None, least: int = 2) -> int:
    """The fewest, from `least` on, with which no value that differs from the limit is printed as the limit."""
    if limit is None:
        return least
    different = [value for value in values if value != limit]
    for digits in range(least, MOST):
        if all(f"{value:.{digits}f}" != f"{limit:.{digits}f}" for value in different):
            return digits
    return MOST
