"""Judge how bad a difference from plain decoding is, by how far the chosen tokens lie below the
best one.
"""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.words import DivergenceKind

__all__ = ["SUSPICIOUS", "judge_gaps"]

# A choice between the two best tokens is suspicious, not broken, up to this many near-tie margins.
SUSPICIOUS = 10.0


def judge_gaps(
    gaps: Sequence[float], ranks: Sequence[int], near_tie_margin: float
) -> DivergenceKind:
    """Return the kind of a divergence whose chosen tokens lie `gaps` logits below the reference's
    best and have these ranks (0 is the best).
    """
    if max(gaps) <= near_tie_margin:
        return "equivalent"
    if max(gaps) <= SUSPICIOUS * near_tie_margin and max(ranks) <= 1:
        return "suspicious"
    return "broken"
