"""Percentiles, and bootstrap intervals that say how certain a measured figure is.

Arrays go in, numbers come out. Whole prompts are drawn, never single tokens, since the tokens of
one text are equally hard to draft. Rounds are drawn too, independently of the prompts, and both are
crossed. So neither a lucky prompt nor a quiet round decides the figure (Owen 2007, the pigeonhole
bootstrap; its intervals are rather too wide than too narrow). Intervals are two-sided percentile
intervals at CONFIDENCE. A fixed seed makes a report repeatable from its measurements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "CONFIDENCE",
    "SAMPLES_BEYOND",
    "bootstrap_percentile_ratios",
    "bootstrap_percentiles",
    "bootstrap_ratio",
    "bootstrap_ratio_of_sums",
    "bootstrap_unpaired_ratio",
    "interval",
    "percentile",
    "resampled",
    "samples_needed",
    "times_drawn",
]

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
Estimate: TypeAlias = tuple[float, float, float]  # (estimate, low end, high end)
# [round][prompt] -> (value, weight) of every sample
Samples: TypeAlias = Sequence[Sequence[Sequence[tuple[float, int]]]]

CONFIDENCE = 0.95
RESAMPLES = 2000
PERCENTILE_RESAMPLES = 1000  # fewer, since each needs a cumulative sum over all sorted samples
SAMPLES_BEYOND = 10  # samples beyond a percentile that is printed: p50 needs 20, p90 100, p99 1000
MAX_BATCH_NUMBERS = 2_000_000  # numbers in one vectorised batch of resamples


def samples_needed(q: float) -> int:
    """The fewest samples that support percentile q (in percent); SAMPLES_BEYOND lie beyond it."""
    return math.ceil(SAMPLES_BEYOND / (1 - q / 100) - 1e-9)


def percentile(
    values: Sequence[float] | Floats, q: float, weights: Sequence[int] | None = None
) -> float:
    """The linear percentile of numpy, with each value repeated as often as its weight says.

    q: in percent. values: not empty.
    """
    expanded = np.asarray(values, dtype=np.float64)
    if weights is not None:
        expanded = np.repeat(expanded, weights)
    return float(np.percentile(expanded, q))


# The parts of every bootstrap.


def times_drawn(generator: np.random.Generator, count: int, resamples: int = RESAMPLES) -> Counts:
    """How often each of `count` things is drawn in `count` draws: [resamples, count]."""
    return generator.multinomial(count, np.full(count, 1 / count), size=resamples)


def resampled(generator: np.random.Generator, values: Floats, resamples: int = RESAMPLES) -> Floats:
    """Draw as many values as there are, with replacement: [resamples, len(values)]."""
    drawn: Floats = values[generator.integers(len(values), size=(resamples, len(values)))]
    return drawn


def interval(figures: Floats) -> tuple[float, float]:
    """The ends of the percentile interval, from the figures of all resamples.

    A resample from which the figure cannot be computed is NaN and is left out. If none is left,
    both ends are NaN.
    """
    known = figures[~np.isnan(figures)]
    if len(known) == 0:
        return math.nan, math.nan
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(known, [tail, 100 - tail])
    return float(low), float(high)


# Ratios of sums.


def bootstrap_ratio_of_sums(above: Any, below: Any, *, seed: int = 0) -> Estimate:
    """sum(above) / sum(below); NaN if sum(below) is 0.

    Both are [prompts] or [rounds, prompts]. Entries at the same place belong together and are drawn
    together.
    """
    if np.sum(below) == 0:
        return math.nan, math.nan, math.nan
    totals, drawn = _crossed_sums((above, below), seed)
    # If the sum below is 0 in a resample, so is the sum above, and the ratio counts as 0.
    low, high = interval(drawn[0] / np.maximum(drawn[1], 1e-300))
    return float(totals[0] / totals[1]), low, high


def bootstrap_ratio(tokens: tuple[Any, Any], times: tuple[Any, Any], *, seed: int = 0) -> Estimate:
    """(tokens[0] / times[0]) / (tokens[1] / times[1]), each array summed first.

    All four arrays are [rounds, prompts]. An entry of arm 0 is paired with the same entry of arm 1,
    and they are drawn together.
    """
    totals, drawn = _crossed_sums((tokens[0], times[0], tokens[1], times[1]), seed)
    # In a resample, all prompts may be failed ones, and all sums 0.
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = (drawn[0] / drawn[1]) / (drawn[2] / drawn[3])
    low, high = interval(ratios)
    return float((totals[0] / totals[1]) / (totals[2] / totals[3])), low, high


def bootstrap_unpaired_ratio(
    tokens: tuple[Any, Any], times: tuple[Any, Any], *, seed: int = 0
) -> Estimate:
    """The same ratio for arms that share no prompts; the answers of each arm are drawn separately.

    Single answers are drawn, regardless of prompt and round. tokens[arm] and times[arm] are
    [answers of that arm].
    """
    generator = np.random.default_rng(seed)
    rates, drawn_rates = [], []
    for arm_tokens, arm_times in zip(tokens, times, strict=True):
        sums = np.stack([np.asarray(a, dtype=np.float64) for a in (arm_tokens, arm_times)])
        drawn = times_drawn(generator, sums.shape[1]) @ sums.T  # [resamples, 2]
        rates.append(sums[0].sum() / sums[1].sum())
        drawn_rates.append(drawn[:, 0] / drawn[:, 1])
    low, high = interval(drawn_rates[0] / drawn_rates[1])
    return float(rates[0] / rates[1]), low, high


def _crossed_sums(arrays: Sequence[Any], seed: int) -> tuple[Floats, Floats]:
    """The sums [k] and resampled sums [k, resamples] of k arrays that share prompts and rounds."""
    stacked = np.stack([np.atleast_2d(np.asarray(array, dtype=np.float64)) for array in arrays])
    _, rounds, prompts = stacked.shape
    generator = np.random.default_rng(seed)
    of_rounds, of_prompts = times_drawn(generator, rounds), times_drawn(generator, prompts)
    drawn = np.einsum("br,krp,bp->kb", of_rounds, stacked, of_prompts, optimize=True)
    return stacked.sum(axis=(1, 2)), drawn


# Percentiles.


def bootstrap_percentiles(
    clusters: Sequence[Sequence[float]],
    qs: Sequence[float],
    weights: Sequence[Sequence[int]] | None = None,
    *,
    seed: int = 0,
) -> tuple[tuple[float, float], ...]:
    """The interval of each percentile in qs, for values grouped by prompt; whole groups are drawn.

    A resampled percentile is the smallest value at or below which q percent of the weight lies.
    """
    values = np.concatenate([np.asarray(cluster, dtype=np.float64) for cluster in clusters])
    owner = np.repeat(np.arange(len(clusters)), [len(cluster) for cluster in clusters])
    weight = np.ones(len(values))
    if weights is not None:
        weight = np.concatenate([np.asarray(group, dtype=np.float64) for group in weights])
    drawn = times_drawn(np.random.default_rng(seed), len(clusters), PERCENTILE_RESAMPLES)
    figures = _resampled_percentiles(values, weight, qs, lambda part: drawn[part][:, owner])
    return tuple(interval(row) for row in figures)


def bootstrap_percentile_ratios(
    first: Samples,
    second: Samples,
    qs: Sequence[float],
    *,
    paired: bool = True,
    seed: int = 0,
) -> tuple[tuple[float, float], ...]:
    """The interval of percentile(first) / percentile(second) for every q.

    paired: both arms ran the same prompts in the same rounds, so both get the same draws, and noise
    that they share cancels. An interval is NaN if a percentile in the denominator is zero.

    Raises ValueError if paired arms differ in rounds or prompts.
    """
    generator = np.random.default_rng(seed)
    draws = [_crossed_draw(generator, first), _crossed_draw(generator, second)]
    if paired:
        if (len(first), len(first[0])) != (len(second), len(second[0])):
            raise ValueError("arms with different rounds or prompts cannot be paired")
        draws[1] = draws[0]
    arms = [
        _resampled_percentiles(*_flat(samples, rounds, prompts, qs))
        for samples, (rounds, prompts) in zip((first, second), draws, strict=True)
    ]
    with np.errstate(divide="ignore", invalid="ignore"):  # a percentile of zero
        ratios = [above / below for above, below in zip(*arms, strict=True)]
    return tuple(
        (math.nan, math.nan) if np.isinf(ratio).any() else interval(ratio) for ratio in ratios
    )


def _flat(
    samples: Samples, rounds: Counts, prompts: Counts, qs: Sequence[float]
) -> tuple[Any, Any, Any, Any]:
    """The arguments of `_resampled_percentiles`, from samples and from how often their rounds and
    prompts are drawn.
    """
    flat = [
        (r, p, value, weight)
        for r, row in enumerate(samples)
        for p, group in enumerate(row)
        for value, weight in group
    ]
    of_round, of_prompt, values, weights = (
        np.asarray(column) for column in zip(*flat, strict=True)
    )

    def times_drawn_of(part: slice) -> Any:
        return rounds[part][:, of_round] * prompts[part][:, of_prompt]

    return values.astype(np.float64), weights.astype(np.float64), qs, times_drawn_of


def _crossed_draw(generator: np.random.Generator, samples: Samples) -> tuple[Counts, Counts]:
    """How often each round and each prompt is drawn: [resamples, rounds], [resamples, prompts]."""
    rounds = times_drawn(generator, len(samples), PERCENTILE_RESAMPLES)
    return rounds, times_drawn(generator, len(samples[0]), PERCENTILE_RESAMPLES)


def _resampled_percentiles(
    values: Floats, weight: Floats, qs: Sequence[float], times_drawn_of: Callable[[slice], Any]
) -> list[Floats]:
    """Percentiles of values, weighted by weight and by how often each is drawn; one row per q.

    A resample without any sample gives NaN. That happens with few prompts, if each lacks samples in
    some round.
    """
    order = np.argsort(values, kind="stable")
    values, weight = values[order], weight[order]
    rows: list[list[Floats]] = [[] for _ in qs]
    step = max(1, MAX_BATCH_NUMBERS // len(values))
    for start in range(0, PERCENTILE_RESAMPLES, step):
        part = slice(start, start + step)
        cumulative = np.cumsum(times_drawn_of(part)[:, order] * weight, axis=1)
        total = cumulative[:, -1:]
        for row, q in zip(rows, qs, strict=True):
            is_reached = (cumulative >= total * (q / 100) - 1e-9) & (cumulative > 0)
            reached = np.argmax(is_reached, axis=1)
            row.append(np.where(total[:, 0] > 0, values[reached], np.nan))
    return [np.concatenate(row) for row in rows]
