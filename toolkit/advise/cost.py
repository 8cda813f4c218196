"""What a verify step costs, by batch size and by tokens drafted: measured on the runtime that
serves, or predicted for a GPU.

A step is the draft's forwards, the target's forward over one token more than was drafted, and the
host's work around them. Each is timed in the serving runtime itself over a few steps whose outcome
does not matter, so acceptance, which varies from text to text, adds no noise to it; a sweep that
really speculates needs far longer for the same precision.

A step is taken to cost the lower quartile of its times: another process can only add to them, and
adds to a long step more often than to a short one, so that a median would favour plain decoding on
a busy machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from toolkit.records.advice import StepCost
from toolkit.words import CostSource, Drafter, Role

__all__ = [
    "MEASURED",
    "PREDICTED",
    "QUANTILE",
    "ServingRuntime",
    "StepCosts",
    "StepTimes",
    "batch_sizes",
    "measure",
    "predicted",
]

Floats = NDArray[Any]

MEASURED: Final = "measured"
PREDICTED: Final = "predicted"
QUANTILE = 0.25
PREFILLS = 6  # prompts read in a round


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Nanoseconds of single steps, and of reading one prompt with everything that speculation
    adds to it.
    """

    draft_ns: tuple[int, ...]
    verify_ns: tuple[int, ...]
    host_ns: tuple[int, ...]
    prefill_ns: tuple[int, ...]


class ServingRuntime(Protocol):
    """The runtime that serves, as the advisor needs it. `temperature` 0 is greedy."""

    max_batch_size: int

    def write(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, temperature: float
    ) -> list[tuple[int, ...]]:
        """Plain decoding of all prompts, each up to EOS or max_tokens."""
        ...

    def time_steps(
        self,
        drafter: Drafter,
        prompts: Sequence[Sequence[int]],
        draft_len: int,
        temperature: float,
        steps: int,
    ) -> StepTimes:
        """Steps with all prompts running together and draft_len tokens drafted for each;
        draft_len 0 decodes plainly.
        """
        ...


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Times of one mode of decoding. rows: a step's parts; samples: (batch, draft_len) -> single
    steps, whole.
    """

    source: CostSource
    batches: tuple[int, ...]
    rows: tuple[StepCost, ...]
    samples: dict[tuple[int, int], Floats]
    prefill_ns: dict[
        int, float
    ]  # draft_len 0, and the longest: reading a prompt without and with speculation

    def step_ns(self, batch: int, draft_len: int) -> float:
        return float(np.quantile(self.samples[batch, draft_len], QUANTILE))

    def row(self, batch: int, draft_len: int) -> StepCost:
        return next(row for row in self.rows if (row.batch, row.draft_len) == (batch, draft_len))


def batch_sizes(largest: int) -> tuple[int, ...]:
    """1, 2, 4, ... and the largest itself."""
    sizes = [1]
    while sizes[-1] * 2 < largest:
        sizes.append(sizes[-1] * 2)
    return tuple(sizes) if largest == 1 else (*sizes, largest)


def predicted(
    forward_s: Callable[[Role, int, int], float],
    *,
    drafts: bool,
    draft_lens: Sequence[int],
    batches: Sequence[int],
    prompt_tokens: int,
) -> StepCosts:
    """Costs of hardware that is not here: forward_s(role, batch, tokens of each sequence) in
    seconds, and nothing for the host.

    drafts: a model drafts, one forward per token; looking the text up is free.
    """
    rows, samples = [], {}
    longest = max(draft_lens)
    for batch in batches:
        draft_s = forward_s("draft", batch, 1) if drafts else 0.0
        for length in (0, *draft_lens):
            verify_s = forward_s("target", batch, length + 1)
            rows.append(StepCost(batch, length, 1e3 * length * draft_s, 1e3 * verify_s, 0.0, 0))
            samples[batch, length] = np.array([1e9 * (length * draft_s + verify_s)])
    reading = {0: 1e9 * forward_s("target", 1, prompt_tokens)}
    reading[longest] = reading[0] + (1e9 * forward_s("draft", 1, prompt_tokens) if drafts else 0.0)
    return StepCosts(PREDICTED, tuple(batches), tuple(rows), samples, reading)


def measure(
    runtime: ServingRuntime,
    drafter: Drafter,
    behind: Sequence[Sequence[int]],
    prompts: Sequence[Sequence[int]],
    *,
    draft_lens: Sequence[int],
    batches: Sequence[int],
    temperature: float,
    rounds: int,
    steps: int,
) -> StepCosts:
    """Time every (batch, draft_len) behind sequences as long as an average step finds, and the
    reading of `prompts`.

    In rounds that go through all of them, so that a slow moment of the machine hits all alike.
    """
    found: dict[tuple[int, int], list[StepTimes]] = {}
    longest = max(draft_lens, default=0)
    prefill: dict[int, list[int]] = {0: [], longest: []}
    for number in range(rounds):
        for batch in batches:
            some = [behind[(number * batch + index) % len(behind)] for index in range(batch)]
            for draft_len in (0, *draft_lens):
                times = runtime.time_steps(drafter, some, draft_len, temperature, steps)
                found.setdefault((batch, draft_len), []).append(times)
        for prompt in prompts[number::rounds][:PREFILLS]:
            for draft_len, seen in prefill.items():
                seen += runtime.time_steps(drafter, [prompt], draft_len, temperature, 0).prefill_ns
    rows, samples = [], {}
    for (batch, draft_len), rounds_of in found.items():
        parts = np.array(
            [
                [t for each in rounds_of for t in getattr(each, part)]
                for part in ("draft_ns", "verify_ns", "host_ns")
            ]
        )
        samples[batch, draft_len] = parts.sum(axis=0).astype(np.float64)
        draft_ms, verify_ms, host_ms = (
            float(part) / 1e6 for part in np.quantile(parts, QUANTILE, axis=1)
        )
        rows.append(StepCost(batch, draft_len, draft_ms, verify_ms, host_ms, parts.shape[1]))
    return StepCosts(
        MEASURED,
        tuple(batches),
        tuple(rows),
        samples,
        {length: float(np.quantile(seen, QUANTILE)) for length, seen in prefill.items()},
    )
