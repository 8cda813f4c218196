"""How bad a difference from plain decoding is, by how far the chosen tokens lie below the best
one.
"""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.words import DivergenceKind

__all__ = ["SUSPICIOUS", "judge_gaps"]

# near-tie margins up to which a choice between the two best is suspicious and not broken yet
SUSPICIOUS = 10.0


def judge_gaps(
    gaps: Sequence[float], ranks: Sequence[int], near_tie_margin: float
) -> DivergenceKind:
    """The class of chosen tokens that lie `gaps` logits below the reference's best and have
    these places.
    """
    if max(gaps) <= near_tie_margin:
        return "equivalent"
    return (
        "suspicious" if max(gaps) <= SUSPICIOUS * near_tie_margin and max(ranks) <= 1 else "broken"
    )
