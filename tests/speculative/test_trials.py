"""When the way of decoding that is not used is tried."""

from __future__ import annotations

import pytest

from toolkit.speculative.trials import (
    ASK_AGAIN_STEPS,
    BATCH_SHARE,
    CHANGE_THAT_MATTERS,
    CHANGED_SHARE,
    DOUBTFUL_PROMISE,
    DOUBTFUL_SHARE,
    FIRST_BLOCKS,
    FIRST_TRIALS,
    LEAST_INTERVAL,
    LEAST_PROMISE,
    MOST_LOST_STEPS,
    PLAIN_TRIAL_STEPS,
    SETTLING_LOSS,
    TRIAL_SHARE,
    TRIAL_STEPS,
    Trials,
)

STEP_NS = 600_000.0
FURTHER = 2.0  # steps
# Steps that are lost where a trial, with drafts or without, promises 0.8 of the speed.
LOST_DRAFTING = TRIAL_STEPS * 0.25 + SETTLING_LOSS + FURTHER
LOST_PLAIN = PLAIN_TRIAL_STEPS * 0.25 + SETTLING_LOSS + FURTHER


def steps_until_due(trials: Trials, rows: int) -> int:
    for steps in range(100_000):
        if trials.is_due(rows):
            return steps
        trials.pass_step(rows)
    raise AssertionError("never")


def steps_until_begun(
    trials: Trials,
    rows: int,
    promise: float,
    further_steps: float = 0.0,
    *,
    drafts: bool,
    blocks: int = 0,
    step_ns: float = STEP_NS,
) -> int:
    steps = 0
    while True:
        steps += steps_until_due(trials, rows)
        if trials.begin(
            rows, promise, further_steps, step_ns=step_ns, drafts=drafts, blocks=blocks
        ):
            return steps


def take(trials: Trials, rows: int) -> int:
    """The steps of a trial that was begun, to its end."""
    steps = 1
    while trials.pass_step(rows):
        steps += 1
    return steps


def test_a_load_is_tried_so_rarely_that_it_costs_its_share_the_first_time_too() -> None:
    trials = Trials(64)
    assert steps_until_begun(trials, 64, 0.8, FURTHER, drafts=False) == LOST_DRAFTING / TRIAL_SHARE
    trials.end()
    assert steps_until_begun(Trials(64), 64, 1.25, drafts=False) == LEAST_INTERVAL


def test_drafts_are_compared_with_plain_steps_soon_after_they_begin() -> None:
    trials = Trials(64)
    for _ in range(100):
        trials.pass_step(64)  # plain ones, behind which plain ones compare nothing
    assert not trials.begin(64, 0.8, FURTHER, step_ns=STEP_NS, drafts=True, blocks=0)
    assert steps_until_due(trials, 64) == FIRST_BLOCKS
    assert trials.begin(64, 0.8, FURTHER, step_ns=STEP_NS, drafts=True, blocks=FIRST_BLOCKS)
    assert take(trials, 64) == PLAIN_TRIAL_STEPS
    begun = steps_until_begun(trials, 64, 0.8, FURTHER, drafts=True, blocks=FIRST_BLOCKS)
    assert begun == 2 * LOST_PLAIN / BATCH_SHARE - PLAIN_TRIAL_STEPS


def test_a_first_trial_that_was_cut_off_is_made_again_a_few_times() -> None:
    trials, intervals = Trials(64), []
    for _ in range(FIRST_TRIALS + 1):
        intervals.append(steps_until_begun(trials, 64, 0.8, drafts=True, blocks=FIRST_BLOCKS))
        trials.pass_step(8)
        assert not trials.is_on
    assert intervals[0] == FIRST_BLOCKS
    assert max(intervals[1:-1]) <= LEAST_INTERVAL < intervals[-1]


def test_what_trials_confirm_is_tried_ever_more_rarely_until_it_changes() -> None:
    trials, intervals = Trials(4), []
    for drafts in (False, False, False, False, False, False, True, True):
        intervals.append(steps_until_begun(trials, 4, 1.25, drafts=drafts) // LEAST_INTERVAL)
    assert intervals == [1, 2, 4, 8, 16, 16, 1, 2]


def test_a_load_that_has_changed_need_not_wait_for_what_its_last_trials_confirmed() -> None:
    trials = Trials(4)
    for _ in range(5):
        steps_until_begun(trials, 4, 1.25, drafts=True)
        trials.end()
    steps_until_due(trials, 4)
    assert not trials.begin(4, 1.25, 0.0, step_ns=STEP_NS, drafts=True)
    assert steps_until_begun(trials, 4, 1.25, drafts=False) == ASK_AGAIN_STEPS


def test_drafts_that_began_are_tried_against_plain_steps_before_long() -> None:
    trials = Trials(4)
    steps_until_begun(trials, 4, 0.8, FURTHER, drafts=False)
    trials.end()
    assert steps_until_begun(trials, 4, 0.8, FURTHER, drafts=True) == LEAST_INTERVAL
    trials.end()
    assert steps_until_begun(trials, 4, 0.8, FURTHER, drafts=True) > 10 * LEAST_INTERVAL


@pytest.mark.parametrize("factor", [1 + 2 * CHANGE_THAT_MATTERS, 1 - 2 * CHANGE_THAT_MATTERS])
def test_on_a_machine_that_has_changed_a_trial_may_come_sooner(factor: float) -> None:
    trials = Trials(4)
    for _ in range(3):
        steps_until_begun(trials, 4, 0.8, FURTHER, drafts=False)
        steps = take(trials, 4)
    begun = steps_until_begun(trials, 4, 0.8, FURTHER, drafts=False, step_ns=factor * STEP_NS)
    assert begun + steps == LOST_DRAFTING / CHANGED_SHARE


def test_a_machine_that_changes_between_two_speeds_is_another_once_for_each() -> None:
    trials, intervals, steps = Trials(4), [], 0
    for factor in (1.0, 2.0, 1.0, 2.0, 1.5, 1.0, 4.0):
        step_ns = factor * STEP_NS
        steps += steps_until_begun(trials, 4, 0.8, FURTHER, drafts=False, step_ns=step_ns)
        intervals.append(round(steps * TRIAL_SHARE / LOST_DRAFTING, 1))
        steps = take(trials, 4)
    assert intervals == [1.0, 0.5, 2.0, 4.0, 8.0, 16.0, 0.5]


def test_what_is_found_anew_is_confirmed_at_each_speed_of_the_machine() -> None:
    trials = Trials(4)
    for drafts, factor in ((False, 1.0), (False, 2.0), (True, 1.0)):
        step_ns = factor * STEP_NS
        steps_until_begun(trials, 4, 0.8, FURTHER, drafts=drafts, step_ns=step_ns)
        steps = take(trials, 4)
    begun = steps_until_begun(trials, 4, 0.8, FURTHER, drafts=True, step_ns=2.0 * STEP_NS)
    assert begun + steps == round(LOST_PLAIN / BATCH_SHARE)


def test_a_speed_at_which_a_trial_was_cut_off_is_still_another_one() -> None:
    trials = Trials(4)
    steps_until_begun(trials, 4, 0.8, FURTHER, drafts=False)
    take(trials, 4)
    for cut in (lambda: trials.pass_step(1), lambda: [trials.join() for _ in range(2)]):
        begun = steps_until_begun(trials, 4, 0.8, FURTHER, drafts=False, step_ns=2.0 * STEP_NS)
        assert begun == pytest.approx(LOST_DRAFTING / CHANGED_SHARE, abs=TRIAL_STEPS)
        cut()
        take(trials, 4)


def test_a_request_alone_loses_less_to_trials_than_a_batch_that_drafts() -> None:
    trials, intervals = Trials(4), []
    for rows in (1, 4):
        steps_until_begun(trials, rows, 0.8, FURTHER, drafts=True)
        steps = take(trials, rows)
        steps += steps_until_begun(trials, rows, 0.8, FURTHER, drafts=True)
        intervals.append(steps)
    assert intervals == [2 * LOST_PLAIN / share for share in (TRIAL_SHARE, BATCH_SHARE)]


@pytest.mark.parametrize("promise", [DOUBTFUL_PROMISE, DOUBTFUL_PROMISE - 0.01])
def test_where_little_is_known_what_may_pay_is_tried_sooner(promise: float) -> None:
    trials = Trials(4)
    lost = TRIAL_STEPS * (1.0 / promise - 1.0) + SETTLING_LOSS + FURTHER
    for _ in range(max(LEAST_INTERVAL, round(lost / DOUBTFUL_SHARE))):
        trials.pass_step(4)
    begins = trials.begin(4, promise, FURTHER, step_ns=STEP_NS, drafts=False, little_is_known=True)
    assert begins is (promise == DOUBTFUL_PROMISE)


@pytest.mark.parametrize("drafts", [False, True])
def test_half_of_the_requests_anew_end_a_trial_of_drafts_only(drafts: bool) -> None:
    """In one of plain steps those that join are decoded plainly, too. drafts: usually."""
    trials = Trials(4)
    steps_until_begun(trials, 4, 1.0, drafts=drafts)
    assert trials.pass_step(4)
    trials.join()
    assert trials.pass_step(4)
    trials.join()
    assert trials.is_on  # in this step
    assert trials.pass_step(4) is drafts


def test_loads_are_told_apart_by_powers_of_two() -> None:
    trials = Trials(64)
    steps_until_due(trials, 64)
    assert trials.is_due(33)
    assert not any(trials.is_due(rows) for rows in (1, 2, 4, 32))


def test_a_trial_takes_its_steps_and_ends_at_once_at_another_load() -> None:
    trials = Trials(64)
    steps_until_begun(trials, 16, 1.0, drafts=True)
    # The first of its steps is the one that it was begun in.
    assert [trials.pass_step(rows) for rows in (16, 12, *[18] * (PLAIN_TRIAL_STEPS - 3))] == [
        True
    ] * (PLAIN_TRIAL_STEPS - 1)
    assert not trials.pass_step(16)
    for rows in (19, 7):
        steps_until_begun(trials, 16, 1.0, drafts=True)
        assert not trials.pass_step(rows)
        assert not trials.is_on


@pytest.mark.parametrize(
    ("promise", "further"), [(0.0, 0.0), (LEAST_PROMISE - 0.01, 0.0), (1.0, MOST_LOST_STEPS + 1)]
)
def test_what_cannot_pay_or_costs_too_much_is_not_tried(promise: float, further: float) -> None:
    trials = Trials(4)
    steps_until_due(trials, 4)
    assert not trials.begin(4, promise, further, step_ns=STEP_NS, drafts=False)
    assert not trials.is_on
    assert steps_until_due(trials, 4) == ASK_AGAIN_STEPS  # that may change
