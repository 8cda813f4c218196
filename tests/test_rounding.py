"""A figure beside its limit shows on which side it lies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.rounding import decimals, size


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


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (12, "12 B"),
        (999, "999 B"),
        (2048, "2.05 kB"),
        (9_996, "10.0 kB"),
        (81.26e6, "81.3 MB"),
        (999.4e6, "999 MB"),
        (999.6e6, "1.00 GB"),
        (141e9, "141 GB"),
        (12_345e9, "12,345 GB"),
    ],
)
def test_a_size_has_three_digits(num_bytes: float, text: str) -> None:
    assert size(num_bytes) == text
