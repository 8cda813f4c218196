"""When the way of decoding that is not used is tried."""

from __future__ import annotations

import pytest

from toolkit.speculative.trials import (
    FIRST_INTERVAL,
    LEAST_INTERVAL,
    LEAST_PROMISE,
    MOST_LOST_STEPS,
    TRIAL_SHARE,
    TRIAL_STEPS,
    Trials,
)


def steps_until_due(trials: Trials, rows: int) -> int:
    for steps in range(100_000):
        if trials.is_due(rows):
            return steps
        trials.pass_step(rows)
    raise AssertionError("never")


def test_a_load_is_tried_soon_and_then_so_rarely_that_it_costs_its_share() -> None:
    trials = Trials(64)
    assert steps_until_due(trials, 64) == FIRST_INTERVAL
    assert trials.begin(64, promise=0.8, further_steps=2.0, drafts=True)
    lost = TRIAL_STEPS * 0.25 + 2.0
    assert steps_until_due(trials, 64) == lost / TRIAL_SHARE


def test_what_trials_confirm_is_tried_ever_more_rarely_until_it_changes() -> None:
    trials, intervals = Trials(4), []
    steps_until_due(trials, 4)
    for drafts in (True, True, True, True, True, True, False, False):
        trials.begin(4, promise=1.1, further_steps=0.0, drafts=drafts)
        intervals.append(steps_until_due(trials, 4) // LEAST_INTERVAL)
    assert intervals == [1, 2, 4, 8, 16, 16, 1, 2]


def test_loads_are_told_apart_by_powers_of_two() -> None:
    trials = Trials(64)
    steps_until_due(trials, 64)
    assert trials.is_due(33)
    assert not any(trials.is_due(rows) for rows in (1, 2, 4, 32))


def test_a_trial_takes_its_steps_and_ends_at_once_at_another_load() -> None:
    trials = Trials(64)
    trials.begin(16, promise=1.0, further_steps=0.0, drafts=True)
    # The first of its steps is the one that it was begun in.
    assert [trials.pass_step(rows) for rows in (16, 12, *[18] * (TRIAL_STEPS - 3))] == [True] * (
        TRIAL_STEPS - 1
    )
    assert not trials.pass_step(16)
    for rows in (19, 7):
        trials.begin(16, promise=1.0, further_steps=0.0, drafts=True)
        assert not trials.pass_step(rows)
        assert not trials.is_on


@pytest.mark.parametrize(
    ("promise", "further"), [(0.0, 0.0), (LEAST_PROMISE - 0.01, 0.0), (1.0, MOST_LOST_STEPS + 1)]
)
def test_what_cannot_pay_or_costs_too_much_is_not_tried(promise: float, further: float) -> None:
    trials = Trials(4)
    steps_until_due(trials, 4)
    assert not trials.begin(4, promise, further, drafts=False)
    assert not trials.is_on
    assert trials.is_due(4)  # that may change
