"""The common vocabulary size: no trim may cut a row in use, whatever the sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.errors import PairingError
from toolkit.pairing.padding import common_vocab_size


def test_qwen_sizes() -> None:
    for tp_size in (1, 2, 4, 8, 16, 32):
        assert common_vocab_size({"target": 152064, "draft": 151936}, 151665, tp_size) == 151936


@given(st.integers(1, 400), st.integers(0, 200), st.integers(0, 200), st.integers(1, 16))
def test_nothing_in_use_is_cut_and_no_row_is_invented(
    needed: int, above: int, more: int, tp_size: int
) -> None:
    rows = {"target": needed + above, "draft": needed + more}
    try:
        size = common_vocab_size(rows, needed, tp_size)
    except PairingError:
        assert above != more
        assert not any(size % tp_size == 0 for size in range(needed, min(rows.values()) + 1))
        return
    assert needed <= size <= min(rows.values())
    if above != more:
        assert size % tp_size == 0
        assert size + tp_size > min(rows.values())  # no row more than needed is cut


def test_equal_sizes_stay_as_they_are_even_if_tensor_parallelism_does_not_divide_them() -> None:
    assert common_vocab_size({"target": 269, "draft": 269}, 258, 8) == 269


def test_the_refusal_has_a_hint() -> None:
    with pytest.raises(PairingError, match="choose a tp_size that divides 31"):
        common_vocab_size({"target": 33, "draft": 31}, 30, 8)
