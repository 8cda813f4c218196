"""Exact bounds on a rate, and the prompts that a bound needs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.bench.proportions import clopper_pearson, prompts_needed


@given(st.integers(1, 400), st.data())
def test_clopper_pearson_solves_the_binomial_tails(trials: int, data: st.DataObject) -> None:
    from scipy.stats import binom, binomtest

    events = data.draw(st.integers(0, trials))
    low, high = clopper_pearson(events, trials)
    assert 0 <= low <= events / trials <= high <= 1
    if events < trials:
        assert binom.cdf(events, trials, high) == pytest.approx(0.05, rel=1e-6)
    if events > 0:
        assert binom.sf(events - 1, trials, low) == pytest.approx(0.05, rel=1e-6)
    exact = binomtest(events, trials).proportion_ci(confidence_level=0.90, method="exact")
    assert (low, high) == (pytest.approx(exact.low, abs=1e-9), pytest.approx(exact.high, abs=1e-9))


def test_rule_of_three() -> None:
    """No event in 300 bounds a rate by one percent."""
    assert clopper_pearson(0, 300)[1] == pytest.approx(0.00994, abs=1e-5)


@pytest.mark.parametrize(("limit", "events"), [(0.05, 0), (0.05, 1), (0.2, 7), (0.01, 2)])
def test_prompts_needed_is_the_smallest_number(limit: float, events: int) -> None:
    needed = prompts_needed(limit, events)
    assert needed is not None
    assert clopper_pearson(events, needed)[1] <= limit < clopper_pearson(events, needed - 1)[1]


def test_no_number_of_prompts_proves_a_rate_of_zero() -> None:
    assert prompts_needed(0.0, 0) is None


def test_prompts_are_counted_up_to_a_million() -> None:
    assert prompts_needed(3e-6, 0) == 998_576
    assert prompts_needed(2.9e-6, 0) is None
