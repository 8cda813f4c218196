"""The statistics of a verdict: weighted percentiles, exact bounds on a rate, bootstrap intervals. Pure: arrays in, numbers out.

Intervals are two-sided at CONFIDENCE, bounds one-sided. Resampling takes whole prompts, never single tokens, since the tokens
of one text share its difficulty; a fixed seed makes a report repeatable from its measurements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "CONFIDENCE",
    "bootstrap_percentile",
    "bootstrap_ratio",
    "bootstrap_ratio_of_sums",
    "clopper_pearson",
    "percentile",
    "prompts_needed",
    "unsupported",
]

Floats = NDArray[np.float64]

CONFIDENCE = 0.95
RESAMPLES = 2000
BEYOND = 10  # samples that have to lie beyond a percentile before we print it: 20 for p50, 100 for p90, 1000 for p99
BATCH = 2_000_000  # most numbers of one vectorised resampling batch


def unsupported(samples: int, q: float) -> str | None:
    """Why `samples` cannot support percentile q (in percent), or None when they can."""
    needed = math.ceil(BEYOND / (1 - q / 100) - 1e-9)
    return None if samples >= needed else f"{samples} samples; p{q:g} needs {needed}, so that {BEYOND} lie beyond it"


def percentile(values: Sequence[float] | Floats, q: float, weights: Sequence[int] | None = None) -> float:
    """numpy's linear percentile of values, each repeated by its weight. q in percent; values must not be empty."""
    expanded = np.asarray(values, dtype=np.float64)
    if weights is not None:
        expanded = np.repeat(expanded, weights)
    return float(np.percentile(expanded, q))


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


def bootstrap_ratio(
    tokens: tuple[Any, Any], times: tuple[Any, Any], *, seed: int = 0, confidence: float = CONFIDENCE
) -> tuple[float, float, float]:
    """(estimate, low, high) of (tokens[0] / times[0]) / (tokens[1] / times[1]), each summed first.

    All four arrays are [rounds, prompts], and an entry of arm 0 pairs with the same entry of arm 1. Prompts and rounds are
    resampled independently of one another and crossed, so that neither a lucky prompt nor a quiet round is taken for the rule
    (Owen 2007, the pigeonhole bootstrap; errs on the wide side). Percentile interval.
    """
    sums = np.stack(
        [np.asarray(a, dtype=np.float64) for a in (tokens[0], times[0], tokens[1], times[1])]
    )  # [4, rounds, prompts]
    _, rounds, prompts = sums.shape
    generator = np.random.default_rng(seed)
    round_weights = generator.multinomial(rounds, np.full(rounds, 1 / rounds), size=RESAMPLES)
    prompt_weights = generator.multinomial(prompts, np.full(prompts, 1 / prompts), size=RESAMPLES)
    resampled = np.einsum("br,krp,bp->kb", round_weights, sums, prompt_weights, optimize=True)
    ratios = (resampled[0] / resampled[1]) / (resampled[2] / resampled[3])
    tail = 100 * (1 - confidence) / 2
    total = sums.sum(axis=(1, 2))
    low, high = np.percentile(ratios, [tail, 100 - tail])
    return float((total[0] / total[1]) / (total[2] / total[3])), float(low), float(high)


def bootstrap_percentile(
    clusters: Sequence[Sequence[float]],
    q: float,
    weights: Sequence[Sequence[int]] | None = None,
    *,
    seed: int = 0,
    confidence: float = CONFIDENCE,
) -> tuple[float, float]:
    """The bootstrap interval of percentile q over values grouped by prompt: whole groups are drawn, with replacement.

    A resampled percentile is the smallest value that q percent of the weight does not exceed.
    """
    values = np.concatenate([np.asarray(cluster, dtype=np.float64) for cluster in clusters])
    owner = np.repeat(np.arange(len(clusters)), [len(cluster) for cluster in clusters])
    weight = np.ones(len(values)) if weights is None else np.concatenate([np.asarray(w, dtype=np.float64) for w in weights])
    order = np.argsort(values, kind="stable")
    values, owner, weight = values[order], owner[order], weight[order]
    generator = np.random.default_rng(seed)
    drawn = generator.multinomial(len(clusters), np.full(len(clusters), 1 / len(clusters)), size=RESAMPLES // 2)
    found: list[Floats] = []
    step = max(1, BATCH // len(values))
    for start in range(0, len(drawn), step):
        cumulative = np.cumsum(drawn[start : start + step][:, owner] * weight, axis=1)
        enough = cumulative >= cumulative[:, -1:] * (q / 100) - 1e-9
        found.append(values[np.argmax(enough & (cumulative > 0), axis=1)])
    tail = 100 * (1 - confidence) / 2
    low, high = np.percentile(np.concatenate(found), [tail, 100 - tail])
    return float(low), float(high)


def bootstrap_ratio_of_sums(
    pairs: Sequence[tuple[float, float]], *, seed: int = 0, confidence: float = CONFIDENCE
) -> tuple[float, float, float]:
    """(estimate, low, high) of sum(first) / sum(second) over pairs, one per prompt, which are drawn whole. Percentile
    interval.
    """
    counts = np.asarray(pairs, dtype=np.float64)
    if len(counts) == 0 or counts[:, 1].sum() == 0:
        return math.nan, math.nan, math.nan
    generator = np.random.default_rng(seed)
    weights = generator.multinomial(len(counts), np.full(len(counts), 1 / len(counts)), size=RESAMPLES)
    sums = weights @ counts
    ratios = sums[:, 0] / np.maximum(sums[:, 1], 1e-300)
    tail = 100 * (1 - confidence) / 2
    low, high = np.percentile(ratios, [tail, 100 - tail])
    return float(counts[:, 0].sum() / counts[:, 1].sum()), float(low), float(high)
