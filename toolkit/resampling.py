"""How sure a measured figure is: percentiles, and bootstrap intervals of all that is measured.

Pure: arrays in, numbers out. Whole prompts are drawn, never single tokens, since the tokens of one
text share its difficulty. Rounds are drawn too, independently of the prompts, and both are crossed,
so that neither a lucky prompt nor a quiet round is taken for the rule (Owen 2007, the pigeonhole
bootstrap; errs on the wide side). Intervals are percentile intervals, two-sided at CONFIDENCE; a
fixed seed makes a report repeatable from its measurements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "BEYOND",
    "CONFIDENCE",
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
PERCENTILE_RESAMPLES = 1000  # each adds up all samples in order, which takes longer than a sum
BEYOND = 10  # samples beyond a percentile that we print: p50 needs 20, p90 100, p99 1000
BATCH_NUMBERS = 2_000_000  # at most, of one vectorised batch of resamples


def samples_needed(q: float) -> int:
    """The fewest samples that support percentile q (in percent): BEYOND of them lie beyond it."""
    return math.ceil(BEYOND / (1 - q / 100) - 1e-9)


def percentile(
    values: Sequence[float] | Floats, q: float, weights: Sequence[int] | None = None
) -> float:
    """numpy's linear percentile of values, each repeated by its weight.

    q in percent; values must not be empty.
    """
    expanded = np.asarray(values, dtype=np.float64)
    if weights is not None:
        expanded = np.repeat(expanded, weights)
    return float(np.percentile(expanded, q))


# What every bootstrap is made of.


def times_drawn(generator: np.random.Generator, count: int, resamples: int = RESAMPLES) -> Counts:
    """[resamples, count]: how often each of `count` things is drawn, of `count` draws."""
    return generator.multinomial(count, np.full(count, 1 / count), size=resamples)


def resampled(generator: np.random.Generator, values: Floats, resamples: int = RESAMPLES) -> Floats:
    """[resamples, len(values)]: the values themselves, as many as there are, with replacement."""
    drawn: Floats = values[generator.integers(len(values), size=(resamples, len(values)))]
    return drawn


def interval(figures: Floats) -> tuple[float, float]:
    """The ends of the percentile interval of a figure that was computed from every resample.

    A resample that left nothing to compute from is NaN, and is left out; both ends are NaN where
    none is left.
    """
    known = figures[~np.isnan(figures)]
    if len(known) == 0:
        return math.nan, math.nan
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(known, [tail, 100 - tail])
    return float(low), float(high)


# Ratios of sums.


def bootstrap_ratio_of_sums(above: Any, below: Any, *, seed: int = 0) -> Estimate:
    """sum(above) / sum(below), NaN where there is nothing below.

    Both are [prompts], or [rounds, prompts]; an entry of one belongs to the same entry of the
    other, and they are drawn together.
    """
    if np.sum(below) == 0:
        return math.nan, math.nan, math.nan
    totals, drawn = _crossed_sums((above, below), seed)
    # A draw of nothing but prompts without anything below has nothing above, and counts as 0.
    low, high = interval(drawn[0] / np.maximum(drawn[1], 1e-300))
    return float(totals[0] / totals[1]), low, high


def bootstrap_ratio(tokens: tuple[Any, Any], times: tuple[Any, Any], *, seed: int = 0) -> Estimate:
    """(tokens[0] / times[0]) / (tokens[1] / times[1]), each summed first.

    All four arrays are [rounds, prompts]; an entry of arm 0 pairs with the same entry of arm 1, and
    they are drawn together.
    """
    totals, drawn = _crossed_sums((tokens[0], times[0], tokens[1], times[1]), seed)
    with np.errstate(
        divide="ignore", invalid="ignore"
    ):  # a draw of nothing but prompts that failed
        ratios = (drawn[0] / drawn[1]) / (drawn[2] / drawn[3])
    low, high = interval(ratios)
    return float((totals[0] / totals[1]) / (totals[2] / totals[3])), low, high


def bootstrap_unpaired_ratio(
    tokens: tuple[Any, Any], times: tuple[Any, Any], *, seed: int = 0
) -> Estimate:
    """The same of arms that share nothing: the answers of each are drawn on their own.

    An answer is a unit here, whatever its prompt and round; tokens[arm] and times[arm] are
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
    """(sums, resampled sums) of k arrays that share prompts and rounds: [k] and [k, resamples]."""
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
    """The intervals of percentiles qs over values grouped by prompt: whole groups are drawn.

    A resampled percentile is the smallest value that q percent of the weight does not exceed.
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
    """The intervals of percentile(first) / percentile(second) for every q.

    paired: both arms ran the same prompts in the same rounds, so both get the same draw; what they
    share cancels. An interval is NaN where a percentile of zero was in a denominator.
    """
    generator = np.random.default_rng(seed)
    draws = [_crossed_draw(generator, first), _crossed_draw(generator, second)]
    if paired:
        if (len(first), len(first[0])) != (len(second), len(second[0])):
            raise ValueError("arms of different rounds or prompts cannot be paired")
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
    """What `_resampled_percentiles` takes, for samples and how often their rounds and prompts are
    drawn.
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
    """How often each round and each prompt is drawn."""
    rounds = times_drawn(generator, len(samples), PERCENTILE_RESAMPLES)
    return rounds, times_drawn(generator, len(samples[0]), PERCENTILE_RESAMPLES)


def _resampled_percentiles(
    values: Floats, weight: Floats, qs: Sequence[float], times_drawn_of: Callable[[slice], Any]
) -> list[Floats]:
    """Percentiles of values, weighted by weight and by how often each was drawn; one row per q.

    A draw that left nothing has no percentile: few prompts, each without a sample in some round.
    """
    order = np.argsort(values, kind="stable")
    values, weight = values[order], weight[order]
    rows: list[list[Floats]] = [[] for _ in qs]
    step = max(1, BATCH_NUMBERS // len(values))
    for start in range(0, PERCENTILE_RESAMPLES, step):
        part = slice(start, start + step)
        cumulative = np.cumsum(times_drawn_of(part)[:, order] * weight, axis=1)
        total = cumulative[:, -1:]
        for row, q in zip(rows, qs, strict=True):
            is_reached = (cumulative >= total * (q / 100) - 1e-9) & (cumulative > 0)
            reached = np.argmax(is_reached, axis=1)
            row.append(np.where(total[:, 0] > 0, values[reached], np.nan))
    return [np.concatenate(row) for row in rows]
