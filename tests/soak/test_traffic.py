"""The soak's own judgement: a wrong text is found, and rounding is not taken for one."""

from __future__ import annotations

import numpy as np
import pytest

from tests.soak.traffic import Reference, Verdict, compare
from toolkit.client import Completion, RequestTiming, Statistics

LOGITS = np.array([[5.0, 4.98, 0.0], [1.0, 2.0, 3.0]])


def timed(ids: tuple[int, ...], text: str) -> RequestTiming:
    return RequestTiming("prompt", text, ids, "length", 0, (), Statistics())


@pytest.mark.parametrize(
    ("ids", "text", "verdict"),
    [
        ((0, 2), "ab", "right"),
        ((0, 2), "a", "wrong"),
        ((0,), "a", "wrong"),
        ((1, 0), "cd", "near-tie"),
        ((2, 2), "zz", "wrong"),
        ((0, 1), "ac", "wrong"),
    ],
)
def test_a_greedy_text_is_judged_by_its_reference(
    ids: tuple[int, ...], text: str, verdict: Verdict
) -> None:
    known = Completion("ab", (0, 2), "length", None, Statistics())
    assert compare(Reference(known, LOGITS), timed(ids, text))[0] == verdict
