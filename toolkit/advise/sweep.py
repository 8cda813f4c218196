"""Really speculating, to set a measurement beside a prediction: the same prompts with every draft length, interleaved and
paired.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["RunningRuntime", "paired_ratio", "sweep"]

Floats = NDArray[Any]

RESAMPLES = 2000
GROUP = 4  # prompts of a group per request that is served at once: long enough that the ends of a group weigh little


class RunningRuntime(Protocol):
    def serve_ns(
        self,
        drafter: str,
        prompts: Sequence[Sequence[int]],
        draft_len: int,
        max_tokens: int,
        temperature: float,
        *,
        batch: int,
    ) -> int:
        """Nanoseconds to serve all prompts, `batch` of them at a time; draft_len 0 decodes plainly."""
        ...


def sweep(
    runtime: RunningRuntime,
    drafter: str,
    prompts: Sequence[Sequence[int]],
    *,
    draft_lens: Sequence[int],
    batch: int,
    max_tokens: int,
    temperature: float,
    rounds: int,
    seed: int = 0,
) -> dict[int, Floats]:
    """Draft length -> nanoseconds [rounds, groups of prompts]. Within a group the lengths come in random order."""
    size = 1 if batch == 1 else GROUP * batch
    groups = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    times = {length: np.zeros((rounds, len(groups))) for length in draft_lens}
    order, generator = list(draft_lens), random.Random(seed)
    for number in range(rounds):
        for index, group in enumerate(groups):
            generator.shuffle(order)
            for length in order:
                times[length][number, index] = runtime.serve_ns(drafter, group, length, max_tokens, temperature, batch=batch)
    return times


def paired_ratio(before: Floats, after: Floats, *, confidence: float = 0.95, seed: int = 0) -> tuple[float, float, float]:
    """(estimate, low, high) of the sum of `before` over that of `after`, pairs drawn with replacement: groups and rounds
    crossed.
    """
    generator = np.random.default_rng(seed)
    rounds, groups = before.shape
    by_round = generator.multinomial(rounds, np.full(rounds, 1 / rounds), size=RESAMPLES)
    by_group = generator.multinomial(groups, np.full(groups, 1 / groups), size=RESAMPLES)
    ratios = np.einsum("br,rg,bg->b", by_round, before, by_group) / np.einsum("br,rg,bg->b", by_round, after, by_group)
    tail = 100 * (1 - confidence) / 2
    low, high = np.percentile(ratios, [tail, 100 - tail])
    return float(before.sum() / after.sum()), float(low), float(high)
