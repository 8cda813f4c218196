"""Which draft lengths are chosen: simulated texts and costs, without engines."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.draft_costs import HOST, LONGEST, VERIFY, Costs, between
from toolkit.speculative.adaptive import (
    AWAIT_STEPS,
    AWAIT_STEPS_PLAIN,
    DECIDE_EVERY_IDLE_STEPS,
    DECIDE_EVERY_STEPS,
    DOUBTFUL_MISSES,
    EXPECTATION_THAT_MATTERS,
    GAIN_WORTH_PROBING,
    IDLE_DECISIONS,
    JOINING_STEPS,
    LEAST_BATCH_GAIN,
    MOST_CONFIRMATIONS,
    PERFECT_ACCEPTANCE,
    PLAIN_HOLDS_NS,
    PRIOR_REQUESTS,
    PROBE_TOKENS,
    STALE_TOKENS,
    Adaptation,
    AdaptiveSettings,
    Controller,
)
from toolkit.speculative.comparison import ComparedStep, Comparison
from toolkit.speculative.costs import Figures, StepCosts
from toolkit.speculative.trials import (
    FIRST_BLOCKS,
    PLAIN_TRIAL_STEPS,
    TRIAL_STEPS,
    UNSETTLED_STEPS,
    Trials,
)

OUTPUT_TOKENS = 192
OFF_STEPS = 16  # after which a new request whose drafts are all wrong does not draft
# Drafts that are always right gain a batch six per cent.
LITTLE_GAIN = Costs(tuple(1.0 + 0.82 * width for width in range(LONGEST + 1)), probe=2.0)


class Measured(Costs):
    """The figures above, for the numbers of rows that they were taken at."""

    def step_ns(self, rows: int, width: float) -> float:
        nearest = min(VERIFY, key=lambda each: abs(each - rows))
        scale = (rows + 1) / (nearest + 1)
        return 1e6 * (HOST * (1 + 0.4 * (rows - 1)) + between(VERIFY[nearest], width) * scale)


def controller(
    costs: Costs | None = None,
    *,
    trials: Trials | None = None,
    comparison: Comparison | None = None,
    **changes: float | None,
) -> Controller:
    settings = AdaptiveSettings(**changes)  # type: ignore[arg-type]
    return Controller(settings, costs or Costs(), LONGEST, trials, comparison)


def chosen(decider: Controller, *states: Adaptation) -> list[int]:
    decider.choose(states)
    return [state.draft_len or 0 for state in states]


def run_of(
    decider: Controller, state: Adaptation, accepted: Callable[[int], int], steps: int
) -> None:
    """Blocks of the chosen length, of which accepted(length) are accepted, or plain steps."""
    for _ in range(steps):
        decider.choose([state])
        if state.draft_len:
            decider.note_block(state, state.draft_len, accepted(state.draft_len))
        else:
            decider.note_plain(state, 1)


def everything(length: int) -> int:
    return length


def nothing(length: int) -> int:
    return 0


def test_a_draft_that_is_always_right_is_used_in_full() -> None:
    decider = controller()
    state = decider.begin()
    run_of(decider, state, everything, 40)
    assert (state.draft_len, state.reason) == (LONGEST, "pays")


def test_a_draft_that_is_always_wrong_is_off_after_a_few_blocks() -> None:
    decider = controller()
    state = decider.begin()
    run_of(decider, state, everything, 40)
    blocks = state.blocks
    run_of(decider, state, nothing, 12)
    assert (state.draft_len, state.reason) == (0, "acceptance")
    assert state.blocks - blocks <= 8


def test_a_doubtful_draft_is_one_token_until_one_is_accepted() -> None:
    decider = controller()
    state = Adaptation(28.0, 32.0)
    lengths = chosen(decider, state)
    for accepted in (4, 0, 0, 0, 1):
        length = state.draft_len or 0
        decider.note_block(state, length, min(accepted, length))
        lengths.append(state.draft_len or 0)
    usual = lengths[0]
    assert usual > 1
    assert lengths == [usual, usual, usual, 1, 1, usual]


def test_expectations_that_do_not_come_true_lose_trust_and_win_it_back() -> None:
    """Half of the blocks are wrong, in turns so short that no estimate follows them."""
    decider = controller()
    state = decider.begin()
    assert decider.trust == 1.0
    for _ in range(60):
        state.chance = 0.95
        decider.note_block(state, 4, 4)
        decider.note_block(state, 4, 0)
    assert 0.5 < decider.trust < 0.75
    alone = decider._speeds().of([0.6], [4], ())
    assert alone < controller()._speeds().of([0.6], [4], ())
    for _ in range(600):
        state.chance = 0.95
        decider.note_block(state, 4, 4)
    assert decider.trust == pytest.approx(1.11, abs=0.02)


def test_the_length_is_the_fastest_of_all_for_the_acceptance() -> None:
    for alpha in (0.3, 0.5, 0.7, 0.9):
        decider = controller()
        state = Adaptation(1000 * alpha, 1000.0)
        speeds = []
        for length in range(LONGEST + 1):
            tokens = sum(alpha**place for place in range(length + 1))
            spent = decider.costs.step_ns(1, length + 1) + length * decider.costs.draft_ns(1, 1)
            speeds.append(tokens / spent)
        assert chosen(decider, state) == [speeds.index(max(speeds))]


def test_each_row_of_a_batch_has_its_own_length() -> None:
    decider = controller(Costs(per_row=0.05))
    good, bad = Adaptation(900.0, 1000.0), Adaptation(10.0, 1000.0)
    long, short = chosen(decider, good, bad)
    assert long >= 3
    assert short == 0
    assert (good.reason, bad.reason) == ("pays", "acceptance")


def test_lengths_stay_where_another_gains_next_to_nothing() -> None:
    decider = controller()
    state = Adaptation(700.0, 1000.0)
    decider.choose([state])
    before = state.draft_len
    for hits in (690.0, 710.0, 695.0, 705.0):
        state.hits = hits
        decider.reconsider()
        decider.choose([state])
    assert state.draft_len == before
    assert state.changes == 0


def test_a_text_that_becomes_predictable_is_drafted_again_after_a_probe() -> None:
    decider = controller()
    state = decider.begin()
    run_of(decider, state, nothing, OFF_STEPS)
    assert state.draft_len == 0
    run_of(decider, state, nothing, state.probe_after)
    assert decider.is_probe_due(state)
    decider.note_probe(state, [0.0] * 6 + [1.0] * 10, 1)
    assert chosen(decider, state)[0] > 0
    assert (state.reason, state.probes) == ("pays", 1)


def test_probes_that_fail_come_ever_later_and_take_a_small_share_of_the_time() -> None:
    decider = controller()
    state, spent, gaps = decider.begin(), 0.0, []
    run_of(decider, state, nothing, OFF_STEPS)
    for _ in range(2000):
        decider.note_plain(state, 1)
        decider.choose([state])
        assert state.draft_len == 0
        if decider.is_probe_due(state):
            gaps.append(state.plain_tokens)
            spent += decider.costs.probe_ns(1)
            decider.note_probe(state, [0.0] * PROBE_TOKENS, 1)
    assert gaps == sorted(gaps)
    assert gaps[-1] == 8 * AdaptiveSettings().probe_every_tokens
    assert spent <= 0.02 * 2000 * decider.costs.step_ns(1, 1)


def test_a_dear_probe_waits_until_it_is_a_small_share_of_the_time() -> None:
    decider = controller(Costs(probe=20.0))
    state = decider.begin()
    run_of(decider, state, nothing, OFF_STEPS)
    assert state.draft_len == 0
    assert state.probe_after * decider.costs.step_ns(1, 1) * 0.02 > decider.costs.probe_ns(1)


def test_first_probes_of_many_short_texts_take_a_small_share_of_the_time() -> None:
    """Each of them is due after eight tokens, long before it has saved up for one by itself."""
    assert 0.0025 < share_of_probes(Costs(probe=2.0)) < 0.0075


def test_where_perfect_drafts_would_gain_little_probes_take_less_time() -> None:
    decider = controller(LITTLE_GAIN)
    least_gain = decider._least_gain(4, ())
    perfect = decider._speeds().gain(PERFECT_ACCEPTANCE, 4, LONGEST, (), least_gain)
    assert 0.0 < perfect < 0.5 * GAIN_WORTH_PROBING
    assert 0.0 < share_of_probes(LITTLE_GAIN) < 0.5 * share_of_probes(Costs(probe=2.0))


def test_what_drafts_for_one_load_is_saved_for_probes_in_full_again() -> None:
    decider = controller(LITTLE_GAIN)
    chosen(decider, *(Adaptation(100.0, 1000.0) for _ in range(4)))
    little = decider._income_ns
    decider.costs = Costs(probe=2.0)
    decider.reconsider()
    assert all(chosen(decider, *(Adaptation(900.0, 1000.0) for _ in range(4))))
    assert little / LITTLE_GAIN.step_ns(4, 1) < 0.5 * decider._income_ns / Costs().step_ns(4, 1)


def test_only_what_will_soon_be_paid_for_is_looked_at() -> None:
    """What a sampled token's chances were is computed for probes, and takes time."""
    decider = controller(Costs(probe=2.0))
    state = decider.begin()
    run_of(decider, state, nothing, OFF_STEPS)
    state.plain_tokens = state.probe_after
    assert state.reason == "acceptance" and decider.is_probe_near(state, 0)
    for steps, is_near in ((PROBE_TOKENS - 1, True), (PROBE_TOKENS + 1, False)):
        decider._saved_ns = decider.costs.probe_ns(1) - steps * decider._income_ns
        assert decider.is_probe_near(state, 0) == is_near


def share_of_probes(costs: Costs) -> float:
    """Of the time of many short texts, four at a time, that no draft gets right."""
    decider, spent, passed = controller(costs), 0.0, 0.0
    decider.expected_acceptance = 0.1
    for _ in range(200):
        states = [decider.begin() for _ in range(4)]
        decider.reconsider()
        for _ in range(32):
            if not decider.keeps(4):
                decider.choose(states)
                assert {(state.draft_len, state.reason) for state in states} == {(0, "acceptance")}
            passed += decider.costs.step_ns(4, 1)
            for state in states:
                decider.note_plain(state, 1)
            if decider.may_probe() and any(map(decider.is_probe_due, states)):
                spent += decider.costs.probe_ns(4)
                for state in states:
                    decider.note_probe(state, [0.0] * PROBE_TOKENS, 4)
    return spent / passed


def test_nothing_is_probed_at_a_load_where_no_draft_pays() -> None:
    saturated = Costs(verify=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0), draft=0.2)
    decider = controller(saturated)
    state = Adaptation(950.0, 1000.0)
    run_of(decider, state, everything, 100)
    assert (state.draft_len, state.reason) == (0, "load")
    assert not decider.is_probe_due(state)


def test_another_load_is_decided_for_at_once() -> None:
    """What holds for two rows is not kept for one."""
    decider = controller(Costs(verify=(1.0, 1.05, 1.1, 1.15, 1.2, 1.25), per_row=0.0))
    states = [Adaptation(900.0, 1000.0), Adaptation(900.0, 1000.0)]
    decider.choose(states)
    assert states[0].draft_len == 5
    decider.costs = Costs(verify=(1.0, 1.8, 3.0, 4.0, 5.0, 6.0), draft=0.0)
    decider.choose(states[:1])
    assert states[0].draft_len == 1


def test_drafts_end_when_two_decisions_want_it() -> None:
    """One may be luck: a few hard words. What is decided again at once is the second."""
    decider = controller(Costs(verify=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0)))
    state = Adaptation(900.0, 1000.0, draft_len=3)
    decider.choose([state])
    assert state.draft_len == 3
    assert [decider.keeps(1) for _ in range(DECIDE_EVERY_STEPS)][-2:] == [True, False]
    decider.choose([state])
    assert state.draft_len == 0


@pytest.mark.parametrize("changes", [True, False])
def test_a_first_wish_to_end_drafts_is_forgotten_if_the_second_decision_has_none(
    changes: bool,
) -> None:
    """changes: whether that decision has another length, or the present one."""
    pays, does_not = Costs(), Costs(verify=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0))
    decider = controller(does_not)
    (best,) = chosen(controller(pays), Adaptation(900.0, 1000.0))
    state = Adaptation(900.0, 1000.0, draft_len=3 if changes else best)
    assert (state.draft_len != best) == changes
    for decider.costs in (does_not, pays, does_not):
        decider.choose([state])
        assert state.draft_len


def test_a_doubtful_row_ends_its_drafts_at_once() -> None:
    decider = controller()
    state = Adaptation(0.5, 4.0, draft_len=1, misses=DOUBTFUL_MISSES)
    decider.choose([state])
    assert state.draft_len == 0


def test_one_row_more_or_less_among_many_keeps_the_lengths_and_so_does_growing() -> None:
    decider = controller(Costs(per_row=0.05))
    decider.choose([Adaptation(900.0, 1000.0) for _ in range(16)])
    assert decider.keeps(17)
    assert decider.keeps(14)
    assert [decider.keeps(19) for _ in range(JOINING_STEPS + 1)] == [*[True] * JOINING_STEPS, False]


def test_a_request_that_ends_is_given_time_for_another_to_follow() -> None:
    """Each of the two changes would be a decision, and together they are no change."""
    decider = controller(Costs(per_row=0.05))
    decider.choose([Adaptation(900.0, 1000.0) for _ in range(4)])
    assert decider.keeps(3)
    assert decider.keeps(4)
    assert [decider.keeps(5) for _ in range(JOINING_STEPS + 1)] == [*[True] * JOINING_STEPS, False]
    decider.choose([Adaptation(900.0, 1000.0) for _ in range(4)])
    assert [decider.keeps(3) for _ in range(AWAIT_STEPS + 1)] == [*[True] * AWAIT_STEPS, False]


def test_who_joins_gets_what_the_last_decision_would_have_given() -> None:
    decider = controller(Costs(per_row=0.05))
    states = [Adaptation(1000 * alpha, 1000.0) for alpha in (0.9, 0.7, 0.5)]
    lengths = chosen(decider, *states)
    for alpha, length in zip((0.9, 0.7, 0.5), lengths, strict=True):
        newcomer = Adaptation(1000 * alpha, 1000.0)
        decider.join(newcomer, 2)
        assert newcomer.draft_len == length
    decider.choose([Adaptation(10.0, 1000.0)])
    newcomer = Adaptation(900.0, 1000.0)
    decider.join(newcomer, 1)
    assert (newcomer.draft_len, newcomer.reason) == (0, "acceptance")
    for _ in range(newcomer.probe_after):
        assert not decider.may_probe()
        decider.keeps(2)
    assert decider.may_probe()


def test_decisions_that_change_nothing_come_at_longer_intervals() -> None:
    decider = controller()
    state = Adaptation(900.0, 1000.0)

    def steps_until_the_next() -> int:
        steps = 1
        while decider.keeps(1):
            steps += 1
        decider.choose([state])
        return steps

    decider.choose([state])
    intervals = [steps_until_the_next() for _ in range(3)]
    assert intervals == sorted(intervals)
    assert intervals[0] < intervals[-1] == steps_until_the_next()
    state.hits = 100.0
    assert steps_until_the_next() == intervals[-1]
    assert steps_until_the_next() < intervals[-1]


def test_a_new_request_without_drafts_is_no_reason_to_decide_more_often() -> None:
    decider = controller()
    hopeless = Adaptation(0.0, 1000.0)
    intervals = []
    for request in (hopeless, hopeless, hopeless, Adaptation(0.0, 1000.0), Adaptation(0.0, 1000.0)):
        assert chosen(decider, request) == [0]
        steps = 1
        while decider.keeps(1):
            steps += 1
        intervals.append(steps)
    assert intervals[0] < intervals[2] == intervals[3] == intervals[4]
    assert chosen(decider, Adaptation(1000.0, 1000.0)) == [LONGEST]
    assert decider.keeps(1) and not all(decider.keeps(1) for _ in range(intervals[0]))


def gaining(gain: float) -> Costs:
    """Drafts that are always accepted gain so much, at one token, whatever the rows: such a step
    gives twice the tokens.
    """
    drafting = 2.0 / (1.0 + gain) * (HOST + 1.0) - HOST
    return Costs((1.0, drafting, *[9.0] * LONGEST), draft=0.0, per_row=0.0)


class Compared:
    """Costs that are known well."""

    def pace(self, step: ComparedStep) -> float:
        return 1.0

    def correct_plain(self, rows: range, factor: float, *, goes_on_plainly: bool) -> None:
        assert factor == 1.0


class Doubtful(Comparison):
    def doubt(self, rows: int) -> float:
        return 0.06


class Known(Comparison):
    def is_known(self, rows: int) -> bool:
        return True


@pytest.mark.parametrize(("gain", "begins"), [(0.05, False), (0.08, True)])
def test_a_batch_begins_to_draft_for_more_than_costs_may_be_off_and_goes_on_for_less(
    gain: float, begins: bool
) -> None:
    decider = controller(gaining(gain), comparison=Doubtful(2, Compared()))
    fresh = [Adaptation(1000.0, 1000.0) for _ in range(2)]
    assert chosen(decider, *fresh) == ([1, 1] if begins else [0, 0])
    drafting = [Adaptation(1000.0, 1000.0, draft_len=1) for _ in range(2)]
    assert chosen(decider, *drafting) == [1, 1]
    losing = [Adaptation(1000.0, 1000.0, draft_len=1) for _ in range(2)]
    decider = controller(gaining(0.9 * LEAST_BATCH_GAIN))
    chosen(decider, *losing)
    assert chosen(decider, *losing) == [0, 0]


def comparing(draft_lens: Sequence[int | None], **changes: Any) -> tuple[Controller, list[int]]:
    """Two rows whose plain steps are to be compared with a trial of drafts, which would gain by
    now; decided for again, with rows of these lengths. Returns their new ones, too.
    """
    decider = controller(gaining(0.0), trials=Trials(4), comparison=Comparison(4, Compared()))
    rows = [Adaptation(1000.0, 1000.0) for _ in range(2)]
    in_a_trial(decider, rows)
    for _ in range(TRIAL_STEPS):
        decider.compare(ComparedStep(2, [2], 0.0, read=0, fed=0, ns=1))
    after_the_trial(decider, rows)
    decider.costs = gaining(0.5)
    rows = [Adaptation(1000.0, 1000.0, draft_len=length) for length in draft_lens]
    decider.choose(rows, **changes)
    return decider, [row.draft_len or 0 for row in rows]


@pytest.mark.parametrize(
    ("draft_lens", "changes"),
    [
        ([0, 0, 0, 0], {}),  # another load
        ([None, None], {}),  # a batch that begins
        ([0, 0], {"fixed": [0]}),
        ([0, 0], {"limit": 1}),
    ],
)
def test_a_comparison_ends_where_rows_are_no_longer_those_for_it(
    draft_lens: Sequence[int | None], changes: dict[str, Any]
) -> None:
    decider, lengths = comparing(draft_lens, **changes)
    assert not decider.compares
    assert all(lengths)


def test_lengths_are_held_for_a_comparison_until_no_request_is_left() -> None:
    decider, lengths = comparing([0, 0])
    assert decider.compares and not any(lengths)
    decider.pause()
    assert not decider.compares


def test_lengths_stay_until_a_comparison_has_come_to_its_end() -> None:
    """Drafts would begin behind the trial: then no plain steps would be there to compare with."""
    decider = controller(gaining(0.0), trials=Trials(2), comparison=Comparison(2, Compared()))
    rows = [Adaptation(1000.0, 1000.0) for _ in range(2)]
    in_a_trial(decider, rows)
    for _ in range(TRIAL_STEPS):
        decider.compare(ComparedStep(2, [2], 0.0, read=0, fed=0, ns=1))
    decider.costs = gaining(0.5)
    after_the_trial(decider, rows)
    assert decider.compares and [state.draft_len for state in rows] == [0, 0]
    while decider.compares:
        decider.compare(ComparedStep(2, [], 0.0, read=0, fed=0, ns=1))
    assert not decider.keeps(2)  # as soon as it has
    assert chosen(decider, *rows) == [1, 1]


class Computing(Costs):
    """Several rows are bound by computing: each token costs as much as the first."""

    def step_ns(self, rows: int, width: float) -> float:
        if rows == 1:
            return super().step_ns(rows, width)
        return rows * width * super().step_ns(1, 1.0)


def only_alone() -> Controller:
    """Drafts pay for one row and for no more. Four have been decided for."""
    decider = controller(Computing())
    assert chosen(decider, *(Adaptation(900.0, 1000.0) for _ in range(4))) == [0, 0, 0, 0]
    return decider


def test_a_batch_that_decodes_plainly_begins_no_drafts_for_a_moment_with_fewer_rows() -> None:
    """Not even if a decision is due then: those that follow would decode plainly again."""
    decider = only_alone()
    while decider.keeps(4):
        pass
    decider.reconsider()
    assert all(decider.keeps(1) for _ in range(AWAIT_STEPS_PLAIN))
    assert not decider.keeps(1)


def decoding_plainly(
    comparison: Comparison | None = None, rows: Sequence[int] = (4, 3)
) -> Controller:
    """So many rows, and fewer, were decided for one after the other, and none drafts."""
    decider = controller(Computing(), comparison=comparison)
    for count in rows:
        assert not any(chosen(decider, *(Adaptation(900.0, 1000.0) for _ in range(count))))
    return decider


def steps_kept(decider: Controller, rows: int) -> int:
    """Before it is decided for so many rows, which come one after the other."""
    return sum(1 for _ in itertools.takewhile(lambda _: decider.keeps(rows), range(2000)))


def test_that_so_many_requests_decode_plainly_holds_for_a_while_through_others() -> None:
    """As each batch becomes smaller near its end. What was not decided yet is."""
    decider = decoding_plainly()
    held = PLAIN_HOLDS_NS / decider.costs.step_ns(4, 1.0)
    steps = 0
    for rows in itertools.cycle((4, 3)):
        kept = sum(decider.keeps(rows) for _ in range(40))
        steps += kept
        if kept < 40:
            break
    assert 0.8 * held < steps < 1.2 * held
    decider = decoding_plainly()
    assert steps_kept(decider, 2) == AWAIT_STEPS_PLAIN


def test_what_was_found_of_so_many_rows_is_not_found_again_for_those_that_rest() -> None:
    decider = decoding_plainly(rows=(3, 4))
    assert steps_kept(decider, 3) > 10 * AWAIT_STEPS_PLAIN
    assert decider._rows == 3
    decider = decoding_plainly(rows=(3, 4))
    for _ in range(AWAIT_STEPS_PLAIN + 1):
        assert decider.keeps(3)
    assert sum(decider.rests(3) for _ in range(1000)) > 10 * AWAIT_STEPS_PLAIN


def comes_to_an_end(decider: Controller) -> None:
    comparison = decider.comparison
    assert comparison is not None
    comparison.begin(4)
    while decider.compares:
        decider.compare(ComparedStep(4, [], 0.0, read=0, fed=0, ns=1))


def expects_less(decider: Controller) -> None:
    decider.expected_acceptance -= 1.1 * EXPECTATION_THAT_MATTERS


@pytest.mark.parametrize("happens", [comes_to_an_end, expects_less, Controller.reconsider])
def test_what_changes_costs_or_what_is_expected_ends_what_was_found(
    happens: Callable[[Controller], object],
) -> None:
    decider = decoding_plainly(Known(4, Compared()))
    happens(decider)
    chosen(decider, *(Adaptation(900.0, 1000.0) for _ in range(4)))
    assert steps_kept(decider, 3) == AWAIT_STEPS_PLAIN


@pytest.mark.parametrize("drafts", [False, True])
def test_what_is_not_known_well_or_drafts_is_decided_for_as_often_as_before(drafts: bool) -> None:
    if drafts:
        decider = controller()
        rows = [Adaptation(900.0, 1000.0) for _ in range(4)]
        assert all(chosen(decider, *rows))
        assert steps_kept(decider, 4) < DECIDE_EVERY_IDLE_STEPS
    else:
        decider = decoding_plainly(Comparison(4, Compared()))
        assert steps_kept(decider, 3) < DECIDE_EVERY_IDLE_STEPS


def test_a_batch_that_ends_together_is_taken_to_begin_together() -> None:
    """The first of the next ones joins those that it will have beside it."""
    decider = only_alone()
    assert decider.awaits_more(1) and not decider.awaits_more(4)
    first = Adaptation(900.0, 1000.0)
    decider.join(first, 1)
    assert first.draft_len == 0
    assert decider.keeps(1)


def test_what_follows_a_batch_that_decoded_plainly_is_taken_for_another_batch() -> None:
    """Its last request drafted. The first one of the next batch is alone for a moment."""
    decider = only_alone()
    assert chosen(decider, Adaptation(900.0, 1000.0)) > [0]
    for _ in range(2):  # it is idle for long
        decider.pause()
    assert decider.awaits_more(1)
    first = Adaptation(900.0, 1000.0)
    decider.join(first, 1)
    assert first.draft_len == 0
    for _ in range(AWAIT_STEPS_PLAIN):
        assert decider.keeps(1)
    assert not decider.keeps(1)
    assert chosen(decider, first) > [0]
    decider.pause()
    assert not decider.awaits_more(1)


def test_so_is_what_follows_one_that_was_not_decided_for_again() -> None:
    decider = only_alone()
    assert chosen(decider, Adaptation(900.0, 1000.0)) > [0]
    for _ in range(2):
        decider.pause()
        assert decider.awaits_more(1)
        assert all(decider.keeps(4) for _ in range(2 * AWAIT_STEPS_PLAIN))
        assert chosen(decider, Adaptation(900.0, 1000.0)) > [0]


def test_what_the_last_request_of_a_batch_rested_for_is_not_for_the_next_batch() -> None:
    """Else the first one of the next batch would decode plainly for as long, if none followed."""
    decider = only_alone()
    assert chosen(decider, Adaptation(10.0, 1000.0)) == [0]
    assert decider.keeps(1) and decider.rests(1)
    decider.pause()
    decider.join(Adaptation(900.0, 1000.0), 1)
    assert not decider.rests(1)
    assert [decider.keeps(1) for _ in range(AWAIT_STEPS_PLAIN + 1)][-1] is False


def test_drafts_end_at_once_where_more_rows_joined() -> None:
    """That is no luck, as a few hard words may be."""
    decider = only_alone()
    rows = [Adaptation(900.0, 1000.0)]
    assert chosen(decider, *rows)[0] > 0
    rows += [Adaptation(900.0, 1000.0, draft_len=0) for _ in range(3)]
    assert chosen(decider, *rows) == [0, 0, 0, 0]


def test_one_row_more_among_many_is_no_reason_to_end_drafts_at_once() -> None:
    many = [Adaptation(900.0, 1000.0, draft_len=3) for _ in range(17)]
    decider = controller(Costs(per_row=0.05))
    assert all(chosen(decider, *many[:16]))
    decider.costs = Computing()
    assert all(chosen(decider, *many))
    assert not any(chosen(decider, *many))


def in_a_trial(decider: Controller, states: list[Adaptation]) -> None:
    """Go on until its second step."""
    decider.choose(states)
    for _ in range(10_000):
        if not decider.keeps(len(states)):
            decider.choose(states)
        elif decider.is_trying:
            return
    raise AssertionError("no trial")


def after_the_trial(decider: Controller, states: list[Adaptation]) -> None:
    while decider.keeps(len(states)) and decider.is_trying:
        pass
    decider.choose(states)


# Drafts pay from an acceptance of about 0.6 on.
NEAR = Costs(verify=(1.0, 1.5, 2.3, 3.2, 4.2, 5.2), draft=0.02)


def test_a_batch_that_drafts_tries_plain_steps_and_goes_on_as_before() -> None:
    decider = controller(NEAR, trials=Trials(4))
    states = [Adaptation(rate, 1000.0) for rate in (800.0, 700.0, 750.0)]
    usual = chosen(decider, *states)
    assert any(usual)
    in_a_trial(decider, states)
    assert [(state.draft_len, state.reason) for state in states] == [(0, "measuring")] * 3
    joining = decider.begin()
    decider.join(joining, 3)
    assert (joining.draft_len, joining.reason) == (0, "measuring")
    after_the_trial(decider, [*states, joining])
    assert [state.draft_len for state in states] == usual
    assert (joining.draft_len, joining.reason) == (usual[2], "pays")
    assert [state.changes for state in states] == [0, 0, 0]


def test_the_first_trial_waits_until_rows_that_draft_have_done_so_for_a_while() -> None:
    """What another row drafted before it ended its drafts says nothing."""
    decider = controller(NEAR, trials=Trials(4))
    drafting, ended = (Adaptation(rate, 1000.0, total_trials=1000.0) for rate in (750.0, 50.0))
    assert decider.trials is not None
    for blocks, begins in ((0, False), (FIRST_BLOCKS, True)):
        for _ in range(2 * MOST_CONFIRMATIONS):  # decisions that stand begin none
            if not decider.is_trying:
                decider.choose([drafting, ended])
                decider.trials.pass_steps(2, FIRST_BLOCKS)
                drafting.blocks, ended.blocks = blocks, 50
        assert decider.is_trying is begins
        assert begins or (drafting.draft_len and ended.draft_len == 0)


def test_a_batch_that_decodes_plainly_tries_drafts_that_might_pay() -> None:
    decider = controller(NEAR, trials=Trials(4))
    states = [Adaptation(500.0, 1000.0) for _ in range(4)]
    assert chosen(decider, *states) == [0, 0, 0, 0]
    in_a_trial(decider, states)
    lengths = {state.draft_len for state in states}
    assert len(lengths) == 1 and lengths.pop()
    after_the_trial(decider, states)
    assert [state.draft_len for state in states] == [0, 0, 0, 0]


def test_a_trial_of_drafts_ends_when_half_of_its_requests_have_been_replaced() -> None:
    decider = controller(NEAR, trials=Trials(4))
    states = [Adaptation(500.0, 1000.0) for _ in range(4)]
    in_a_trial(decider, states)
    for ends in (False, True):
        decider.join(decider.begin(), 4)
        assert decider.keeps(4) is not ends


def test_a_trial_of_plain_steps_goes_on_with_other_requests() -> None:
    decider = controller(NEAR, trials=Trials(4))
    states = [Adaptation(rate, 1000.0) for rate in (800.0, 700.0, 750.0)]
    in_a_trial(decider, states)
    for _ in range(PLAIN_TRIAL_STEPS - 2):  # in_a_trial takes one
        decider.join(decider.begin(), 3)
        assert decider.keeps(3) and decider.is_trying
    assert not decider.keeps(3)


def resting(rows: int) -> Controller:
    """Of a batch at whose load no draft pays, which has been so for a while."""
    decider = only_alone()
    states = [decider.begin() for _ in range(rows)]
    for _ in range(2 * DECIDE_EVERY_IDLE_STEPS):
        if not decider.rests(rows) and not decider.keeps(rows):
            decider.choose(states)
    while decider.rests(rows) or decider.keeps(rows):
        pass
    decider.choose(states)
    assert decider.keeps(rows)
    return decider


def test_a_batch_at_whose_load_no_draft_pays_rests_while_requests_come_and_go() -> None:
    decider = resting(32)
    for step in range(DECIDE_EVERY_IDLE_STEPS - 2):
        if step % (AWAIT_STEPS_PLAIN + 1):  # some leave, and before long others join
            assert decider.rests(20)
        else:
            joining = decider.begin()
            decider.join(joining, 35)
            assert (joining.draft_len, joining.reason) == (0, "load")
            assert decider.rests(35)
    assert not decider.rests(32) and not decider.keeps(32)


def test_a_batch_whose_drafts_miss_rests_while_requests_come_and_go() -> None:
    """Perfect drafts would pay, so what joins is probed, when that is due and can be paid."""
    decider = controller(Costs(probe=2.0))
    decider.expected_acceptance = 0.1
    states = [decider.begin() for _ in range(16)]
    decider.choose(states)
    assert {(state.draft_len, state.reason) for state in states} == {(0, "acceptance")}
    rested, probed, steps = 0, 0, 4000
    for step in range(steps):
        if step % 4 == 0:
            del states[0]
        elif step % 4 == 2:
            states.append(decider.begin())
            decider.join(states[-1], len(states))
            assert (states[-1].draft_len, states[-1].reason) == (0, "acceptance")
        if decider.rests(len(states)):
            rested += 1
        else:
            if not decider.keeps(len(states)):
                decider.choose(states)
            if decider.may_probe() and any(map(decider.is_probe_due, states)):
                decider.note_probe(states[0], [0.0] * PROBE_TOKENS, len(states))
                probed += 1
        for state in states:
            decider.note_plain(state, 1)
    assert rested > 0.9 * steps
    share = probed * decider.costs.probe_ns(1) / (steps * decider.costs.step_ns(16, 1))
    assert 0.001 < share < 0.003


def test_a_resting_batch_is_decided_for_when_it_has_become_smaller() -> None:
    decider = resting(4)
    assert all(decider.rests(1) for _ in range(AWAIT_STEPS_PLAIN))
    assert not decider.rests(1) and not decider.keeps(1)
    assert chosen(decider, Adaptation(900.0, 1000.0))[0] > 0


def test_a_resting_batch_is_decided_for_when_it_has_grown() -> None:
    decider = resting(32)
    joining = decider.begin()
    decider.join(joining, 40)
    assert not decider.rests(40)
    asked = [decider.keeps(40) for _ in range(JOINING_STEPS + 1)]
    assert asked[-1] is False


def test_who_joins_where_no_draft_pays_is_no_reason_to_look_for_probes() -> None:
    decider = only_alone()
    joining = decider.begin()
    decider.join(joining, 4)
    assert joining.reason == "load"
    for _ in range(joining.probe_after):
        assert decider.keeps(4)
        assert not decider.may_probe()


def test_no_trial_begins_while_requests_become_fewer() -> None:
    """The draft would read the texts of those that soon end, too."""
    decider = controller(NEAR, trials=Trials(4))
    states = [Adaptation(500.0, 1000.0) for _ in range(3)]
    chosen(decider, *states, Adaptation(500.0, 1000.0))
    assert decider.trials is not None
    decider.trials.pass_steps(3, 10_000)
    decider.choose(states)
    assert not decider.is_trying
    decider.choose(states)
    assert decider.keeps(3) and decider.is_trying


@pytest.mark.parametrize(
    ("rate", "unread"), [(200.0, 0), (500.0, 10_000)], ids=["few accepted", "much to read"]
)
def test_drafts_that_cannot_pay_are_not_tried(rate: float, unread: int) -> None:
    decider = controller(NEAR, trials=Trials(4))
    states = [Adaptation(rate, 1000.0, unread_tokens=unread) for _ in range(4)]
    with pytest.raises(AssertionError, match="no trial"):
        in_a_trial(decider, states)


def test_a_batch_of_long_prompts_and_short_outputs_drafts_only_if_that_pays_for_reading() -> None:
    """Also where it drafts already: the next requests are like those before."""
    lengths = {}
    for prompt_tokens in (10, 1000):
        decider = controller(Costs(per_row=0.3, reading=0.005))
        for _ in range(200):
            decider.finish(decider.begin(), prompt_tokens=prompt_tokens, output_tokens=50)
        states = [Adaptation(600.0, 1000.0) for _ in range(4)]
        lengths[prompt_tokens] = chosen(decider, *states)
        drafting = [Adaptation(600.0, 1000.0, draft_len=1) for _ in range(4)]
        decider.choose(drafting)
        lengths[-prompt_tokens] = chosen(decider, *drafting)
    assert all(lengths[10]) and all(lengths[-10])
    assert not any(lengths[1000]) and not any(lengths[-1000])


@pytest.mark.parametrize("rows", [1, 4])
def test_near_their_ends_requests_whose_texts_the_draft_has_not_read_begin_no_drafts(
    rows: int,
) -> None:
    def lengths(unread: int, left: float) -> list[int]:
        decider = controller(Costs(per_row=0.3, reading=0.005))
        states = [
            Adaptation(600.0, 1000.0, unread_tokens=unread, left_tokens=left) for _ in range(rows)
        ]
        return chosen(decider, *states)

    assert all(lengths(unread=200, left=200))
    assert all(lengths(unread=0, left=5))
    assert not any(lengths(unread=200, left=5))


def test_requests_are_taken_to_write_as_large_a_part_of_what_they_may_as_recent_ones() -> None:
    lengths = {}
    for output_tokens in (5, 200):
        decider = controller(Costs(per_row=0.3, reading=0.005))
        for _ in range(4):
            decider.finish(decider.begin(), output_tokens=output_tokens, max_tokens=200)
        states = [Adaptation(600.0, 1000.0, unread_tokens=200, left_tokens=200) for _ in range(4)]
        lengths[output_tokens] = chosen(decider, *states)
    assert all(lengths[200])
    assert not any(lengths[5])


def test_while_a_batch_grows_those_that_join_decode_plainly() -> None:
    decider = controller(Costs(per_row=0.05))
    alone = Adaptation(900.0, 1000.0)
    assert chosen(decider, alone)[0] > 0
    joining = [Adaptation(900.0, 1000.0) for _ in range(2)]
    for rows, state in enumerate(joining, 2):
        decider.join(state, rows)
        assert (state.draft_len, state.reason) == (0, "load")
        assert decider.keeps(rows)
    assert decider.keeps(3)
    assert not decider.keeps(3)
    assert all(chosen(decider, alone, *joining))
    later = Adaptation(900.0, 1000.0)
    decider.join(later, 3)
    assert later.draft_len == alone.draft_len


def test_fixed_rows_of_the_batch_cost_their_time_too() -> None:
    """Where another row needs a wide forward anyway, drafting is cheaper."""
    costs = Costs(verify=(1.0, 1.6, 1.7, 1.8, 1.9, 2.0), draft=0.02, per_row=0.0)
    alone, beside = Adaptation(400.0, 1000.0), Adaptation(400.0, 1000.0)
    controller(costs).choose([alone])
    controller(costs).choose([beside], fixed=[5])
    assert alone.draft_len == 0
    assert beside.draft_len


def test_the_schedules_limit_is_not_exceeded() -> None:
    decider = controller()
    state = Adaptation(990.0, 1000.0)
    decider.choose([state], limit=2)
    assert state.draft_len == 2
    decider.choose([state], limit=0)
    assert state.draft_len == 0


def test_below_the_least_acceptance_length_nothing_is_drafted() -> None:
    free = Costs(verify=(1.0,) * 6, draft=0.0)
    for least, length in ((1.0, LONGEST), (1.9, LONGEST), (2.1, 0)):
        state = Adaptation(500.0, 1000.0)  # 1.97 tokens per step at the longest
        controller(free, min_acceptance_length=least).choose([state])
        assert state.draft_len == length


def test_a_new_request_begins_with_what_earlier_ones_had() -> None:
    decider = controller()
    before = decider.begin()
    for _ in range(20):
        state = decider.begin()
        run_of(decider, state, nothing, 2 * OFF_STEPS)
        decider.finish(state)
    after = decider.begin()
    assert after.acceptance < 0.4
    assert chosen(decider, after)[0] < chosen(decider, before)[0]


def test_what_earlier_requests_had_is_worth_more_if_they_were_alike() -> None:
    alike, apart = controller(), controller()
    for number in range(40):
        for decider, rate in ((alike, 0.6), (apart, 0.9 if number % 2 else 0.3)):
            state = decider.begin()
            state.total_hits, state.total_trials = 100 * rate, 100.0
            decider.finish(state)
    assert alike.expected_acceptance == pytest.approx(0.6, abs=0.02)
    assert apart.expected_acceptance == pytest.approx(0.6, abs=0.05)
    assert alike.begin().trials > 4 * apart.begin().trials


def test_ending_the_drafts_of_a_row_has_to_gain_more_than_a_shorter_one() -> None:
    """One token more or less is worth 1.5 % of a row; none at all, 2 % more."""
    pays_little = Costs(verify=(1.0, 1.57, 2.5, 3.5, 4.5, 5.5), draft=0.0)
    drafting, fresh = Adaptation(520.0, 1000.0, draft_len=1), Adaptation(520.0, 1000.0)
    assert chosen(controller(pays_little), fresh) == [0]
    assert chosen(controller(pays_little), drafting) == [1]
    drafting.hits = 440.0
    decider = controller(pays_little)
    assert [chosen(decider, drafting), chosen(decider, drafting)] == [[1], [0]]


def test_an_old_estimate_returns_to_what_requests_have_in_general() -> None:
    """Drafts mostly end in a hard place, and what comes behind it is not seen."""
    decider = controller()
    for _ in range(8 * PRIOR_REQUESTS):
        decider.finish(Adaptation(1.0, 1.0, total_hits=90.0, total_trials=100.0))
    expected = decider.expected_acceptance
    plain, drafting = (Adaptation(6.0, 20.0, draft_len=length) for length in (0, 2))
    for state in (plain, drafting):
        decider.note_plain(state, int(STALE_TOKENS))
    assert plain.acceptance == pytest.approx(expected - (expected - 0.3) / math.e)
    assert (plain.trials, drafting.acceptance) == (20.0, 0.3)


def test_an_old_estimate_stays_as_long_as_no_other_request_told_more() -> None:
    state = Adaptation(0.0, 20.0, draft_len=0)
    controller().note_plain(state, 1000)
    assert state.acceptance == 0.0


def test_where_requests_differ_an_old_estimate_lasts() -> None:
    decider = controller()
    for number in range(4 * PRIOR_REQUESTS):
        hits = 90.0 if number % 2 else 0.0
        decider.finish(Adaptation(1.0, 1.0, total_hits=hits, total_trials=100.0))
    state = Adaptation(18.0, 20.0, draft_len=0)
    decider.note_plain(state, int(STALE_TOKENS))
    assert state.acceptance > 0.87


def test_requests_that_showed_nothing_yet_do_not_make_all_look_alike() -> None:
    """Every row begins with the same estimate."""
    decider = controller()
    known = [Adaptation(hits, 16.0, total_trials=16.0) for hits in (0.0, 15.0)]
    for _ in range(100):
        decider.choose([*known, *(Adaptation(2.0, 4.0) for _ in range(14))])
    assert known[0].chance < 0.1
    assert known[1].chance > 0.85


def test_distrust_is_forgotten_where_nothing_is_drafted() -> None:
    decider = controller()
    state = Adaptation(20.0, 20.0, draft_len=5)
    for _ in range(40):
        decider.note_block(state, 5, 0)
    least = decider.trust
    assert least < 0.8
    for _ in range(2 * int(IDLE_DECISIONS)):
        chosen(decider, Adaptation(0.0, 20.0))
    assert decider.trust > (1.0 + least) / 2


def test_a_request_that_saw_no_drafts_teaches_nothing() -> None:
    decider = controller()
    expected = decider.expected_acceptance
    decider.finish(decider.begin())
    assert decider.expected_acceptance == expected


# Whole texts: what adapting keeps of the best fixed length, in simulated time.

MIXES = ("predictable", "unpredictable", "alternating", "weak")


def text_of(mix: str, generator: random.Random) -> list[bool]:
    """For each output token, whether the draft would have it right. Easy and hard places come in
    clusters.
    """
    right, easy = [], True
    for place in range(OUTPUT_TOKENS):
        if generator.random() < 0.15:
            easy = generator.random() < 0.7
        alpha = 0.92 if easy else 0.5
        if mix == "weak":
            alpha = 0.35
        if mix == "unpredictable" or (mix == "alternating" and place // 48 % 2):
            alpha = 0.03
        right.append(generator.random() < alpha)
    return right


@dataclass
class Row:
    text: list[bool]
    state: Adaptation
    done: int = 1

    def step(self, length: int) -> int:
        """How many drafts are accepted."""
        accepted = 0
        while accepted < length and self.text[self.done + accepted]:
            accepted += 1
        self.done += accepted + 1
        return accepted


def speed(mix: str, load: int, fixed: int | None) -> float:
    """Tokens per millisecond of 64 texts, `load` at once. fixed: a draft length, or adaptive."""
    generator = random.Random(1)
    costs = Measured()
    decider = controller(costs)
    texts = [text_of(mix, generator) for _ in range(64)]
    spent = 0.0
    for start in range(0, len(texts), load):
        rows = [Row(text, decider.begin()) for text in texts[start : start + load]]
        decider.reconsider()
        while rows:
            if fixed is None:
                spent += probed(decider, rows)
            lengths = [
                min(
                    row.state.draft_len or 0 if fixed is None else fixed,
                    OUTPUT_TOKENS - row.done - 1,
                )
                for row in rows
            ]
            spent += costs.step_ns(len(rows), 1 + sum(lengths) / len(rows))
            for depth in range(max(lengths)):
                spent += costs.draft_ns(sum(length > depth for length in lengths), depth + 1)
            for row, length in zip(rows, lengths, strict=True):
                accepted = row.step(length)
                if length:
                    decider.note_block(row.state, length, accepted)
                else:
                    decider.note_plain(row.state, 1)
                if row.done >= OUTPUT_TOKENS:
                    decider.finish(row.state)
            rows = [row for row in rows if row.done < OUTPUT_TOKENS]
    return len(texts) * OUTPUT_TOKENS / (spent / 1e6)


def probed(decider: Controller, rows: list[Row]) -> float:
    """Choose the lengths, with what is probed first. Returns the time of the probes."""
    if not decider.keeps(len(rows)):
        decider.choose([row.state for row in rows])
    if not decider.may_probe() or not any(decider.is_probe_due(row.state) for row in rows):
        return 0.0
    due = [row for row in rows if decider.is_due_soon(row.state)]
    for row in due:
        seen = row.text[row.done - min(PROBE_TOKENS, row.state.plain_tokens) : row.done]
        decider.note_probe(row.state, [float(right) for right in seen], len(rows))
    decider.choose([row.state for row in rows])
    return decider.costs.probe_ns(len(due))


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("load", [1, 4, 16])
def test_adapting_keeps_nearly_all_of_the_best_fixed_length(mix: str, load: int) -> None:
    fixed = [speed(mix, load, length) for length in range(LONGEST + 1)]
    adaptive = speed(mix, load, None)
    assert adaptive >= 0.97 * max(fixed)
    assert adaptive >= 0.97 * fixed[0]


def test_where_the_text_alternates_adapting_beats_every_fixed_length() -> None:
    fixed = [speed("alternating", 4, length) for length in range(LONGEST + 1)]
    assert speed("alternating", 4, None) > max(fixed)


@pytest.mark.parametrize(
    ("chance", "least_rested", "kinds"),
    [(0.1, 2200, {"decides", "probes"}), (0.7, 1000, {"decides", "tries"})],
)
def test_steps_in_which_nothing_can_be_due_change_nothing(
    chance: float, least_rested: int, kinds: set[str]
) -> None:
    """Who asks `rests` first does the same in the same steps as who always asks `keeps`."""

    def driven(*, asks_rests: bool) -> tuple[list[tuple[int, str]], int]:
        decider = controller(trials=Trials(8))
        decider.expected_acceptance = chance
        draw, states, done, rested = random.Random(0), [decider.begin()], [], 0
        for step in range(3000):
            if step % 40 == 0:
                rows = draw.randint(1, 8)
                for _ in range(rows - len(states)):
                    states.append(decider.begin())
                    decider.join(states[-1], len(states))
                del states[rows:]
            if asks_rests and decider.rests(len(states)):
                rested += 1
            else:
                if not decider.keeps(len(states)):
                    decider.choose(states)
                    done.append((step, "tries" if decider.is_trying else "decides"))
                if not decider.may_probe():
                    pass
                elif any(map(decider.is_probe_due, states)):
                    decider.note_probe(states[0], [chance] * PROBE_TOKENS, len(states))
                    done.append((step, "probes"))
                else:
                    decider.await_probes(states)
            for state in states:
                if state.draft_len:
                    accepted = int(draw.random() < chance)
                    decider.note_block(state, state.draft_len, accepted)
                else:
                    decider.note_plain(state, 1)
        return done, rested

    always, _ = driven(asks_rests=False)
    done, rested = driven(asks_rests=True)
    assert done == always and {what for _, what in done} >= kinds
    assert rested > least_rested


FAST, SLOW = (600e3, 1150e3, 1500e3, 1750e3), (1150e3, 1600e3, 1850e3, 2100e3)


@pytest.mark.parametrize(("before", "after"), [(FAST, SLOW), (SLOW, FAST)])
def test_a_machine_on_which_the_other_way_pays_now_is_noticed(
    before: tuple[float, ...], after: tuple[float, ...]
) -> None:
    """Weights in the caches, a wide step costs much more than a narrow one; else the reading of the
    weights decides. Four requests without an end, of whose draft tokens four in five are accepted.
    """
    figures = Figures(
        [[0.0] * 5, *([0.0, *[ns] * 4] for ns in before)], [0.0] + [380e3] * 4, [0.0] + [80e3] * 4
    )
    costs = StepCosts(figures, 300e3, reading=8e3)
    decider = Controller(
        AdaptiveSettings(), costs, 3, Trials(4), Comparison(4, costs), expected_acceptance=0.83
    )
    states = [decider.begin() for _ in range(4)]
    draw, plain_steps, drafting = random.Random(0), 0, [0, 0]
    decider.choose(states)
    for step in range(12_000):
        if not decider.keeps(4):
            decider.choose(states)
        lengths = [state.draft_len or 0 for state in states]
        for state, length in zip(states, lengths, strict=True):
            if length:
                accepted = 0
                while accepted < length and draw.random() < 0.83:
                    accepted += 1
                decider.note_block(state, length, accepted)
            else:
                decider.note_plain(state, 1)
        plain_steps = 0 if any(lengths) else plain_steps + 1
        noise = draw.gauss(1.0, 0.05)
        verify_ns = int(noise * between(before if step < 2000 else after, 1 + sum(lengths) / 4))
        drafted = [sum(length > depth for length in lengths) for depth in range(max(lengths))]
        draft_ns = int(noise * (380e3 + 80e3 * (len(drafted) - 1))) if drafted else 0
        if not 0 < plain_steps <= UNSETTLED_STEPS:  # as the runtime does
            costs.note_step(4, drafted, 0.0, draft_ns, verify_ns, 60_000)
        if decider.compares:
            decider.compare(ComparedStep(4, drafted, 0.0, 0, 0, draft_ns + verify_ns + 60_000))
        if step < 2000 or step >= 8000:
            drafting[step >= 2000] += any(lengths)
    drafts_before, drafts_after = (2000, 0) if before is SLOW else (0, 4000)
    assert drafting[0] == pytest.approx(drafts_before, abs=100)
    assert drafting[1] == pytest.approx(drafts_after, abs=200)


def test_what_was_doubtful_before_plain_steps_of_a_trial_is_not_behind_them() -> None:
    """Three of four rows would be held at one token, and the batch decoded plainly for it."""
    decider = controller()
    doubtful, tried = (Adaptation(8.0, 10.0, draft_len=1, misses=DOUBTFUL_MISSES) for _ in range(2))
    decider._try(doubtful, 0)
    decider._try(tried, 2)
    decider._end_trial()
    assert not doubtful.is_doubtful and tried.is_doubtful
    assert doubtful.draft_len == tried.draft_len == 1
