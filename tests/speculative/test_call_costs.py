"""What calls take is learned by all instances together."""

from __future__ import annotations

from toolkit.speculative.call_costs import RETRY_ROUNDS, SAMPLES, CallCosts

LONGEST = 3


def instances(count: int) -> list[CallCosts]:
    memory = bytearray(CallCosts.size(LONGEST))
    return [CallCosts(LONGEST, memory) for _ in range(count)]


def tried(costs: CallCosts, *figures: int) -> None:
    """Try all lengths, from 0 on."""
    for draft_len, ns in enumerate(figures):
        for _ in range(SAMPLES):
            costs.note(draft_len, ns)
    assert costs.untried() is None


def test_the_longest_draft_is_tried_first() -> None:
    costs = CallCosts(LONGEST)
    order = []
    while (draft_len := costs.untried()) is not None:
        order.append(draft_len)
        costs.note(draft_len, 100)
    assert order == [3, 3, 3, 2, 2, 2, 1, 1, 1, 0, 0, 0]


def test_one_instance_learns_what_another_has_tried() -> None:
    one, other = instances(2)
    tried(one, 100, 200, 300, 400)
    assert other.untried() is None
    assert [other.step_ns(1, width) for width in (1, 2, 3, 4)] == [100, 200, 300, 400]
    assert other.probe_ns(1) == 300


def test_a_figure_is_the_median_of_what_was_tried() -> None:
    costs = CallCosts(LONGEST)
    for ns in (300, 90, 5000):
        costs.note(2, ns)
    assert costs.step_ns(1, 3) == 300


def test_plain_decoding_is_tried_again_while_drafts_are_in_use() -> None:
    """It may have been timed in a bad moment, and nothing else would show that."""
    costs = CallCosts(LONGEST)
    tried(costs, 1000, 200, 300, 400)
    for wanted in (1000, 100):  # the median of three times: 1000, 1000, 100, then 1000, 100, 100
        for _ in range(RETRY_ROUNDS):
            assert costs.untried() is None
            costs.note(3, 400)
        assert costs.untried() == 0
        costs.note(0, 100)
        assert 0.8 * wanted < costs.step_ns(1, 1) < 1.2 * wanted


def test_figures_follow_what_is_seen_and_a_slower_machine_changes_all() -> None:
    costs = CallCosts(LONGEST)
    tried(costs, 100, 200, 300, 400)
    for _ in range(200):
        costs.note(0, 200)
    assert 180 < costs.step_ns(1, 1) < 220
    assert costs.step_ns(1, 4) > 600
