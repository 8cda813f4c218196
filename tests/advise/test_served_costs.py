"""What a client timed on servers becomes the cost of every draft length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from toolkit.advise.cost import ServedSteps, ServedTimes, served_costs

LENGTHS = range(1, 9)


def times(
    step_ms: Sequence[float], drafted: float, first_token_ms: float = 50.0, batch: int = 1
) -> ServedTimes:
    steps = ServedSteps(1e6 * np.array(step_ms), np.full(len(step_ms), drafted))
    return ServedTimes({batch: steps}, np.array([1e6 * first_token_ms]))


def test_lengths_lie_between_what_the_servers_drafted() -> None:
    """Speculation takes 2 ms by itself and 1 ms for every drafted token."""
    plain, short, long = times([10, 12], 0), times([13, 15], 1), times([20, 22], 8, 70.0)
    costs = served_costs(plain, [short, long], draft_lens=LENGTHS)
    assert costs.source == "measured on the server"
    assert costs.samples[1, 0].tolist() == [10e6, 12e6]
    for length in LENGTHS:
        assert costs.samples[1, length] == pytest.approx([1e6 * (12 + length), 1e6 * (14 + length)])
        row = costs.row(1, length)
        assert row.verify_ms == pytest.approx(10.5)
        assert row.draft_ms == pytest.approx(2 + length)
        assert (row.host_ms, row.samples) == (0.0, 2)
    assert costs.row(1, 0).draft_ms == 0.0
    assert costs.prefill_ns == {0: 50e6, 8: 70e6}
    assert costs.batches == (1,)


def test_prompt_lookup_is_drawn_out_from_the_drafts_that_it_found() -> None:
    """On average 4 tokens were drafted and took 2 ms, so 8 take 4 ms."""
    costs = served_costs(times([10], 0), [times([12], 4)], draft_lens=LENGTHS)
    assert costs.step_ns(1, 2) == pytest.approx(11e6)
    assert costs.step_ns(1, 4) == pytest.approx(12e6)
    assert costs.step_ns(1, 8) == pytest.approx(14e6)


def test_noise_does_not_make_longer_drafts_cheaper() -> None:
    costs = served_costs(times([10], 0), [times([9.8], 0.5)], draft_lens=LENGTHS)
    assert {costs.step_ns(1, length) for length in LENGTHS} == {10e6}


def test_lookup_that_found_nothing_costs_what_its_steps_cost() -> None:
    costs = served_costs(times([10], 0), [times([11], 0)], draft_lens=LENGTHS)
    assert {costs.step_ns(1, length) for length in LENGTHS} == {11e6}
    assert costs.step_ns(1, 0) == 10e6


def test_batch_sizes_are_kept_apart() -> None:
    plain = ServedTimes(
        {
            1: ServedSteps(np.array([10e6]), np.zeros(1)),
            4: ServedSteps(np.array([20e6]), np.zeros(1)),
        },
        np.array([1e6]),
    )
    drafting = ServedTimes(
        {
            1: ServedSteps(np.array([18e6]), np.full(1, 8)),
            4: ServedSteps(np.array([60e6]), np.full(1, 8)),
        },
        np.array([1e6]),
    )
    costs = served_costs(plain, [drafting], draft_lens=LENGTHS)
    assert costs.batches == (1, 4)
    assert (costs.step_ns(1, 4), costs.step_ns(4, 4)) == (14e6, 40e6)
