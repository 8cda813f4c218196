"""The outcomes of gates and runs. An interval that contains its limit is INCONCLUSIVE, which is
not PASS.
"""

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
    """PASS if the whole interval is on the good side of the limit or on it, FAIL if none of it is,
    else INCONCLUSIVE.
    """
    is_good, is_bad = (low >= limit, high < limit) if at_least else (high <= limit, low > limit)
    if is_good:
        return PASS
    return FAIL if is_bad else INCONCLUSIVE


def verdict(gates: Iterable[Gate]) -> Verdict:
    """FAIL if any gate failed, else INCONCLUSIVE if any is or if none was judged, else PASS."""
    outcomes = {gate.outcome for gate in gates}
    if FAIL in outcomes:
        return FAIL
    is_undecided = INCONCLUSIVE in outcomes or outcomes == {NOT_JUDGED}
    return INCONCLUSIVE if is_undecided else PASS
