"""When a thread looks for what another one leaves it behind every step, without being woken.

In a virtual machine, to wake a thread on another core takes 12 microseconds of the one that does
it, and what that one does next is slower, too. A thread that computes pays that once per step for
the one that sends, and again when that one waits for the interpreter's lock. Beside steps of a
millisecond it is several percent. So while steps are that short, the sender sleeps by the clock
until the next step is over, and a little longer: then the forward behind it runs, which does not
hold the lock.

Pure, and only of Python's standard library: the clock is an argument.
"""

from __future__ import annotations

__all__ = ["Pace"]

# Longer steps make a wake cheap.
LONGEST_STEP_NS = 2_000_000
# One step may leave something several times, for instance behind prompts that it has read.
SHORTEST_STEP_NS = 100_000
# From the end of a step, until the next forward runs.
BEHIND_NS = 300_000
# Behind the time at which a step was to be over, it is looked for so long.
PATIENCE_NS = 3_000_000
AVERAGED_STEPS = 8.0


class Pace:
    """Of one thread that takes what another leaves. What that does not leave behind every step, as
    where chunks are further apart, it takes for longer steps.
    """

    def __init__(self) -> None:
        self._last_ns: int | None = None  # when the last step ended
        self._step_ns: float | None = None  # in the mean; None: not known, or long

    def note(self, ended_ns: int) -> None:
        """Something was left then."""
        last_ns, step_ns = self._last_ns, self._step_ns
        if last_ns is not None and ended_ns - last_ns < SHORTEST_STEP_NS:
            return
        self._last_ns = ended_ns
        if last_ns is None:
            return
        new_ns = ended_ns - last_ns
        if new_ns > LONGEST_STEP_NS:
            self._step_ns = None
        elif step_ns is None:
            self._step_ns = new_ns
        else:
            self._step_ns = step_ns + (new_ns - step_ns) / AVERAGED_STEPS

    def sleep_ns(self, now_ns: int) -> int | None:
        """How long to sleep before the next look. None: let the other thread wake this one, since
        steps are long, or there are none, or the next one does not come.
        """
        if self._last_ns is None or self._step_ns is None:
            return None
        left_ns = self._last_ns + int(self._step_ns) - now_ns
        if left_ns < -PATIENCE_NS:
            return None
        return max(0, left_ns) + BEHIND_NS
