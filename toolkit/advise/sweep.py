"""Really speculating, to set a measurement beside a prediction: the same prompts with every draft
length, interleaved and paired.
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

# prompts of a group per request that is served at once: long enough that the ends of a group weigh
# little
GROUP = 4


class RunningRuntime(Protocol):
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
        """Nanoseconds to serve all prompts, `batch` of them at a time; draft_len 0 decodes
        plainly.
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
    """Draft length -> nanoseconds [rounds, groups of prompts]. Within a group the lengths come
    in random order.
    """
    size = 1 if batch == 1 else GROUP * batch
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
