"""Exact bounds on a counted rate, and how many prompts a bound needs.

Bounds are one-sided: each of the two holds at CONFIDENCE by itself.
"""

from __future__ import annotations

from bisect import bisect_left

from toolkit.resampling import CONFIDENCE

__all__ = ["clopper_pearson", "prompts_needed"]

MOST_PROMPTS = 1_000_000  # nobody runs more


def clopper_pearson(events: int, trials: int) -> tuple[float, float]:
    """Return exact bounds (lower, upper) on a rate. Clopper and Pearson 1934.

    Raises ValueError unless 0 <= events <= trials and trials > 0.
    """
    from scipy.stats import beta

    if not 0 <= events <= trials or trials == 0:
        raise ValueError(f"{events} events in {trials} trials")
    low, high = 0.0, 1.0
    if events > 0:
        low = float(beta.ppf(1 - CONFIDENCE, events, trials - events + 1))
    if events < trials:
        high = float(beta.ppf(CONFIDENCE, events + 1, trials - events))
    return low, high


def prompts_needed(limit: float, events: int) -> int | None:
    """Return the fewest prompts with which `events` divergences still bound the rate by `limit`.
    None if a million are not enough.
    """
    if limit >= 1:
        return 1
    counts = range(max(1, events), MOST_PROMPTS + 1)

    def is_bounded(prompts: int) -> bool:
        return clopper_pearson(events, prompts)[1] <= limit

    index = bisect_left(counts, True, key=is_bounded)
    return counts[index] if index < len(counts) else None
