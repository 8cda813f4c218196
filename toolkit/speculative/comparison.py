"""What plain steps of a batch and those with drafts take beside each other.

The figures of `costs` are off by 5 to 10 %: they are medians of single steps, told in moments
apart, while other programs slow reading weights more than the arithmetic that drafts add. What is
at stake in a batch is no more than that. So behind every trial (`trials`) steps of both ways are
compared as they came, with the tail that a median leaves out. Each is taken by what its figures say
for its rows, its drafts and the prompts that it reads, so that steps of other requests, and of
other lengths, compare. What is left, the mean of one way over that of the other, corrects the
figures of plain steps at this load.

Pure, and only of Python's standard library.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from toolkit.speculative.trials import UNSETTLED_STEPS, load_of

__all__ = ["ComparedCosts", "ComparedStep", "Comparison"]

# Of each way, that are compared: of the trial at least, and of what follows it. A batch that drafts
# has up to GIVEN_UP_STEPS of them.
LEAST_STEPS, MOST_STEPS = 6, 16
UNSETTLED_DRAFTS = 2  # the draft has to read what it missed, and its weights come into the caches
GIVEN_UP_STEPS = 128  # a comparison that has not come to its end by then has none
PREEMPTED = 2.0  # so many medians, and all beyond, count as so many
# One comparison is off by about as much as what was timed before the first request: by this share.
# What is compared changes, so the latest ones count most.
NOISE, LEAST_WEIGHT = 0.08, 0.2
MOST_CORRECTION = 1.35
# A load is known from so many comparisons on. Where requests come and go so fast that none comes to
# its end, it is taken for known behind so many attempts.
KNOWN_FROM, MOST_ATTEMPTS = 2, 6
# What is more than luck is of another machine: what was known before it does not count, and there
# are two further attempts.
MOST_LUCK, FURTHER_ATTEMPTS = 3.0 * NOISE, 2


@dataclass(frozen=True, slots=True)
class ComparedStep:
    """drafting: how many rows drafted a first token, a second one, and so on. context: the mean of
    the tokens in their slots. read: tokens of prompts that the same forward has read. fed: those
    that the draft has read. ns: all of the step.
    """

    rows: int
    drafting: Sequence[int]
    context: float
    read: int
    fed: int
    ns: int


class ComparedCosts(Protocol):
    def pace(self, step: ComparedStep) -> float:
        """What a step took over what the figures of now say, in which the speed of the machine,
        whatever it is, counts as one.
        """
        ...

    def correct_plain(self, rows: range, factor: float, *, goes_on_plainly: bool) -> None:
        """Let plain steps of so many rows take so many times what they are said to take beside
        those with drafts. goes_on_plainly: whether the last step was a plain one.
        """
        ...


class Comparison:
    """Of one runtime. Loads are told apart as trials tell them apart."""

    def __init__(self, max_rows: int, costs: ComparedCosts) -> None:
        self._max_rows, self._costs = max_rows, costs
        self._compared, self._attempts = ([0] * (load_of(max_rows) + 1) for _ in range(2))
        self._load: int | None = None  # of the comparison that is on
        self._steps: dict[bool, list[ComparedStep]] = {}  # by whether they drafted
        self._drafts: bool | None = None  # the last step
        self._unsettled = self._seen = 0

    @property
    def is_on(self) -> bool:
        return self._load is not None

    def is_known(self, rows: int) -> bool:
        """Whether the load of so many rows was compared often enough to tell, or cannot be."""
        load = load_of(rows)
        attempts, compared = self._attempts[load], self._compared[load]
        return rows == 1 or compared >= KNOWN_FROM or attempts >= MOST_ATTEMPTS

    def doubt_rehearsal(self) -> None:
        """What was compared so far was of other requests than those to come: it makes a load known,
        and counts no further.
        """
        self._compared = [min(count, KNOWN_FROM) for count in self._compared]

    def doubt(self, rows: int) -> float:
        """By which share what drafts gain may be off at the load of so many rows."""
        count = min(1 + self._compared[load_of(rows)], (2.0 - LEAST_WEIGHT) / LEAST_WEIGHT)
        return NOISE / math.sqrt(count)

    def begin(self, rows: int) -> None:
        """A trial begins with the next step. It is compared with what follows it."""
        self._load, self._drafts, self._seen = load_of(rows), None, 0
        self._attempts[self._load] += 1
        self._steps = {False: [], True: []}

    def is_of(self, rows: int) -> bool:
        """Whether the one that is on is of the load of so many rows."""
        return load_of(rows) == self._load

    def end(self) -> None:
        """There is nothing to compare with any more."""
        self._load = None

    def end_trial(self) -> None:
        """The steps of the trial are taken, or it was cut off: then they may be too few."""
        if self.is_on and max(map(len, self._steps.values())) < LEAST_STEPS:
            self.end()

    def note(self, step: ComparedStep) -> bool:
        """A step was taken. Returns whether the comparison ends with it."""
        self._seen += 1
        drafts = bool(step.drafting)
        if drafts is not self._drafts:
            self._drafts, self._unsettled = drafts, UNSETTLED_DRAFTS if drafts else UNSETTLED_STEPS
        if self._unsettled > 0:
            self._unsettled -= 1
        elif self._load is not None and load_of(step.rows) == self._load:
            self._steps[drafts].append(step)
            if (
                len(self._steps[drafts]) >= MOST_STEPS
                and len(self._steps[not drafts]) >= LEAST_STEPS
            ):
                self._learn(self._load)
                self.end()
        if self._seen >= GIVEN_UP_STEPS:
            self.end()
        return not self.is_on

    def _learn(self, load: int) -> None:
        plain, drafts = (_mean(map(self._costs.pace, self._steps[way])) for way in (False, True))
        is_luck = abs(math.log(plain / drafts)) <= MOST_LUCK
        if not is_luck:
            self._compared[load] = 0
            self._attempts[load] = min(self._attempts[load], MOST_ATTEMPTS - FURTHER_ATTEMPTS)
        weight = max(LEAST_WEIGHT, 1.0 / (2 + self._compared[load]))
        self._compared[load] += is_luck
        factor = max(1.0 / MOST_CORRECTION, min(MOST_CORRECTION, plain / drafts)) ** weight
        rows = range(2**load // 2 + 1, min(2**load, self._max_rows) + 1)
        self._costs.correct_plain(rows, factor, goes_on_plainly=not self._drafts)


def _mean(of_steps: Iterable[float]) -> float:
    """What is preempted takes ten times as long, and says nothing."""
    paces = list(of_steps)
    most = PREEMPTED * statistics.median(paces)
    return statistics.fmean(min(pace, most) for pace in paces)
