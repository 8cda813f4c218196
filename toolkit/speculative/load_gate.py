"""Whether requests that are served at once may draft, where each is served by an instance (a
process) of its own that sees only its own calls.

Under load an instance that goes by its own rounds drafts too much: its round takes little longer
with drafts, and the others, whom they hold up, do the same. So the instances decide together, and
by what all of them gain. At each load none drafts for an epoch, and for another one all do, each as
much as its own rounds tell it. What gives more tokens per second goes on, and the other one is
tried again now and then, so rarely that it costs a small share of the time. A request alone is not
held back.

The instances share some memory. Each shows in a byte of its own whether it is at work, and counts
in numbers of its own what it has given; one of them, the first at work, ends an epoch and decides.
So no number has two writers, and there is no lock. Only of Python's standard library.
"""

from __future__ import annotations

import math

__all__ = ["LoadGate"]

MOST_INSTANCES = 64
# What an instance does. OTHER: it serves a request that decides nothing.
IDLE, DECIDING, OTHER = range(3)
LOADS = MOST_INSTANCES.bit_length()  # one instance at work, 2, up to 4, up to 8, ...
EPOCH_TOKENS = 32  # of each instance at work
LEAST_GAIN = 0.02  # of drafting, to be worth it
TRIAL_SHARE = 0.005  # of the time, that is lost to trying what is slower
LEAST_EPOCHS, MOST_EPOCHS = 8, 512  # between two trials
# The numbers of a load: what is done; the epochs until the other is tried, 0 in a trial; what all
# had given when this epoch began, in tokens and nanoseconds; tokens per nanosecond in the last one
# that was no trial; and how many times as fast drafting is, 0 while that is not known.
NUMBERS = 6
ARM, UNTIL_TRIAL, TOKENS, NS, USUAL_RATE, GAIN = range(NUMBERS)
PLAIN, DRAFTING = 0, 1
COUNTERS = LOADS * MOST_INSTANCES  # of tokens; as many of nanoseconds follow


class LoadGate:
    """As one instance sees it. `look` says what holds now, and `note` what was seen then."""

    SIZE = MOST_INSTANCES + 8 * (LOADS * NUMBERS + 2 * COUNTERS)  # in bytes; a number takes 8

    def __init__(self, memory: bytearray | memoryview | None = None, place: int = 0) -> None:
        """memory: SIZE bytes that the instances share, zeros at first; None: there are no others.
        place: of this instance, from 0 on.
        """
        view = memoryview(bytearray(self.SIZE) if memory is None else memory)
        self._at_work = view[:MOST_INSTANCES]
        numbers = view[MOST_INSTANCES:].cast("d")
        self._numbers = numbers[: LOADS * NUMBERS]
        self._given = numbers[LOADS * NUMBERS :]
        self._place = place % MOST_INSTANCES
        self._seen = 0, DRAFTING

    def begin(self, *, decides: bool = True) -> None:
        """This instance serves a request. decides: and asks whether it may draft."""
        self._at_work[self._place] = DECIDING if decides else OTHER

    def end(self) -> None:
        """It has served it."""
        self._at_work[self._place] = IDLE

    def look(self) -> bool:
        """Whether this instance may draft now."""
        self._seen = self._now()
        return self._seen[1] == DRAFTING

    @property
    def is_alone(self) -> bool:
        """Whether no other instance is at work, as when `look` looked."""
        return self._seen[0] == 0 and not self.has_changed()

    def has_changed(self) -> bool:
        """Whether something else holds than what `look` saw."""
        return self._now() != self._seen

    def note(self, tokens: int, ns: int) -> None:
        """Since `look`, or the last note, this instance has given so many tokens, in so long."""
        load, _ = self._seen
        if load == 0 or self.has_changed():
            return
        at = load * MOST_INSTANCES + self._place
        self._given[at] += tokens
        self._given[COUNTERS + at] += ns
        at_work = self._at_work.tobytes()
        if at_work.find(DECIDING) == self._place:
            self._end_epoch(load, EPOCH_TOKENS * _count(at_work))

    def _now(self) -> tuple[int, int]:
        """The load, and what is done at it."""
        load = max(0, _count(self._at_work.tobytes()) - 1).bit_length()
        return load, DRAFTING if load == 0 else int(self._numbers[load * NUMBERS + ARM])

    def _end_epoch(self, load: int, least_tokens: int) -> None:
        """End it if all have given so many tokens in it. A trial is compared with the epoch before
        it, since the machine's speed changes.
        """
        numbers, at = self._numbers, load * NUMBERS
        first = load * MOST_INSTANCES
        tokens = sum(self._given[first : first + MOST_INSTANCES])
        if tokens - numbers[at + TOKENS] < least_tokens:
            return
        ns = sum(self._given[COUNTERS + first : COUNTERS + first + MOST_INSTANCES])
        rate = (tokens - numbers[at + TOKENS]) / max(1.0, ns - numbers[at + NS])
        numbers[at + TOKENS], numbers[at + NS] = tokens, ns
        arm, usual_rate = int(numbers[at + ARM]), numbers[at + USUAL_RATE]
        if numbers[at + UNTIL_TRIAL] == 0 and usual_rate > 0.0:
            self._learn(at, rate / usual_rate if arm == DRAFTING else usual_rate / rate)
            return
        numbers[at + USUAL_RATE] = rate
        numbers[at + UNTIL_TRIAL] = max(0, numbers[at + UNTIL_TRIAL] - 1)
        if numbers[at + UNTIL_TRIAL] == 0:
            numbers[at + ARM] = 1 - arm

    def _learn(self, at: int, gain: float) -> None:
        """A trial shows that drafting is so many times as fast."""
        numbers = self._numbers
        known = numbers[at + GAIN]
        gain = math.sqrt(gain * known) if known else gain
        arm, known_arm = _better(gain), _better(known)
        numbers[at + GAIN], numbers[at + ARM] = gain, arm
        lost = max(gain, 1.0 / gain) - 1.0  # of an epoch, by a trial
        epochs = max(LEAST_EPOCHS, min(int(lost / TRIAL_SHARE), MOST_EPOCHS))
        # What contradicts what was known may be luck.
        numbers[at + UNTIL_TRIAL] = LEAST_EPOCHS if known and arm != known_arm else epochs


def _better(gain: float) -> int:
    return DRAFTING if gain > 1.0 + LEAST_GAIN else PLAIN


def _count(at_work: bytes) -> int:
    return len(at_work) - at_work.count(IDLE)
