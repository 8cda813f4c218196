"""Three outcomes: an interval that straddles its limit is INCONCLUSIVE, which is not PASS."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from toolkit.records.measured import Gate
from toolkit.words import Verdict

__all__ = ["FAIL", "INCONCLUSIVE", "NOT_JUDGED", "PASS", "outcome", "verdict"]

PASS: Final = "PASS"
FAIL: Final = "FAIL"
INCONCLUSIVE: Final = "INCONCLUSIVE"
NOT_JUDGED: Final = "NOT JUDGED"


def outcome(low: float, high: float, limit: float, *, at_least: bool) -> Verdict:
    """PASS when the whole interval is on the good side of the limit (or on it), FAIL when none
    of it is.
    """
    good, bad = (low >= limit, high < limit) if at_least else (high <= limit, low > limit)
    return PASS if good else FAIL if bad else INCONCLUSIVE


def verdict(gates: Iterable[Gate]) -> Verdict:
    """FAIL if any failed, else INCONCLUSIVE if any is or none was judged, else PASS."""
    outcomes = {gate.outcome for gate in gates}
    undecided = INCONCLUSIVE in outcomes or outcomes == {NOT_JUDGED}
    return FAIL if FAIL in outcomes else INCONCLUSIVE if undecided else PASS
