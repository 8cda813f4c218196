from __future__ import annotations

import pytest

from tests.benchmarks.bench_loads import Measured, note_arms


@pytest.mark.parametrize("names", [("plain", "speculative"), ("baseline", "served")])
def test_arms_are_noted_whatever_bench_calls_them(names: tuple[str, str]) -> None:
    acceptances = [None, {"length": 3.2}]
    served = Measured()
    note_arms(
        served,
        [
            {"name": name, "tokens_per_s": rate, "acceptance": acceptance}
            for name, rate, acceptance in zip(names, (100.0, 150.0), acceptances, strict=True)
        ],
    )
    assert served.rates == {"plain": [100.0], "speculative": [150.0]}
    assert served.acceptance_length == [3.2]
