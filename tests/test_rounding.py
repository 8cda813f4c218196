"""A figure beside its limit shows on which side it lies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.rounding import decimals


@pytest.mark.parametrize(
    ("values", "limit", "digits"),
    [
        ((1.28, 1.15, 1.43), 1.15, 2),  # a tie is a tie
        ((1.28, 1.148, 1.43), 1.15, 3),
        ((1.28, 1.1496, 1.43), 1.15, 4),
        ((1.28,), None, 2),
        ((1.15 + 1e-9,), 1.15, 6),  # to anybody
        ((1.2, 1.3), 1.15, 2),
    ],
)
def test_digits_are_added_only_where_rounding_hides_the_side(
    values: tuple[float, ...], limit: float | None, digits: int
) -> None:
    assert decimals(values, limit) == digits


@given(st.floats(0, 100), st.floats(0, 100))
def test_what_differs_visibly_is_printed_so(value: float, limit: float) -> None:
    if abs(value - limit) > 1e-5:
        digits = decimals([value], limit)
        assert f"{value:.{digits}f}" != f"{limit:.{digits}f}"
