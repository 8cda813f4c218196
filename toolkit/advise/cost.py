"""Measure or predict the cost of a verify step, by batch size and number of drafted tokens.

There are three ways: time the runtime in this process, combine what a client timed on the server of
another engine, or predict for hardware that is not here.

A step consists of the draft's forwards, the target's forward over one token more than was drafted,
and the host's work around them. The serving runtime itself times each part over a few steps whose
outcome does not matter. So acceptance, which varies from text to text, adds no noise; a sweep that
really speculates would take far longer for the same precision.

The cost of a step is the lower quartile of its times. Another process can only add time, and it
adds to a long step more often than to a short one, so a median would favour plain decoding on a
busy machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    "SERVED",
    "ServedSteps",
    "ServedTimes",
    "ServingRuntime",
    "StepCosts",
    "StepTimes",
    "batch_sizes",
    "measure_costs",
    "predict_costs",
    "served_costs",
]

Floats = NDArray[Any]

MEASURED: Final = "measured"
SERVED: Final = "measured on the server"
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


@dataclass(frozen=True, slots=True)
class ServedSteps:
    """Whole steps of a server with one batch size, by wave: requests that ran at the same time.

    step_ns [waves]: nanoseconds of an average step. drafted [waves]: tokens that it drafted for
    each request.
    """

    step_ns: Floats
    drafted: Floats


@dataclass(frozen=True, slots=True)
class ServedTimes:
    """What a client timed on one server. steps: by batch size. first_token_ns [requests]: from
    sending to the first token, of requests that ran alone.
    """

    steps: Mapping[int, ServedSteps]
    first_token_ns: Floats


def served_costs(
    plain: ServedTimes, speculating: Sequence[ServedTimes], *, draft_lens: Sequence[int]
) -> StepCosts:
    """Costs of every draft length, from servers that ran some of them.

    plain: the server without speculation. speculating: the others, by growing draft length.
    Between and beyond what they drafted, a step's time is linear in the drafted tokens; it never
    falls, so noise is not taken for a gain. A server does not divide its steps: what a step takes
    beyond the plain one is the draft's, and nothing is the host's.
    """
    rows, samples = [], {}
    for batch, steps in plain.steps.items():
        plain_ms = float(np.quantile(steps.step_ns, QUANTILE)) / 1e6
        points = [(0.0, steps.step_ns)]
        for times in speculating:
            drafted = float(np.mean(times.steps[batch].drafted))
            points.append((drafted, times.steps[batch].step_ns))
        for length in (0, *draft_lens):
            step_ns = _on_the_line(points, length)
            step_ms = float(np.quantile(step_ns, QUANTILE)) / 1e6
            samples[batch, length] = step_ns
            rows.append(
                StepCost(batch, length, step_ms - plain_ms, plain_ms, 0.0, len(steps.step_ns))
            )
    longest = speculating[-1]
    reading = {
        0: float(np.quantile(plain.first_token_ns, QUANTILE)),
        max(draft_lens): float(np.quantile(longest.first_token_ns, QUANTILE)),
    }
    return StepCosts(SERVED, tuple(plain.steps), tuple(rows), samples, reading)


def _on_the_line(points: Sequence[tuple[float, Floats]], length: int) -> Floats:
    """The times of a step that drafts `length` tokens: on the line through the two points around
    it, or the last two. points: (drafted tokens, times [waves]) with growing numbers.

    Where nothing was drafted (prompt lookup in texts without repeats), the last times stand for
    every length.
    """
    if length == 0:
        return points[0][1]
    right = next(
        (index for index, (drafted, _) in enumerate(points) if drafted >= length), len(points) - 1
    )
    (fewer, low_ns), (more, high_ns) = points[right - 1], points[right]
    if more <= fewer:
        return high_ns
    if np.quantile(high_ns, QUANTILE) <= np.quantile(low_ns, QUANTILE):
        return low_ns
    line: Floats = low_ns + (high_ns - low_ns) * ((length - fewer) / (more - fewer))
    return line
