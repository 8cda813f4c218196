"""What both ways take beside each other."""

from __future__ import annotations

import math
import random

import pytest

from toolkit.speculative.comparison import (
    FURTHER_ATTEMPTS,
    GIVEN_UP_STEPS,
    LEAST_STEPS,
    LEAST_WEIGHT,
    MOST_ATTEMPTS,
    MOST_CORRECTION,
    MOST_LUCK,
    MOST_STEPS,
    NOISE,
    UNSETTLED_DRAFTS,
    ComparedStep,
    Comparison,
)
from toolkit.speculative.costs import Figures, StepCosts
from toolkit.speculative.trials import UNSETTLED_STEPS

ROWS = 8


class Told:
    """Costs that take every step for one of 1,000 ns, but for `plain`, which was corrected."""

    def __init__(self) -> None:
        self.plain = dict.fromkeys(range(1, 17), 1.0)
        self.goes_on_plainly: bool | None = None

    def pace(self, step: ComparedStep) -> float:
        return step.ns / (1000.0 * (1.0 if step.drafting else self.plain[step.rows]))

    def correct_plain(self, rows: range, factor: float, *, goes_on_plainly: bool) -> None:
        self.goes_on_plainly = goes_on_plainly
        for count in rows:
            self.plain[count] *= factor


def step(ns: float, *, drafts: bool, rows: int = ROWS) -> ComparedStep:
    return ComparedStep(rows, [rows] if drafts else [], 0.0, read=0, fed=0, ns=round(ns))


def take(
    comparison: Comparison, count: int, ns: float, *, drafts: bool, unsettled_ns: float = 9e9
) -> None:
    for _ in range(UNSETTLED_DRAFTS if drafts else UNSETTLED_STEPS):
        comparison.note(step(unsettled_ns, drafts=drafts))
    for _ in range(count):
        comparison.note(step(ns, drafts=drafts))


def compare(comparison: Comparison, plain_ns: float, drafts_ns: float, *, tried: bool) -> None:
    """tried: whether the trial is one of drafts."""
    comparison.begin(ROWS)
    for drafts, count in ((tried, LEAST_STEPS), (not tried, MOST_STEPS)):
        take(comparison, count, drafts_ns if drafts else plain_ns, drafts=drafts)
        comparison.end_trial()


@pytest.mark.parametrize("tried", [False, True])
def test_plain_steps_are_corrected_by_what_both_ways_take(tried: bool) -> None:
    comparison = Comparison(16, costs := Told())
    for _ in range(20):
        compare(comparison, 1200.0, 1000.0, tried=tried)
        assert not comparison.is_on and costs.goes_on_plainly is tried
    corrected = [rows for rows, factor in costs.plain.items() if factor != 1.0]
    assert corrected == [5, 6, 7, 8]
    assert costs.plain[ROWS] == pytest.approx(1.2, rel=0.01)


def test_a_first_comparison_counts_half_and_later_ones_less() -> None:
    comparison, seen = Comparison(16, costs := Told()), []
    doubts = [comparison.doubt(ROWS)]
    for _ in range(3):
        compare(comparison, 1210.0, 1000.0, tried=True)
        seen.append(costs.plain[ROWS])
        doubts.append(comparison.doubt(ROWS))
    assert seen == pytest.approx([1.21**share for share in (1 / 2, 2 / 3, 3 / 4)])
    assert doubts == pytest.approx([NOISE / count**0.5 for count in (1, 2, 3, 4)])
    assert comparison.is_known(ROWS) and not comparison.is_known(2 * ROWS)


def test_what_was_rehearsed_makes_a_load_known_and_counts_no_further() -> None:
    """The next comparison, of a client's requests, counts as a third one."""
    comparison = Comparison(16, costs := Told())
    for _ in range(6):
        compare(comparison, 1000.0, 1000.0, tried=True)
    comparison.doubt_rehearsal()
    assert comparison.is_known(ROWS)
    assert comparison.doubt(ROWS) == pytest.approx(NOISE / 3**0.5)
    compare(comparison, 1200.0, 1000.0, tried=True)
    assert costs.plain[ROWS] == pytest.approx(1.2**0.25)


def test_what_has_changed_is_followed() -> None:
    comparison = Comparison(16, costs := Told())
    for _ in range(50):
        compare(comparison, 1100.0, 1000.0, tried=True)
    doubt, before = comparison.doubt(ROWS), costs.plain[ROWS]
    compare(comparison, 1000.0, 1100.0, tried=False)
    found = 1.0 / 1.1 / before
    assert costs.plain[ROWS] == pytest.approx(before * found**LEAST_WEIGHT)
    assert comparison.doubt(ROWS) == doubt == pytest.approx(NOISE / 3)


@pytest.mark.parametrize(("surprise", "counts"), [(0.99, LEAST_WEIGHT), (1.01, 0.5)])
def test_behind_what_luck_does_not_explain_nothing_is_known(surprise: float, counts: float) -> None:
    comparison = Comparison(16, costs := Told())
    for _ in range(50):
        compare(comparison, 1000.0, 1000.0, tried=True)
    drafts_ns = 1e6  # as exact as whole nanoseconds are
    compare(comparison, 1e6 * math.exp(surprise * MOST_LUCK), drafts_ns, tried=True)
    assert math.log(costs.plain[ROWS]) == pytest.approx(counts * surprise * MOST_LUCK, rel=1e-3)
    assert comparison.doubt(ROWS) == pytest.approx(NOISE / 3 if surprise < 1.0 else NOISE)
    assert comparison.is_known(ROWS) is (surprise < 1.0)
    for _ in range(FURTHER_ATTEMPTS):
        comparison.begin(ROWS)
    assert comparison.is_known(ROWS)


def test_of_requests_alone_all_is_known() -> None:
    assert Comparison(16, Told()).is_known(1)


def test_a_step_that_was_preempted_counts_little_and_nothing_counts_for_much() -> None:
    comparison = Comparison(16, costs := Told())
    comparison.begin(ROWS)
    take(comparison, MOST_STEPS, 1000.0, drafts=True)
    take(comparison, MOST_STEPS - 1, 1000.0, drafts=False)
    assert comparison.note(step(1e6, drafts=False))
    before = costs.plain[ROWS]
    assert before == pytest.approx((1.0 + 1.0 / MOST_STEPS) ** 0.5)
    compare(comparison, 9000.0, 1000.0, tried=True)
    assert costs.plain[ROWS] == pytest.approx(before * MOST_CORRECTION**0.5)


def test_a_trial_that_was_cut_off_compares_nothing() -> None:
    comparison = Comparison(16, Told())
    comparison.begin(ROWS)
    take(comparison, LEAST_STEPS - 1, 1000.0, drafts=True)
    comparison.end_trial()
    assert not comparison.is_on and comparison.doubt(ROWS) == NOISE


def test_a_load_whose_trials_are_all_cut_off_is_not_tried_so_often_for_ever() -> None:
    comparison = Comparison(16, Told())
    for _ in range(MOST_ATTEMPTS):
        assert not comparison.is_known(ROWS)
        comparison.begin(ROWS)
        comparison.end_trial()
    assert comparison.is_known(ROWS) and comparison.doubt(ROWS) == NOISE


def test_steps_of_another_load_are_left_out_and_are_not_waited_for_for_ever() -> None:
    comparison = Comparison(16, costs := Told())
    comparison.begin(ROWS)
    take(comparison, LEAST_STEPS, 1000.0, drafts=True)
    for _ in range(GIVEN_UP_STEPS - LEAST_STEPS - UNSETTLED_DRAFTS - 1):
        assert not comparison.note(step(1000.0, drafts=False, rows=2 * ROWS))
    assert comparison.note(step(1000.0, drafts=False, rows=2 * ROWS))
    assert not comparison.is_on and set(costs.plain.values()) == {1.0}


def test_steps_of_any_length_and_with_prompts_compare_by_their_figures() -> None:
    """Whatever the speed of the machine, which follows what is noted."""
    widths, draft_ns, reading_ns, host_ns = (0.0, 1e6, 1.5e6, 2e6), 1e5, 1e3, 4e4
    figures = Figures([[ns] * (ROWS + 1) for ns in widths], *[[draft_ns] * (ROWS + 1)] * 2)
    costs, draw = StepCosts(figures, 1.0, reading=reading_ns), random.Random(0)
    for _ in range(50):  # a machine that is slower than it was
        costs.note_step(ROWS, [], 0.0, 0, int(3e6), int(host_ns))
    host_ns = costs.step_ns(ROWS, 1.0) - costs._scale * widths[1]
    for _ in range(20):
        drafting = [draw.randint(1, ROWS)] * draw.randint(0, 1)
        read, fed = draw.randint(0, 60), draw.randint(0, 60)
        tokens = sum(drafting) + read
        took = widths[1] + tokens / ROWS * 0.5e6 + draft_ns * len(drafting) + fed * reading_ns
        host = host_ns * (1.0 + sum(drafting) / ROWS)
        compared = ComparedStep(ROWS, drafting, 0.0, read, fed, round(1.3 * took + host))
        assert costs.pace(compared) == pytest.approx(1.3, rel=1e-4)


@pytest.mark.parametrize("drafting", [[], [ROWS]])
def test_a_step_that_took_no_longer_than_the_host_is_said_to_has_a_pace(
    drafting: list[int],
) -> None:
    """It is divided by."""
    figures = Figures([[1e6] * (ROWS + 1)] * 3, *[[1e5] * (ROWS + 1)] * 2)
    costs = StepCosts(figures, 1.0)
    for ns in (0, round(costs._host_ns(ROWS, 1.0 + len(drafting)))):
        assert costs.pace(ComparedStep(ROWS, drafting, 0.0, read=0, fed=0, ns=ns)) > 0.0
