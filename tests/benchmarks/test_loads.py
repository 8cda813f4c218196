from __future__ import annotations

import pytest

from tests.benchmarks.bench_loads import Measured, note_arms, visits_of


@pytest.mark.parametrize("names", [("plain", "speculative"), ("baseline", "served")])
def test_arms_are_noted_whatever_bench_calls_them(names: tuple[str, str]) -> None:
    acceptances = [None, {"length": 3.2}]
    served = Measured()
    note_arms(
        served,
        [
            {"name": name, "failed": 0, "tokens_per_s": rate, "acceptance": acceptance}
            for name, rate, acceptance in zip(names, (100.0, 150.0), acceptances, strict=True)
        ],
    )
    assert served.rates == {"plain": [100.0], "speculative": [150.0]}
    assert served.acceptance_length == [3.2]


@pytest.mark.parametrize(
    ("load", "sizes"), [(1, [8] * 16), (4, [32] * 4), (16, [128] * 2), (64, [128] * 2)]
)
def test_a_round_has_so_many_requests_or_two_visits(load: int, sizes: list[int]) -> None:
    lines = [str(number) for number in range(200)]
    rounds = [visits_of(load, 128, turn, lines) for turn in range(2)]
    for visits in rounds:
        assert [len(visit.lines) for visit in visits] == sizes
    asked = [line for visits in rounds for visit in visits for line in visit.lines]
    assert asked == [lines[index % 200] for index in range(2 * sum(sizes))]
    numbers = [visit.number for visits in rounds for visit in visits]
    assert numbers == list(range(2 * len(sizes)))


def test_requests_that_fail_are_no_measurement() -> None:
    arms = [{"failed": failed, "errors": {"refused": failed}} for failed in (2, 0)]
    with pytest.raises(RuntimeError, match=r"2 requests failed: .*refused"):
        note_arms(Measured(), arms)
