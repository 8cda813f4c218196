"""The counters of one server over a run: what they say of every round, and whether they agree with
the client.

The one idea: counters are read between rounds, never while time is measured. If one arm alone sends
to the server, the growth over a round is the arm's own, and gives its acceptance where the answers
do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from toolkit.bench.counters import (
    SETTLE_S,
    client_counts,
    counted_acceptance,
    has_speculation,
    reconcile,
    settled,
)
from toolkit.client import RequestTiming
from toolkit.records.measured import Acceptance, CounterCheck

__all__ = ["Meter"]

# Counters that differ for another reason than a delay are waited for this long.
SHORT_SETTLE_S = 0.3
Answers = Sequence[RequestTiming | None]  # None: a request that failed


class Meter:
    """Reads the counters of the server that these arms send to."""

    def __init__(self, arms: Sequence[str], read: Callable[[], Mapping[str, float]]) -> None:
        self.arms = tuple(arms)
        self._source = read
        self._now = self._window = self._round = read()
        self._is_disturbed = False

    def warmed_up(self, answers: Answers) -> None:
        """Begin the window after the warm-up. Counts are published with a delay, and those of the
        warm-up must not fall into it.
        """
        self._compare(answers, self._window)
        self._window = self._round = settled(self._read)

    def round_ended(self, answers: Answers) -> Acceptance | None:
        """The acceptance of this round; None if the answers tell it themselves, if several arms
        share the server, or if it does not count speculation.
        """
        is_told = any(
            answer is not None and answer.statistics.drafted is not None for answer in answers
        )
        if is_told or len(self.arms) > 1 or not has_speculation(self._round):
            return None
        self._compare(answers, self._round)
        before, self._round = self._round, self._now
        return counted_acceptance(self._now, before)

    def checks(self, answers: Answers) -> tuple[CounterCheck, ...]:
        """The growth over the whole window beside the client's own counts."""
        return self._compare(answers, self._window)

    def _read(self) -> Mapping[str, float]:
        self._now = self._source()
        return self._now

    def _compare(self, answers: Answers, before: Mapping[str, float]) -> tuple[CounterCheck, ...]:
        answered = [answer for answer in answers if answer is not None]
        expected = client_counts(answered, known=before)
        if not expected:
            self._read()
            return ()
        # If requests failed, the counts hardly ever agree, and waiting does not help.
        is_whole = len(answered) == len(answers) and not self._is_disturbed
        settle_s = SETTLE_S if is_whole else SHORT_SETTLE_S
        checks = reconcile(self._read, before, expected, settle_s=settle_s)
        self._is_disturbed |= not all(check.matches for check in checks)
        return checks
