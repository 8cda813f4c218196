"""When a thread looks for what another one leaves it in every step, without being woken.

To wake a thread on another core costs the one that does about 12 microseconds in a virtual machine,
and what it does behind that is slower, too. A thread that computes pays that once per step for the
one that sends, and again when that one waits for the interpreter's lock. Beside steps of a
millisecond it is several percent. So while steps are that short, the sender sleeps by the clock
until the next step is over, and a little longer: then the forward behind it runs, which does not
hold the lock.

Pure, and only of Python's standard library: the clock is an argument.
"""

from __future__ import annotations

__all__ = ["Pace"]

# Longer steps make a wake cheap, and the next one is hard to foresee.
LONGEST_STEP_NS = 2_000_000
# From the end of a step, until the next forward runs.
BEHIND_NS = 300_000
# Behind the time at which a step was to be over, it is looked for so long.
PATIENCE_NS = 3_000_000
STEPS = 8.0  # over about so many the time of a step is averaged


class Pace:
    def __init__(self) -> None:
        self._last_ns: int | None = None  # when the last step ended
        self._step_ns = 0.0

    def note(self, ended_ns: int) -> None:
        """A step ended then."""
        if self._last_ns is not None:
            step_ns = ended_ns - self._last_ns
            # Behind a pause, or a long step, it begins anew.
            is_known = 0.0 < self._step_ns <= LONGEST_STEP_NS
            self._step_ns += (step_ns - self._step_ns) / (STEPS if is_known else 1.0)
        self._last_ns = ended_ns

    def sleep_ns(self, now_ns: int) -> int | None:
        """How long to sleep before the next look. None: steps are long, or there are none; let the
        other thread wake this one.
        """
        if self._last_ns is None or not 0.0 < self._step_ns <= LONGEST_STEP_NS:
            return None
        left_ns = self._last_ns + int(self._step_ns) - now_ns
        if left_ns < -PATIENCE_NS:
            return None
        return max(0, left_ns) + BEHIND_NS
