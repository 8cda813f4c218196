from toolkit.process.pace import BEHIND_NS, LONGEST_STEP_NS, PATIENCE_NS, Pace

MS = 1_000_000


def paced(*ended_ns: int) -> Pace:
    pace = Pace()
    for ns in ended_ns:
        pace.note(ns)
    return pace


def test_nobody_sleeps_by_the_clock_before_two_steps() -> None:
    assert paced().sleep_ns(0) is None
    assert paced(5 * MS).sleep_ns(5 * MS) is None


def test_the_next_look_is_behind_the_end_of_the_next_step() -> None:
    assert paced(0, MS).sleep_ns(MS + 200_000) == 800_000 + BEHIND_NS


def test_a_step_that_takes_longer_is_looked_for_again_and_again_and_then_awaited() -> None:
    pace = paced(0, MS)
    assert pace.sleep_ns(2 * MS + 1) == BEHIND_NS
    assert pace.sleep_ns(2 * MS + PATIENCE_NS) == BEHIND_NS
    assert pace.sleep_ns(2 * MS + PATIENCE_NS + 1) is None


def test_steps_of_a_large_model_are_awaited() -> None:
    assert paced(0, LONGEST_STEP_NS).sleep_ns(LONGEST_STEP_NS) is not None
    assert paced(0, LONGEST_STEP_NS + 1).sleep_ns(LONGEST_STEP_NS + 1) is None


def test_the_time_of_a_step_is_averaged() -> None:
    pace = paced(0, MS, 3 * MS)  # the second step takes twice as long
    assert pace.sleep_ns(3 * MS) == MS + MS // 8 + BEHIND_NS


def test_behind_a_pause_it_begins_anew() -> None:
    """A step that reads a prompt takes 3 ms. In the mean it would make the next looks late."""
    pace = paced(0, MS, 4 * MS)
    assert pace.sleep_ns(4 * MS) is None
    pace.note(6 * MS)
    assert pace.sleep_ns(6 * MS) == 2 * MS + BEHIND_NS


def test_what_a_step_leaves_in_parts_is_one_step() -> None:
    pace = paced(0, 3 * MS, 3 * MS + 50_000, 6 * MS, 6 * MS + 50_000)
    assert pace.sleep_ns(6 * MS + 50_000) is None
    pace = paced(0, 50_000, MS, MS + 50_000)
    assert pace.sleep_ns(MS + 50_000) == MS - 50_000 + BEHIND_NS


def test_what_is_told_out_of_order_does_no_harm() -> None:
    assert paced(0, MS, -MS).sleep_ns(MS) == MS + BEHIND_NS
