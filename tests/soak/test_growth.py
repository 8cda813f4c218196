"""A leak is told from a heap that has found its size."""

from __future__ import annotations

import numpy as np
import pytest

from tests.soak.growth import GROWTH, growth_per_request

MIB = 2**20


@pytest.mark.parametrize(
    ("memory", "leaks"),
    [
        ([400, 400, 400, 400, 400], False),
        ([300, 380, 380, 380, 380], False),  # a heap that grows in the second round, and stays
        ([300, 330, 330, 370, 370], False),  # or once more, later
        ([300, 340, 330, 345, 338], False),  # or comes and goes
        ([300, 301, 302, 303, 304], True),  # 10 KiB a request
        ([300, 341, 335, 348, 361], True),  # a leak, while the heap shrinks once
    ],
)
def test_only_growth_that_goes_on_is_a_leak(memory: list[int], leaks: bool) -> None:
    grown = growth_per_request([MIB * size for size in memory], 100)
    assert (grown > GROWTH) == leaks


def test_what_every_request_leaves_is_found_among_the_noise_of_a_heap() -> None:
    random = np.random.default_rng(0)
    noise = random.integers(-MIB // 4, MIB // 4, 5)
    leak = 12 * 1024 * 100 * np.arange(5)
    assert growth_per_request(list(noise), 100) < GROWTH
    assert growth_per_request(list(noise + leak), 100) > GROWTH
