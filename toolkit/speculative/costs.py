"""What a step takes, as the running engines show it.

`measured_costs` times both engines before the first request, so that lengths are chosen well from
the start. Then every step corrects the figures. Two things move apart: the whole machine becomes
slower or faster (another program runs), which changes all figures alike and often, and one figure
is off (the calibration was disturbed, contexts are longer now), which changes it alone and slowly.
So there is a common scale that follows quickly, and each figure follows slowly.

A figure follows the median of what is measured, not the mean, because a step that is preempted
takes ten times as long and says nothing: whether a step took longer or shorter than expected moves
the figure by a fixed share, up or down.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from operator import truediv

import torch

from toolkit.interfaces import Chain, ChainingEngine, StepEngine
from toolkit.speculative.adaptive import PROBE_TOKENS
from toolkit.speculative.sampling import argmax

__all__ = ["StepCosts", "measured_costs"]

SCALE_STEP, HOST_STEP = 0.02, 0.02
# A figure moves by the first share at first, since its calibration may have been disturbed, and
# each time a little less, down to the last.
FIRST_FIGURE_STEP, FIGURE_STEP, FIGURE_STEP_FACTOR = 0.01, 0.004, 0.99
FIRST_HOST_NS = 60_000.0  # of a step with one row, before one has been measured
HOST_SHARE_PER_ROW = 0.4  # what each further row adds to it
CONTEXT_TOKENS = 64  # that stand in each slot while the engines are timed
# Of each number of rows, beside the first pass. After its share of the budget none begins.
PASSES, BUDGET_NS = 20, 2_000_000_000


class StepCosts:
    """verify[width][rows]: nanoseconds of a forward; index 0 is not used. first[rows] and
    further[rows]: of the first token of a block of drafts, for which the draft catches up and its
    weights come back into the caches, and of each one behind it. probe: of a probe of one row.
    """

    def __init__(
        self,
        verify: Sequence[Sequence[float]],
        first: Sequence[float],
        further: Sequence[float],
        probe: float,
    ) -> None:
        self._verify = [list(row) for row in verify]
        for width in reversed(range(1, len(self._verify))):
            for rows in range(1, len(self._verify[width])):
                self._keep_order(width, rows)
        self._first, self._further = [0.0, *first[1:]], [0.0, *further[1:]]
        self._probe = probe
        self._verify_steps = [[FIRST_FIGURE_STEP] * len(row) for row in self._verify]
        self._first_steps = [FIRST_FIGURE_STEP] * len(self._first)
        self._further_steps = [FIRST_FIGURE_STEP] * len(self._further)
        self._host = FIRST_HOST_NS
        self._scale = 1.0

    def draft_ns(self, rows: int, depth: int) -> float:
        return self._scale * (self._first if depth == 1 else self._further)[rows]

    def step_ns(self, rows: int, width: float) -> float:
        host = self._host * (1.0 + HOST_SHARE_PER_ROW * (rows - 1))
        return self._scale * self._verify_ns(rows, width) + host

    def _verify_ns(self, rows: int, width: float) -> float:
        """Rows are packed by their own length, so a step of different lengths, whose mean this is,
        takes what lies between the figures of equal ones.
        """
        below = int(width)
        figure = self._verify[below][rows]
        if width > below:
            figure += (width - below) * (self._verify[below + 1][rows] - figure)
        return figure

    def probe_ns(self, rows: int) -> float:
        return self._scale * self._probe * rows

    def note_step(
        self, rows: int, drafting: Sequence[int], draft_ns: int, verify_ns: int, host_ns: int
    ) -> None:
        """A step of so many rows was taken. drafting: how many of them drafted a first token, a
        second one, and so on. A step of different lengths moves no figure of the target.
        """
        width = 1 + sum(drafting) / rows
        is_slower = verify_ns > self._scale * self._verify_ns(rows, width)
        if width == int(width):
            _move(self._verify[int(width)], self._verify_steps[int(width)], rows, up=is_slower)
            self._keep_order(int(width), rows)
        self._scale *= _step(SCALE_STEP, up=is_slower)
        if drafting:
            further = drafting[1:]
            expected = self._first[drafting[0]] + sum(self._further[count] for count in further)
            is_slower = draft_ns > self._scale * expected
            _move(self._first, self._first_steps, drafting[0], up=is_slower)
            for count in set(further):
                _move(self._further, self._further_steps, count, up=is_slower)
        expected = self._host * (1.0 + HOST_SHARE_PER_ROW * (rows - 1))
        self._host *= _step(HOST_STEP, up=host_ns > expected)

    def _keep_order(self, width: int, rows: int) -> None:
        """A wider forward is no faster. So a figure that was measured in a bad moment cannot make
        plain decoding look slower than drafting.
        """
        verify = self._verify
        figure = verify[width][rows]
        other = width - 1
        while other > 0 and verify[other][rows] > figure:
            verify[other][rows] = figure
            other -= 1
        other = width + 1
        while other < len(verify) and verify[other][rows] < figure:
            verify[other][rows] = figure
            other += 1

    def note_probe(self, rows: int, probe_ns: int) -> None:
        self._probe *= _step(HOST_STEP, up=probe_ns > self.probe_ns(rows))


def _move(figures: list[float], steps: list[float], rows: int, *, up: bool) -> None:
    figures[rows] *= _step(steps[rows], up=up)
    steps[rows] = max(FIGURE_STEP, steps[rows] * FIGURE_STEP_FACTOR)


def _step(share: float, *, up: bool) -> float:
    return 1.0 + share if up else 1.0 / (1.0 + share)


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
    largest = target.max_batch_size
    batches = [*_powers_of_two(largest), largest]
    engines = [target] if draft is None else [target, draft]
    for engine in engines:
        for slot in range(largest):
            engine.forward([slot], _zeros(1, _context(engine)), last_only=True)
    budget_ns = BUDGET_NS // len(batches)
    blocks, forwards = {}, {}
    for rows in batches:
        blocks[rows], forwards[rows] = _timed_steps(
            target, draft, rows, max_draft_len, clock, budget_ns
        )
    probe = 0.0 if draft is None else _timed_probe(target, draft, clock, budget_ns)
    for engine in engines:
        engine.rewind(range(largest), [0] * largest)
    first = {rows: took[1] for rows, took in blocks.items()}
    further = {
        rows: max(0.0, took[-1] - took[1]) / max(1, max_draft_len - 1)
        for rows, took in blocks.items()
    }
    return StepCosts(
        [
            [0.0] * (largest + 1),
            *(
                _between({rows: took[length] for rows, took in forwards.items()}, largest)
                for length in range(max_draft_len + 1)
            ),
        ],
        _between(first, largest),
        _between(further if max_draft_len > 1 else first, largest),
        probe,
    )


Run = Callable[[list[int], int], object]
"""Runs these slots with so many tokens each."""


def _forward(engine: StepEngine) -> Run:
    """Reading one number back waits for a GPU, as choosing the token does."""
    return lambda slots, width: float(engine.forward(slots, _zeros(len(slots), width))[0, 0, 0])


def _drafts(draft: StepEngine) -> Run:
    """A block of so many drafts."""
    if isinstance(draft, ChainingEngine):
        chain = draft.forward_chain

        def run_chain(slots: list[int], count: int) -> object:
            return chain([Chain(slot, [0], count) for slot in slots])

        return run_chain

    def run(slots: list[int], count: int) -> object:
        return [argmax(draft.forward(slots, _zeros(len(slots), 1))) for _ in range(count)]

    return run


def _powers_of_two(below: int) -> Iterator[int]:
    power = 1
    while power < below:
        yield power
        power *= 2


def _context(engine: StepEngine) -> int:
    """Short enough that every forward that is timed still fits."""
    return max(0, min(CONTEXT_TOKENS, engine.max_step_tokens, engine.max_seq_len // 2))


def _timed_steps(
    target: StepEngine,
    draft: StepEngine | None,
    rows: int,
    max_draft_len: int,
    clock: Callable[[], int],
    budget_ns: int,
) -> tuple[list[float], list[float]]:
    """Nanoseconds of a block of 0, 1, ... drafts, and of the target's forward behind it.

    As in truth, draft and target take turns, and like steps follow each other: caches hold what
    they hold then. A pass takes two steps of every length, of which the second counts. A machine
    may be half as fast for a second, and what counts is how the lengths compare: so a figure is its
    share of a pass, in the median, of the fastest pass.
    """
    slots = list(range(rows))
    drafts = None if draft is None else _drafts(draft)
    verify = _forward(target)

    def step(draft_len: int) -> tuple[int, int]:
        start = clock()
        if drafts is not None and draft_len:
            drafts(slots, draft_len)
        drafted = clock()
        verify(slots, draft_len + 1)
        verified = clock()
        for engine in (target,) if draft is None else (target, draft):
            engine.rewind(slots, [_context(engine)] * rows)
        return drafted - start, verified - drafted

    passes: list[list[int]] = []
    began = clock()
    while not passes or (len(passes) <= PASSES and clock() - began < budget_ns):
        passes.append([])
        for draft_len in range(max_draft_len + 1):
            step(draft_len)
            passes[-1] += step(draft_len)
    passes = passes[1:] or passes  # the first one allocates
    totals = [max(1, sum(times)) for times in passes]
    figures = [
        min(totals) * statistics.median(map(truediv, times, totals))
        for times in zip(*passes, strict=True)
    ]
    return figures[::2], figures[1::2]


def _timed_probe(
    target: StepEngine, draft: StepEngine, clock: Callable[[], int], budget_ns: int
) -> float:
    """Nanoseconds of a probe of one row, in the midst of plain decoding."""
    probe, verify = _forward(draft), _forward(target)
    times: list[int] = []
    began = clock()
    while len(times) < 2 or (len(times) < PASSES and clock() - began < budget_ns):
        verify([0], 1)
        start = clock()
        probe([0], min(PROBE_TOKENS, draft.max_step_tokens))
        times.append(clock() - start)
        target.rewind([0], [_context(target)])
        draft.rewind([0], [_context(draft)])
    return float(statistics.median(times))


def _zeros(rows: int, width: int) -> torch.Tensor:
    return torch.zeros((rows, width), dtype=torch.int64)


def _between(figures: dict[int, float], largest: int) -> list[float]:
    """The figure of every number of rows up to `largest`, on the lines between those given. Fewer
    rows take no longer than more.
    """
    known = sorted(figures)
    least = {rows: min(figures[more] for more in known if more >= rows) for rows in known}
    values = [0.0] * (largest + 1)
    for rows in range(1, largest + 1):
        above = next(each for each in known if each >= rows)
        below = max(each for each in known if each <= rows)
        share = 0.0 if above == below else (rows - below) / (above - below)
        values[rows] = least[below] + share * (least[above] - least[below])
    return values
