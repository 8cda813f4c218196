"""What a step takes, as the running engines show it.

`cost_timer` times both engines before the first request, so that lengths are chosen well from the
start. Then every step corrects the figures. Two things move apart: the whole machine becomes
slower or faster (another program runs), which changes all figures alike and often, and one figure
is off (it was timed in a bad moment), which changes it alone and slowly.
So there is a common scale that follows quickly, and each figure follows slowly; not at all while
step after step is slower than expected, or faster, since then it is the machine. Otherwise the
figures in use would take a part of every change, and look dear or cheap beside those that are not.
A draft and the forward behind it have the same moment, so they always tell how they compare.

But what plain steps and those with drafts take beside each other, which decides, shows only where
one kind follows the other. There the machine is as fast as the steps before said. So of a request
alone the first ones of the other kind correct their figures, and not the scale. Of a batch, where
less is at stake, so few steps say too little: `comparison` has more.

A figure follows the median of what is measured, not the mean, because a step that is preempted
takes ten times as long and says nothing: whether a step took longer or shorter than expected moves
the figure by a fixed share, up or down.

Attention reads what stands in the slots, so figures grow with the context, and those of wide and of
narrow steps differently. They are timed at two contexts; what a step takes at others lies on the
line through both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.speculative.comparison import ComparedStep

__all__ = ["FRESH_STEPS", "Figures", "StepCosts"]

SCALE_STEP, HOST_STEP = 0.02, 0.02
PROBE_STEP = 0.15  # probes are rare, and one that reads a prompt takes longer
READING_STEP = 0.05
# A figure moves by the first share at first, since it may have been timed in a bad moment, and each
# time a little less, down to the last.
FIRST_FIGURE_STEP, FIGURE_STEP, FIGURE_STEP_FACTOR = 0.01, 0.001, 0.99
# In so many steps of a request alone, behind one of the other kind, it moves by this share times
# what _Run says.
FRESH_STEPS, FRESH_STEP = 8, 0.002
ALIKE_ROWS = 2**0.5  # so many times as many, or as few, are the same load
# The more the machine has changed since one kind followed the other last, the less is known of what
# they take beside each other: so much more, for a scale that is e times as large, or as small.
FRESH_STEP_OF_CHANGE = 0.04
TREND_STEPS = 8.0  # so many decide whether the machine changes
FIRST_HOST_NS = 40_000.0  # of a plain step with one row, before one has been measured
LEAST_HOST_NS = 1_000.0  # so that it grows again when it is needed
HOST_SHARE_PER_ROW = 0.4  # what each further row adds to it
HOST_SHARE_OF_DRAFTS = 1.0  # what it adds that rows draft


@dataclass(frozen=True, slots=True)
class Figures:
    """Nanoseconds. verify[width][rows]: of a forward; width 0 and 0 rows are not used. first[rows]
    and further[rows]: of the first token of a block of drafts, for which the draft catches up and
    its weights come back into the caches, and of each one behind it.
    """

    verify: Sequence[Sequence[float]]
    first: Sequence[float]
    further: Sequence[float]


class _Line:
    """A figure for each number of rows, which grows with the context and is corrected."""

    __slots__ = ("_base", "_factors", "_growth", "_steps")

    def __init__(self, base: Sequence[float], growth: Sequence[float]) -> None:
        self._base, self._growth = [0.0, *base[1:]], [0.0, *growth[1:]]
        self._factors = [1.0] * len(base)
        self._steps = [FIRST_FIGURE_STEP] * len(base)

    def at(self, rows: int, context: float) -> float:
        """context: tokens more than the base has."""
        return self._factors[rows] * (self._base[rows] + context * self._growth[rows])

    def move(self, rows: int, share: float, *, up: bool, step: float | None = None) -> None:
        """By a share of a step; its own, which becomes smaller, if None is given."""
        if step is None:
            step = self._steps[rows]
            self._steps[rows] = max(FIGURE_STEP, step * FIGURE_STEP_FACTOR)
        self._factors[rows] *= _step(step * share, up=up)

    def set(self, rows: int, context: float, figure: float) -> None:
        self.multiply(rows, figure / self.at(rows, context))

    def multiply(self, rows: int, factor: float) -> None:
        self._factors[rows] *= factor


@dataclass(slots=True)
class _Run:
    """Fresh steps in a row that were slower than expected, or faster (below 0), and how often one
    ended: from there on the truth lies between, and the steps become smaller.
    """

    steps: int = 0
    turns: int = 0

    def moves(self, *, up: bool) -> float:
        """By how many shares the next step of the run moves its figures."""
        if (self.steps < 0) if up else (self.steps > 0):
            self.steps, self.turns = 0, self.turns + 1
        self.steps += 1 if up else -1
        return abs(self.steps) / (1 + self.turns)


class StepCosts:
    """figures: with `context` tokens in each slot, or fewer. probe: nanoseconds of a probe of one
    row. reading: of a token that the draft reads among many. growth: what each further token in
    every slot adds to the figures.
    """

    def __init__(
        self,
        figures: Figures,
        probe: float,
        *,
        reading: float = 0.0,
        context: int = 0,
        growth: Figures | None = None,
    ) -> None:
        if growth is None:
            flat = [0.0] * len(figures.first)
            growth = Figures([flat] * len(figures.verify), flat, flat)
        # A forward takes a nanosecond at least, so that any figure can be corrected.
        verify = [[max(1.0, figure) for figure in row] for row in figures.verify]
        self._verify = list(map(_Line, verify, growth.verify))
        self._first = _Line(figures.first, growth.first)
        self._further = _Line(figures.further, growth.further)
        self._base_context = context
        self._context = 0.0  # beyond that
        self._most_rows = len(figures.first) - 1
        self._probe, self._reading = probe, reading
        # What the host takes of a request alone, and of each one among others: the engine takes
        # most steps of a request alone by itself.
        self._host_alone = self._host = FIRST_HOST_NS
        self._scale = 1.0
        self._trend = 0.0  # from -1, all steps are faster than expected, to 1
        self._was_plain: bool | None = None
        self._rows = 0  # of the last step
        self._steps_of_a_kind = FRESH_STEPS  # one behind another, this one included
        self._is_same_load = False  # in these, as before them
        # When the kind began: the scale, by how much fresh steps move figures, and their runs.
        self._scale_then, self._fresh_step = self._scale, FRESH_STEP
        self._verify_run, self._draft_run = _Run(), _Run()
        for rows in range(1, self._most_rows + 1):
            for width in reversed(range(1, len(self._verify))):
                self._keep_order(width, rows)

    def draft_ns(self, rows: int, depth: int) -> float:
        line = self._first if depth == 1 else self._further
        return self._scale * line.at(rows, self._context)

    def step_ns(self, rows: int, width: float) -> float:
        return self._scale * self._verify_ns(rows, width) + self._host_ns(rows, width)

    def pace(self, step: ComparedStep) -> float:
        """What a step took over what its figures say, in which the machine's speed counts as one.
        Tokens of prompts are taken to cost what as many more in its blocks would.
        """
        rows, drafting = step.rows, step.drafting
        self.set_context(step.context)
        width = 1 + sum(drafting) / rows
        per_token = (self._verify_ns(rows, 2.0) - self._verify_ns(rows, 1.0)) / rows
        figures = self._verify_ns(rows, width) + step.read * per_token + step.fed * self._reading
        figures += (
            sum(self.draft_ns(count, depth) for depth, count in enumerate(drafting, 1))
            / self._scale
        )
        return max(1.0, step.ns - self._host_ns(rows, width)) / figures

    def correct_plain(self, rows: range, factor: float, *, goes_on_plainly: bool) -> None:
        """See ComparedCosts. What steps of the present kind are expected to take stays as it is, or
        the next ones would take the correction back.
        """
        for count in rows:
            self._verify[1].multiply(count, factor)
            self._keep_order(1, count)
        if goes_on_plainly:
            self._scale /= factor

    def _host_ns(self, rows: int, width: float) -> float:
        drafts = min(1.0, width - 1.0) * HOST_SHARE_OF_DRAFTS
        host = (
            self._host_alone if rows == 1 else self._host * (1.0 + HOST_SHARE_PER_ROW * (rows - 1))
        )
        return host * (1.0 + drafts)

    def _verify_ns(self, rows: int, width: float) -> float:
        """Rows are packed by their own length, so a step of different lengths, whose mean this is,
        takes what lies between the figures of equal ones.
        """
        below = int(width)
        figure = self._verify[below].at(rows, self._context)
        if width > below:
            more = self._verify[below + 1].at(rows, self._context)
            figure += (width - below) * (more - figure)
        return figure

    def probe_ns(self, rows: int) -> float:
        return self._scale * self._probe * rows

    def read_ns(self, tokens: float) -> float:
        return self._scale * self._reading * tokens

    def set_context(self, tokens: float) -> None:
        """Let the figures be those of so many tokens in each slot, in the mean."""
        self._context = max(0.0, tokens - self._base_context)

    def note_step(
        self,
        rows: int,
        drafting: Sequence[int],
        context: float,
        draft_ns: int,
        verify_ns: int,
        host_ns: int,
    ) -> None:
        """A step of so many rows was taken. drafting: how many of them drafted a first token, a
        second one, and so on. context: the mean of the tokens in their slots. host_ns: 0 in a
        burst.
        """
        is_plain = not drafting
        is_same_load = max(rows, self._rows) <= ALIKE_ROWS * min(rows, self._rows)
        if self._was_plain not in (None, is_plain):
            self._steps_of_a_kind, self._is_same_load = 0, True
            self._verify_run, self._draft_run = _Run(), _Run()
            change = abs(math.log(self._scale / self._scale_then))
            self._fresh_step = FRESH_STEP + FRESH_STEP_OF_CHANGE * change
            self._scale_then = self._scale
        self._was_plain, self._rows = is_plain, rows
        self._steps_of_a_kind += 1
        self._is_same_load &= is_same_load
        self.set_context(context)
        width = 1 + sum(drafting) / rows
        is_slower = verify_ns > self._scale * self._verify_ns(rows, width)
        is_fresh = rows == 1 and self._is_same_load and self._steps_of_a_kind <= FRESH_STEPS
        pace = verify_ns / self._verify_ns(rows, width)
        step: float | None = None
        if is_fresh:
            moves, step = self._verify_run.moves(up=is_slower), self._fresh_step
        else:
            # At another load figures may be off alike, which is as if the machine had changed.
            share = 1.0 / TREND_STEPS if is_same_load else 1.0
            self._trend += share * ((1.0 if is_slower else -1.0) - self._trend)
            moves = max(0.0, 1.0 - 2.0 * abs(self._trend))
        below = int(width)
        part = width - below
        for near, share in ((below, 1.0 - part), (below + 1, part)):
            if share:
                self._verify[near].move(rows, moves * share, up=is_slower, step=step)
                self._keep_order(near, rows)
        if not is_fresh:
            self._scale *= _step(SCALE_STEP, up=is_slower)
        if drafting:
            self._note_drafts(drafting, draft_ns, pace, is_fresh=is_fresh)
        move = _step(HOST_STEP, up=host_ns > self._host_ns(rows, width))
        if rows == 1:
            self._host_alone = max(LEAST_HOST_NS, self._host_alone * move)
        else:
            self._host = max(LEAST_HOST_NS, self._host * move)

    def _note_drafts(
        self, drafting: Sequence[int], draft_ns: int, pace: float, *, is_fresh: bool
    ) -> None:
        """pace: what the forward behind them took, over its figure."""
        if self._steps_of_a_kind == 1:
            return  # the draft has read what it had missed
        first, *further = drafting
        expected = self.draft_ns(first, 1) + sum(self.draft_ns(n, 2) for n in further)
        step: float | None = None
        if is_fresh:
            is_slower, step = draft_ns > expected, self._fresh_step
            moves = self._draft_run.moves(up=is_slower)
        else:
            # The forward had the same moment, whatever the machine does.
            is_slower, moves = draft_ns * self._scale > expected * pace, 1.0
        self._first.move(first, moves, up=is_slower, step=step)
        for count in set(further):
            self._further.move(count, moves, up=is_slower, step=step)

    def note_reading(self, tokens: int, read_ns: int) -> None:
        """The draft read so many tokens of a prompt."""
        self._reading *= _step(READING_STEP, up=read_ns > self.read_ns(tokens))

    def _keep_order(self, width: int, rows: int) -> None:
        """A wider forward is no faster. So a figure that was measured in a bad moment cannot make
        plain decoding look slower than drafting.
        """
        verify, context = self._verify, self._context
        figure = verify[width].at(rows, context)
        other = width - 1
        while other > 0 and verify[other].at(rows, context) > figure:
            verify[other].set(rows, context, figure)
            other -= 1
        other = width + 1
        while other < len(verify) and verify[other].at(rows, context) < figure:
            verify[other].set(rows, context, figure)
            other += 1

    def note_probe(self, rows: int, probe_ns: int) -> None:
        self._probe *= _step(PROBE_STEP, up=probe_ns > self.probe_ns(rows))


def _step(share: float, *, up: bool) -> float:
    return 1.0 + share if up else 1.0 / (1.0 + share)
