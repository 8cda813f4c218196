"""Measure draft lengths by really speculating, to compare a measurement with a prediction.

Every draft length serves the same prompts. The lengths alternate, so their times are paired.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from toolkit.words import Drafter

__all__ = ["RunningRuntime", "sweep"]

Floats = NDArray[Any]

# Prompts in a group per concurrent request: enough that the end of a group, where fewer requests
# run together, weighs little.
GROUP_PROMPTS_PER_REQUEST = 4


class RunningRuntime(Protocol):
    """A runtime that can serve prompts and time it."""

    def serve_ns(
        self,
        drafter: Drafter,
        prompts: Sequence[Sequence[int]],
        draft_len: int,
        max_tokens: int,
        temperature: float,
        *,
        batch: int,
    ) -> int:
        """Serve all prompts, `batch` at a time, and return the nanoseconds it took.

        draft_len 0 decodes plainly.
        """
        ...


def sweep(
    runtime: RunningRuntime,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    draft_lens: Sequence[int],
    batch: int,
    max_tokens: int,
    temperature: float,
    rounds: int,
    seed: int = 0,
) -> dict[int, Floats]:
    """Nanoseconds [rounds, groups of prompts] of every draft length.

    Within a group the lengths run in random order.
    """
    size = 1 if batch == 1 else GROUP_PROMPTS_PER_REQUEST * batch
    groups = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    times = {length: np.zeros((rounds, len(groups))) for length in draft_lens}
    order, generator = list(draft_lens), random.Random(seed)
    for number in range(rounds):
        for index, group in enumerate(groups):
            generator.shuffle(order)
            for length in order:
                times[length][number, index] = runtime.serve_ns(
                    drafter, group, length, max_tokens, temperature, batch=batch
                )
    return times
