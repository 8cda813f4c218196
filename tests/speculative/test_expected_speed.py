"""How fast a batch is expected to be, and which draft lengths make it fastest."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.support.draft_costs import LONGEST, Costs
from toolkit.speculative.expected_speed import Speeds


@settings(max_examples=200)
@given(
    alphas=st.lists(st.floats(0.01, 0.99), min_size=1, max_size=3),
    draft=st.floats(0.001, 0.5),
    per_row=st.floats(0.0, 1.0),
    least_gain=st.sampled_from((1.0, 1.01)),
)
def test_a_batch_is_nearly_as_fast_as_any_choice_of_lengths(
    alphas: list[float], draft: float, per_row: float, least_gain: float
) -> None:
    speeds = Speeds(Costs(draft=draft, per_row=per_row), 1.0)
    every = itertools.product(range(LONGEST + 1), repeat=len(alphas))
    fastest = max(speeds.of(alphas, lengths, ()) for lengths in every)
    plan = speeds.best(alphas, [LONGEST] * len(alphas), (), least_gain)
    assert plan.tokens_per_ns == pytest.approx(speeds.of(alphas, plan.draft_lens, ()))
    if any(plan.draft_lens):
        assert plan.tokens_per_ns >= 0.98 * fastest
    else:
        assert plan.tokens_per_ns >= 0.98 * fastest / least_gain


@given(
    alpha=st.floats(0.0, 1.0),
    trust=st.floats(0.2, 1.2),
    rows=st.integers(1, 16),
    longest=st.integers(1, LONGEST),
    verify=st.floats(0.1, 1.0),
    fixed=st.lists(st.integers(0, LONGEST), max_size=3),
    least_gain=st.sampled_from((1.0, 1.01)),
)
def test_whether_a_draft_would_pay_is_what_the_speeds_say(
    alpha: float,
    trust: float,
    rows: int,
    longest: int,
    verify: float,
    fixed: list[int],
    least_gain: float,
) -> None:
    """Rows that are alike are compared by a shorter way."""
    costs = Costs(tuple(1.0 + verify * width for width in range(LONGEST + 1)), per_row=0.3)
    speeds = Speeds(costs, trust)
    least = least_gain * speeds.of([alpha] * rows, [0] * rows, fixed)
    best = max(speeds.of([alpha] * rows, [k] * rows, fixed) for k in range(1, longest + 1))
    assume(abs(best - least) > 1e-9 * least)
    gain = speeds.gain(alpha, rows, longest, fixed, least_gain)
    assert gain == pytest.approx(best / least - 1.0)
    assert (gain > 0.0) == (best > least)
