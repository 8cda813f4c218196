"""The alpha above which drafting pays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.advise.acceptance import expected_tokens
from toolkit.advise.choose import break_even_alpha


@given(st.floats(0.0, 0.999), st.integers(1, 16))
def test_break_even_alpha_is_the_one_that_gives_the_length(alpha: float, draft_len: int) -> None:
    assert break_even_alpha(expected_tokens(alpha, draft_len), draft_len) == pytest.approx(
        alpha, abs=1e-9
    )


def test_break_even_alpha_has_its_ends() -> None:
    assert break_even_alpha(4.0, 3) == 1.0
    assert break_even_alpha(4.1, 3) is None  # not even if all is accepted
    # With noisy times, a step with drafts may be shorter than one without.
    assert break_even_alpha(0.9, 3) == 0.0
