"""How sure a counted rate is: exact bounds on it, and how many prompts a bound needs.

A bound is one-sided: each of both holds at `confidence` by itself.
"""

from __future__ import annotations

from toolkit.resampling import CONFIDENCE

__all__ = ["clopper_pearson", "prompts_needed"]


def clopper_pearson(events: int, trials: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Exact one-sided bounds on a rate, each at `confidence`: (lower, upper). Clopper and Pearson 1934.

    Raises ValueError unless 0 <= events <= trials and trials > 0.
    """
    from scipy.stats import beta

    if not 0 <= events <= trials or trials == 0:
        raise ValueError(f"{events} events in {trials} trials")
    low = 0.0 if events == 0 else float(beta.ppf(1 - confidence, events, trials - events + 1))
    high = 1.0 if events == trials else float(beta.ppf(confidence, events + 1, trials - events))
    return low, high


def prompts_needed(limit: float, events: int, confidence: float = CONFIDENCE) -> int | None:
    """Fewest prompts at which `events` divergences still bound the rate by `limit`; None above a million."""
    if not 0 < limit < 1:
        return 1 if limit >= 1 else None
    low, high = events, max(1, events)
    while clopper_pearson(events, high, confidence)[1] > limit:
        low, high = high, high * 2
        if high > 1_000_000:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if clopper_pearson(events, middle, confidence)[1] <= limit else (middle, high)
    return high
