"""Measure or predict the cost of a verify step, by batch size and number of drafted tokens.

A step consists of the draft's forwards, the target's forward over one token more than was drafted,
and the host's work around them. The serving runtime itself times each part over a few steps whose
outcome does not matter. So acceptance, which varies from text to text, adds no noise; a sweep that
really speculates would take far longer for the same precision.

The cost of a step is the lower quartile of its times. Another process can only add time, and it
adds to a long step more often than to a short one, so a median would favour plain decoding on a
busy machine.
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
    "measure_costs",
    "predict_costs",
]

Floats = NDArray[Any]

MEASURED: Final = "measured"
PREDICTED: Final = "predicted"
QUANTILE = 0.25
MAX_PREFILLS = 6  # prompts read in a round


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Nanoseconds of single steps by part, and of reading one prompt; if there is speculation,
    reading includes everything that speculation adds to it.
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
        """Decode all prompts plainly, each up to EOS or max_tokens."""
        ...

    def time_steps(
        self,
        drafter: Drafter,
        prompts: Sequence[Sequence[int]],
        draft_len: int,
        temperature: float,
        steps: int,
    ) -> StepTimes:
        """Time steps in which all prompts run together and each has draft_len tokens drafted.

        draft_len 0 decodes plainly.
        """
        ...


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The costs of one mode of decoding.

    rows: the parts of a step. samples: nanoseconds of single whole steps by (batch, draft_len).
    prefill_ns: nanoseconds of reading a prompt without speculation (key 0) and with it (the longest
    draft length as key).
    """

    source: CostSource
    batches: tuple[int, ...]
    rows: tuple[StepCost, ...]
    samples: dict[tuple[int, int], Floats]
    prefill_ns: dict[int, float]

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


def predict_costs(
    forward_s: Callable[[Role, int, int], float],
    *,
    has_draft_model: bool,
    draft_lens: Sequence[int],
    batches: Sequence[int],
    prompt_tokens: int,
) -> StepCosts:
    """Predict costs for hardware that is not here; the host's work is taken to cost nothing.

    forward_s(role, batch, tokens of each sequence): seconds of a forward. has_draft_model: whether
    a model drafts, with one forward per token; prompt lookup costs nothing.
    """
    rows, samples = [], {}
    longest = max(draft_lens)
    for batch in batches:
        draft_s = forward_s("draft", batch, 1) if has_draft_model else 0.0
        for length in (0, *draft_lens):
            verify_s = forward_s("target", batch, length + 1)
            rows.append(StepCost(batch, length, 1e3 * length * draft_s, 1e3 * verify_s, 0.0, 0))
            samples[batch, length] = np.array([1e9 * (length * draft_s + verify_s)])
    reading = {0: 1e9 * forward_s("target", 1, prompt_tokens)}
    reading[longest] = reading[0] + (
        1e9 * forward_s("draft", 1, prompt_tokens) if has_draft_model else 0.0
    )
    return StepCosts(PREDICTED, tuple(batches), tuple(rows), samples, reading)


def measure_costs(
    runtime: ServingRuntime,
    drafter: Drafter,
    prefixes: Sequence[Sequence[int]],
    prompts: Sequence[Sequence[int]],
    *,
    draft_lens: Sequence[int],
    batches: Sequence[int],
    temperature: float,
    rounds: int,
    steps: int,
) -> StepCosts:
    """Time steps of every (batch, draft_len) after `prefixes`, and the reading of `prompts`.

    prefixes: sequences as long as they are in an average step. Every round goes through all
    combinations, so a slow moment of the machine affects all of them alike.
    """
    times_of: dict[tuple[int, int], list[StepTimes]] = {}
    longest = max(draft_lens, default=0)
    prefill: dict[int, list[int]] = {0: [], longest: []}
    for number in range(rounds):
        for batch in batches:
            sequences = [
                prefixes[(number * batch + index) % len(prefixes)] for index in range(batch)
            ]
            for draft_len in (0, *draft_lens):
                times = runtime.time_steps(drafter, sequences, draft_len, temperature, steps)
                times_of.setdefault((batch, draft_len), []).append(times)
        for prompt in prompts[number::rounds][:MAX_PREFILLS]:
            for draft_len, prefill_ns in prefill.items():
                times = runtime.time_steps(drafter, [prompt], draft_len, temperature, 0)
                prefill_ns += times.prefill_ns
    rows, samples = [], {}
    for (batch, draft_len), times_by_round in times_of.items():
        parts = np.array(
            [
                [step_ns for times in times_by_round for step_ns in getattr(times, part)]
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
        {length: float(np.quantile(times_ns, QUANTILE)) for length, times_ns in prefill.items()},
    )
