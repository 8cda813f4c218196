"""How sure a measured figure is: weighted percentiles and bootstrap intervals. Pure: arrays in, numbers out.

Intervals are two-sided at CONFIDENCE. Resampling takes whole prompts, never single tokens, since the
tokens of one text share its difficulty; a fixed seed makes a report repeatable from its measurements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "CONFIDENCE",
    "TOO_FEW",
    "bootstrap_percentile_ratios",
    "bootstrap_percentiles",
    "bootstrap_ratio",
    "bootstrap_ratio_of_sums",
    "percentile",
    "unsupported",
]

Floats = NDArray[np.float64]
Samples: TypeAlias = Sequence[Sequence[Sequence[tuple[float, int]]]]  # [round][prompt] -> (value, weight) of every sample

CONFIDENCE = 0.95
RESAMPLES = 2000
BEYOND = 10  # samples that have to lie beyond a percentile before we print it: 20 for p50, 100 for p90, 1000 for p99
BATCH = 2_000_000  # most numbers of one vectorised resampling batch


TOO_FEW = " needs "  # is in every reason that `unsupported` gives, and in no other for which there is no figure


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


def bootstrap_percentiles(
    clusters: Sequence[Sequence[float]],
    qs: Sequence[float],
    weights: Sequence[Sequence[int]] | None = None,
    *,
    seed: int = 0,
    confidence: float = CONFIDENCE,
) -> tuple[tuple[float, float], ...]:
    """The bootstrap intervals of percentiles qs over values grouped by prompt: whole groups are drawn, with replacement.

    A resampled percentile is the smallest value that q percent of the weight does not exceed.
    """
    values = np.concatenate([np.asarray(cluster, dtype=np.float64) for cluster in clusters])
    owner = np.repeat(np.arange(len(clusters)), [len(cluster) for cluster in clusters])
    weight = np.ones(len(values)) if weights is None else np.concatenate([np.asarray(w, dtype=np.float64) for w in weights])
    generator = np.random.default_rng(seed)
    drawn = generator.multinomial(len(clusters), np.full(len(clusters), 1 / len(clusters)), size=RESAMPLES // 2)
    found = _resampled_percentiles(values, weight, qs, lambda part: drawn[part][:, owner])
    return tuple(_interval(row, confidence) for row in found)


def bootstrap_percentile_ratios(
    first: Samples,
    second: Samples,
    qs: Sequence[float],
    *,
    paired: bool = True,
    seed: int = 0,
    confidence: float = CONFIDENCE,
) -> tuple[tuple[float, float], ...]:
    """The bootstrap intervals of percentile(first) / percentile(second) for every q.

    Samples are [round][prompt] lists of (value, weight). As in `bootstrap_ratio`, prompts and rounds are drawn independently
    and crossed. paired: both arms ran the same prompts in the same rounds, so both get the same draw; what they share cancels.
    An interval that a percentile of zero is in the denominator of is not finite.
    """
    generator = np.random.default_rng(seed)
    draws = [_crossed_draw(generator, first), _crossed_draw(generator, second)]
    if paired:
        if (len(first), len(first[0])) != (len(second), len(second[0])):
            raise ValueError("arms of different rounds or prompts cannot be paired")
        draws[1] = draws[0]
    resampled = [
        _resampled_percentiles(*_flat(samples, rounds, prompts, qs))
        for samples, (rounds, prompts) in zip((first, second), draws, strict=True)
    ]
    with np.errstate(divide="ignore", invalid="ignore"):  # percentiles of zero, for those who divide by them
        ratios = [above / below for above, below in zip(*resampled, strict=True)]
    return tuple(_interval(ratio, confidence) for ratio in ratios)


def _flat(samples: Samples, rounds: Any, prompts: Any, qs: Sequence[float]) -> tuple[Any, Any, Any, Any]:
    """What `_resampled_percentiles` takes, for samples and how often their rounds and prompts are drawn."""
    flat = [(r, p, v, w) for r, one in enumerate(samples) for p, group in enumerate(one) for v, w in group]
    of_round, of_prompt, values, weights = (np.asarray(column) for column in zip(*flat, strict=True))

    def times_drawn(part: slice) -> Any:
        return rounds[part][:, of_round] * prompts[part][:, of_prompt]

    return values.astype(np.float64), weights.astype(np.float64), qs, times_drawn


def _crossed_draw(generator: np.random.Generator, samples: Samples) -> tuple[Any, Any]:
    """How often each round and each prompt is drawn: two arrays, [resamples, rounds] and [resamples, prompts]."""
    counts = (len(samples), len(samples[0]))
    return tuple(generator.multinomial(n, np.full(n, 1 / n), size=RESAMPLES // 2) for n in counts)  # type: ignore[return-value]


def _resampled_percentiles(
    values: Floats, weight: Floats, qs: Sequence[float], times_drawn: Callable[[slice], Any]
) -> list[Floats]:
    """Percentiles of values whose weights are multiplied by how often each was drawn; one row per q.

    A draw that left nothing has no percentile, and is left out: few prompts, each of them without a sample in some round.
    """
    order = np.argsort(values, kind="stable")
    values, weight = values[order], weight[order]
    found: list[list[Floats]] = [[] for _ in qs]
    step = max(1, BATCH // len(values))
    for start in range(0, RESAMPLES // 2, step):
        cumulative = np.cumsum(times_drawn(slice(start, start + step))[:, order] * weight, axis=1)
        total = cumulative[:, -1:]
        for row, q in zip(found, qs, strict=True):
            reached = np.argmax((cumulative >= total * (q / 100) - 1e-9) & (cumulative > 0), axis=1)
            row.append(np.where(total[:, 0] > 0, values[reached], np.nan))
    return [np.concatenate(row) for row in found]


def _interval(resampled: Floats, confidence: float) -> tuple[float, float]:
    tail = 100 * (1 - confidence) / 2
    if not np.isfinite(resampled[~np.isnan(resampled)]).all() or np.isnan(resampled).all():
        return math.nan, math.nan
    low, high = np.nanpercentile(resampled, [tail, 100 - tail])
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
