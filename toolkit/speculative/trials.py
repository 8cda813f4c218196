"""When running requests try the way of decoding that they do not use: plainly, or with drafts.

The steps that are taken correct their own figures, and the scale that all of them share follows the
machine (`costs`). So a figure that was timed in a bad moment stays as it is if it keeps itself from
being used: a batch drafts though that loses, or decodes plainly though drafts would pay. Therefore
a few steps are now and then taken the other way. Of a request alone what they take beside those
before them corrects their figures; of a batch they are compared with those behind them
(`comparison`).

Pure, and only of Python's standard library.
"""

from __future__ import annotations

import math

__all__ = [
    "LEAST_TOKENS",
    "NOTED_STEPS",
    "PLAIN_TRIAL_STEPS",
    "TRIAL_STEPS",
    "UNSETTLED_STEPS",
    "Trials",
    "load_of",
]

# With drafts, and plain ones. Behind drafts and wide forwards plain steps become faster for a
# while, as the caches of the processor hold more and more of what they read: the first ones say
# nothing. Where a model just fits into them, the first step of 4 requests takes 1.4 to 1.7 times
# what settled ones do, the eighth 1.1 times, the fifteenth 1.0 to 1.05 times (Zen 4, INT8
# quickstart).
TRIAL_STEPS, PLAIN_TRIAL_STEPS = 16, 40
NOTED_STEPS = 16
UNSETTLED_STEPS = PLAIN_TRIAL_STEPS - NOTED_STEPS
SETTLING_LOSS = 3.0  # what unsettled steps take together beyond what settled ones do, in steps
LEAST_INTERVAL = 128  # steps at a load before a trial, at least
# The first one of a load comes sooner if it drafts, when a request has drafted so often: all that
# is known of plain steps may be what was timed before the first request, and the draft has read the
# texts. If requests come or leave meanwhile, so many are made.
FIRST_BLOCKS, FIRST_TRIALS = 8, 3
# Where little is known of what both ways take beside each other, from this promise on a trial comes
# sooner, and trials lose more of the time.
DOUBTFUL_PROMISE, DOUBTFUL_SHARE = 0.85, 0.02
ASK_AGAIN_STEPS = 32  # whether one that was put off may begin: what it costs changes
# Of the time, at most, that trials lose, but for the first ones, and the first behind drafts that
# began. It has passed before they begin.
TRIAL_SHARE = 0.00125
# Where a plain step takes longer or shorter by so much than at any trial since the present way
# began, the machine is another, and what the two ways take beside each other may be: they may lose
# more. A machine that keeps changing between two speeds is so until each was tried.
CHANGE_THAT_MATTERS, CHANGED_SHARE = 0.2, 0.0025
# While a batch drafts, what its steps take is not to be told from the machine's speed: that they
# still gain has to be looked at, for more of the time, which they gain where they do.
BATCH_SHARE = 0.01
MOST_BACKOFF = 16  # the interval doubles with each trial that changes nothing, up to so many times
# What is expected to be slower than this is not tried: no figure is so far off. Nor are drafts with
# which a step gives fewer tokens than that per row. Drafts that lost a fifth while the weights were
# in the caches gained a quarter when other programs took those.
LEAST_PROMISE, LEAST_TOKENS = 0.6, 1.3
# What a trial may lose, in steps. Drafts of many requests have all their texts to read first.
MOST_LOST_STEPS = 32.0
LEAST_ROWS, MOST_ROWS = 0.5, 1.125  # of those when a trial began; else it ends


class Trials:
    """Of one runtime. Loads are told apart by powers of two: one request, 2, up to 4, up to 8."""

    def __init__(self, max_rows: int) -> None:
        loads = load_of(max_rows) + 1
        self._steps = [0] * loads  # since the last trial
        self._due: list[float] = [FIRST_BLOCKS] * loads  # so many of them, until it is asked
        self._first = [FIRST_TRIALS] * loads  # that may come sooner
        self._backoff = [1] * loads
        self._drafts: list[bool | None] = [None] * loads  # what is usual
        # Of a plain step, the least and the most, at the trials since that began that were not cut
        # off; and at the last one.
        self._step_ns: list[tuple[float, float] | None] = [None] * loads
        self._now_ns = 0.0
        self._left = 0  # steps of the trial
        self._rows = self._joined = 0  # when it began, and since then

    @property
    def is_on(self) -> bool:
        """Whether steps are taken for a trial now."""
        return self._left > 0

    def pass_step(self, rows: int) -> bool:
        """A step of so many rows follows. Returns whether the trial goes on in it."""
        self._steps[load_of(rows)] += 1
        if self._left == 1 and not self._is_mixed:
            self._complete(load_of(self._rows))
        self._left = max(0, self._left - 1)
        if not LEAST_ROWS * self._rows <= rows <= MOST_ROWS * self._rows:
            self._left = 0
        return self.is_on

    def _complete(self, load: int) -> None:
        least, most = self._step_ns[load] or (self._now_ns, self._now_ns)
        self._step_ns[load] = min(least, self._now_ns), max(most, self._now_ns)
        self._first[load] = 0

    def pass_steps(self, rows: int, steps: int) -> None:
        """So many steps of so many rows were taken, while no trial was on."""
        self._steps[load_of(rows)] += steps

    def is_due(self, rows: int) -> bool:
        """Whether a trial with so many rows may begin."""
        load = load_of(rows)
        return not self.is_on and self._steps[load] >= self._due[load]

    def begin(
        self,
        rows: int,
        promise: float,
        further_steps: float,
        *,
        step_ns: float,
        drafts: bool,
        blocks: int = 0,
        little_is_known: bool = False,
    ) -> bool:
        """Begin one with the next step, unless that would cost too much, or too much for now.

        promise: the expected speed over that of the present way. further_steps: how many steps
        what has to be read for it, or after it, takes. step_ns: of a plain step. drafts: whether
        the present way is with drafts. blocks: the most that a request has drafted since it began
        to. little_is_known: of what both ways take beside each other.
        """
        load = load_of(rows)
        if promise < LEAST_PROMISE:
            return self._put_off(load)
        steps = PLAIN_TRIAL_STEPS if drafts else TRIAL_STEPS
        lost = max(0.0, steps * (1.0 / promise - 1.0) + SETTLING_LOSS) + further_steps
        if lost > MOST_LOST_STEPS:
            return self._put_off(load)
        least, most = self._step_ns[load] or (step_ns, step_ns)
        is_faster = step_ns < (1.0 - CHANGE_THAT_MATTERS) * least
        has_changed = is_faster or step_ns > (1.0 + CHANGE_THAT_MATTERS) * most
        is_usual = drafts == self._drafts[load]
        is_settled = is_usual and not has_changed
        backoff = min(MOST_BACKOFF, 2 * self._backoff[load]) if is_settled else 1
        share = CHANGED_SHARE if has_changed else TRIAL_SHARE
        if drafts and rows > 1:
            share = BATCH_SHARE
        interval = backoff * max(LEAST_INTERVAL, round(lost / share))
        if drafts and self._drafts[load] is False:  # they began on what one trial showed, or none
            interval = min(interval, LEAST_INTERVAL)
        if little_is_known and promise >= DOUBTFUL_PROMISE:
            interval = min(interval, max(LEAST_INTERVAL, round(lost / DOUBTFUL_SHARE)))
        may_come_sooner = drafts and self._first[load] > 0
        if may_come_sooner:
            interval = min(interval, self._steps[load] + max(0, FIRST_BLOCKS - blocks))
        if self._steps[load] < interval:
            return self._put_off(load, interval)
        if may_come_sooner:
            self._first[load] -= 1
        self._backoff[load], self._drafts[load] = backoff, drafts
        if not is_usual:
            self._step_ns[load] = None
        self._now_ns = step_ns
        self._steps[load], self._due[load] = 0, LEAST_INTERVAL
        self._left, self._rows, self._joined = steps, rows, 0
        return True

    def _put_off(self, load: int, interval: float = math.inf) -> bool:
        self._due[load] = min(interval, self._steps[load] + ASK_AGAIN_STEPS)
        return False

    def join(self) -> None:
        """A request joins that decodes plainly. Once they are half of the requests, a trial of
        drafts ends with the next step: it would show what a mixture takes.
        """
        self._joined += 1
        if self._is_mixed:
            self._left = min(self._left, 1)

    @property
    def _is_mixed(self) -> bool:
        tries_drafts = not self._drafts[load_of(self._rows)]
        return tries_drafts and self._joined >= LEAST_ROWS * self._rows

    def end(self) -> None:
        self._left = 0


def load_of(rows: int) -> int:
    """Of so many running requests: see Trials."""
    return max(0, rows - 1).bit_length()
