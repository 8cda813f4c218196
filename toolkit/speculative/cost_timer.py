"""Times the engines before the first request, so that draft lengths are chosen well at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from operator import truediv

import numpy as np
import torch

from toolkit.interfaces import Chain, ChainingEngine, StepEngine
from toolkit.speculative.adaptive import PROBE_TOKENS
from toolkit.speculative.costs import Figures, StepCosts
from toolkit.speculative.sampling import argmax

__all__ = ["measured_costs"]

# What stands in each slot while the engines are timed, and then again. Filling the slots up to the
# second takes about so long at most.
NEAR_TOKENS, FAR_TOKENS, FILL_NS = 64, 256, 1_000_000_000
# Batches take turns, so that each sees more of the machine's waves than that of its own moment: so
# many passes in a turn, unless that time has passed, and so many turns behind one pass of each.
# None begins after the budget, so much for each batch, and that much at least.
TURN_PASSES, TURN_NS = 4, 100_000_000
TURNS, BUDGET_NS, LEAST_BUDGET_NS = 10, 300_000_000, 1_000_000_000
FORWARDS = 20  # of a probe, and of reading, at most
# Behind drafts and wide forwards, plain steps of few rows become faster for a while (`trials`),
# since the caches of the processor hold more and more of what they read: so many do not count here.
SETTLING_STEPS, MOST_SETTLING_ROWS = 8, 8


def measured_costs(
    target: StepEngine,
    draft: StepEngine | None,
    max_draft_len: int,
    clock: Callable[[], int] = time.monotonic_ns,
) -> StepCosts:
    """Time the engines, whose slots must be free, and free them again. Without a draft engine
    drafts cost nothing.

    Batches are timed at powers of two and at the largest one; what lies between is interpolated.
    """
    batches = [*_powers_of_two(target.max_batch_size), target.max_batch_size]
    timer = _Timer(target, draft, batches, max_draft_len, clock)
    room = min(engine.max_seq_len for engine in timer.engines) // 2
    near = min(NEAR_TOKENS, room)
    spent_ns = timer.fill(near)
    lengths = range(max_draft_len + 1)
    figures = timer.figures(lengths)
    probe, reading = (0.0, 0.0) if draft is None else (timer.probe_ns(), timer.reading_ns())
    growth = None
    far = min(FAR_TOKENS, room, near + near * FILL_NS // max(1, spent_ns))
    if far >= 2 * near > 0:
        timer.fill(far)
        # Between the lengths that are timed, the growth is a line, too.
        there = timer.figures(sorted({0, min(1, max_draft_len), max_draft_len}))
        growth = _growth(figures, there, far - near)
    for engine in timer.engines:
        engine.rewind(range(engine.max_batch_size), [0] * engine.max_batch_size)
    return StepCosts(figures, probe, reading=reading, context=near, growth=growth)


Run = Callable[[list[int], int], object]
"""Runs these slots with so many tokens each."""


def _forward(engine: StepEngine) -> Run:
    """Reading one number back waits for a GPU, as choosing the token does."""
    return lambda slots, width: float(engine.forward(slots, _zeros(len(slots), width))[0, 0, 0])


def _drafts(draft: StepEngine | None) -> Run:
    """A block of so many drafts."""
    if draft is None:
        return lambda slots, count: None
    if isinstance(draft, ChainingEngine):
        chain = draft.forward_chain
        # Where all of a block was accepted the draft catches up: in every other row.
        return lambda slots, count: chain(
            [Chain(slot, [0] * (1 + slot % 2), count) for slot in slots]
        )
    return lambda slots, count: [
        argmax(draft.forward(slots, _zeros(len(slots), 1))[:, 0]) for _ in range(count)
    ]


def _powers_of_two(below: int) -> Iterator[int]:
    power = 1
    while power < below:
        yield power
        power *= 2


class _Timer:
    """context: how many tokens stand in every slot."""

    def __init__(
        self,
        target: StepEngine,
        draft: StepEngine | None,
        batches: Sequence[int],
        max_draft_len: int,
        clock: Callable[[], int],
    ) -> None:
        self.engines = [target] if draft is None else [target, draft]
        self.context = 0
        self._drafts, self._verify = _drafts(draft), _forward(target)
        self._batches = batches
        self._max_draft_len = max_draft_len
        self._clock = clock

    def fill(self, context: int) -> int:
        """Fill every slot up to so many tokens. Returns the nanoseconds that it took."""
        began = self._clock()
        for engine in self.engines:
            for slot in range(engine.max_batch_size):
                for start in range(self.context, context, engine.max_step_tokens):
                    count = min(engine.max_step_tokens, context - start)
                    engine.forward([slot], _zeros(1, count), last_only=True)
        self.context = context
        return self._clock() - began

    def _rewind(self, slots: list[int]) -> None:
        for engine in self.engines:
            engine.rewind(slots, [self.context] * len(slots))

    def figures(self, draft_lens: Sequence[int]) -> Figures:
        """By timing these lengths, which begin with 0 and end with the longest."""
        drafts, forwards = {}, {}
        for rows, passes in self._passes(draft_lens).items():
            took = _steps(passes)
            drafts[rows] = [draft_ns for draft_ns, _ in took]
            forwards[rows] = np.interp(
                range(self._max_draft_len + 1), draft_lens, [verify_ns for _, verify_ns in took]
            )
        longest = draft_lens[-1]
        first = {rows: took[min(1, longest)] for rows, took in drafts.items()}
        further = {
            rows: max(0.0, took[-1] - first[rows]) / (longest - 1) if longest > 1 else first[rows]
            for rows, took in drafts.items()
        }
        largest = self._batches[-1]
        widths = [
            _between({rows: float(took[length]) for rows, took in forwards.items()}, largest)
            for length in range(longest + 1)
        ]
        return Figures(
            [[0.0] * (largest + 1), *widths],
            *(_between(each, largest) for each in (first, further)),
        )

    def _passes(self, draft_lens: Sequence[int]) -> dict[int, list[list[int]]]:
        """Of each batch, by its rows: for each pass the nanoseconds of its steps, see `_pass`."""
        clock, passes = self._clock, {rows: list[list[int]]() for rows in self._batches}
        began = clock()
        first = {rows: self._pass(rows, draft_lens) for rows in passes}
        budget_ns = max(LEAST_BUDGET_NS, BUDGET_NS * len(passes))
        if clock() - began >= budget_ns:
            return {rows: [times] for rows, times in first.items()}
        # From here on without those, which allocate; one of each in any case.
        began = clock()
        for _ in range(TURNS):
            for rows, found in passes.items():
                turn_began = clock()
                if found and turn_began - began >= budget_ns:
                    return passes
                for _ in range(TURN_PASSES):
                    found.append(self._pass(rows, draft_lens))
                    if clock() - turn_began >= TURN_NS:
                        break
        return passes

    def _pass(self, rows: int, draft_lens: Sequence[int]) -> list[int]:
        """Nanoseconds of a block of drafts and of the target's forward behind it, for each length.

        As in truth, draft and target take turns, and where that matters like steps follow each
        other: caches hold what they hold then. So of few rows some steps of every length are
        taken, of which the last counts.
        """
        slots, clock = list(range(rows)), self._clock

        def step(draft_len: int) -> tuple[int, int]:
            start = clock()
            if draft_len:
                self._drafts(slots, draft_len)
            drafted = clock()
            self._verify(slots, draft_len + 1)
            verified = clock()
            self._rewind(slots)
            return drafted - start, verified - drafted

        settles = rows <= MOST_SETTLING_ROWS
        times = list[int]()
        for draft_len in draft_lens:
            if settles:
                for _ in range(1 if draft_len else SETTLING_STEPS):
                    step(draft_len)
            times += step(draft_len)
        return times

    def probe_ns(self) -> float:
        """Nanoseconds of a probe of one row, in the midst of plain decoding."""
        draft = self.engines[-1]
        tokens, probe = min(PROBE_TOKENS, draft.max_step_tokens), _forward(draft)
        return self._among_plain(lambda: probe([0], tokens))

    def reading_ns(self) -> float:
        """Nanoseconds of a token of a text that the draft reads."""
        draft = self.engines[-1]
        text = _zeros(1, max(1, min(self.context, draft.max_step_tokens)))
        ns = self._among_plain(lambda: float(draft.forward([0], text, last_only=True)[0, 0, 0]))
        return ns / text.shape[1]

    def _among_plain(self, forward: Callable[[], object]) -> float:
        """Nanoseconds of a forward of the first row, behind a plain step."""
        times, clock = list[int](), self._clock
        began = clock()
        while len(times) < 2 or (len(times) < FORWARDS and clock() - began < BUDGET_NS):
            self._verify([0], 1)
            start = clock()
            forward()
            times.append(clock() - start)
            self._rewind([0])
        return float(statistics.median(times))


def _steps(passes: Sequence[Sequence[int]]) -> list[tuple[float, float]]:
    """For each length of these passes, nanoseconds of a block of drafts and of the forward.

    A machine may be half as fast for a second, and what counts is how the lengths compare: so a
    figure is its share of a pass, in the median, of the fastest pass.
    """
    totals = [max(1, sum(times)) for times in passes]
    figures = [
        min(totals) * statistics.median(map(truediv, times, totals))
        for times in zip(*passes, strict=True)
    ]
    return list(zip(figures[::2], figures[1::2], strict=True))


def _zeros(rows: int, width: int) -> torch.Tensor:
    return torch.zeros((rows, width), dtype=torch.int64)


def _growth(near: Figures, far: Figures, tokens: int) -> Figures:
    """Of each figure, per token. What grows less is noise where a step is wider."""

    def per_token(here: Sequence[float], there: Sequence[float]) -> list[float]:
        pairs = zip(here, there, strict=True)
        return [max(0.0, further - nearer) / tokens for nearer, further in pairs]

    verify = np.array([per_token(*pair) for pair in zip(near.verify, far.verify, strict=True)])
    return Figures(
        np.maximum.accumulate(verify).tolist(),
        per_token(near.first, far.first),
        per_token(near.further, far.further),
    )


def _between(figures: dict[int, float], largest: int) -> list[float]:
    """The figure of every number of rows up to `largest`, on the lines between those given. Fewer
    rows take no longer than more.
    """
    known = sorted(figures)
    least = [min(figures[more] for more in known if more >= rows) for rows in known]
    return [0.0, *np.interp(range(1, largest + 1), known, least).tolist()]
