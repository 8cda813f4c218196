"""The draft length that the load allows, and when it returns."""

from __future__ import annotations

from tests.support.runtimes import make_request, make_runtime, serve, serve_one, slow_clock
from tests.support.step_engines import TableEngine
from toolkit.speculative.load_schedule import RISE_AFTER_NS, LoadSchedule

FALLING = ((1, 4), (2, 1), (4, 0))


def test_more_requests_count_at_once_and_fewer_ones_after_a_while() -> None:
    schedule = LoadSchedule(FALLING)
    loads = [(1, 0), (3, 1), (4, 2), (1, 3), (1, 4), (2, RISE_AFTER_NS + 2), (2, RISE_AFTER_NS + 3)]
    assert [schedule.length(requests, now) for requests, now in loads] == [4, 1, 0, 0, 0, 0, 1]


def test_a_request_that_follows_another_begins_the_wait_anew() -> None:
    schedule = LoadSchedule(FALLING)
    lengths = [
        schedule.length(requests, since * RISE_AFTER_NS // 4)
        for since, requests in enumerate((4, 3, 3, 4, 3, 3, 3, 3, 3))
    ]
    assert lengths == [0] * 8 + [1]


def test_idle_time_counts() -> None:
    schedule = LoadSchedule(FALLING)
    loads = [(4, 0), (0, 1), (1, RISE_AFTER_NS + 1)]
    assert [schedule.length(requests, now) for requests, now in loads] == [0, 0, 4]


def test_a_request_between_two_others_does_not_draft() -> None:
    """It is alone until the next one comes, and its prompt is not read by the draft."""
    now = [0]
    draft = TableEngine(1)
    runtime = make_runtime(
        TableEngine(1), draft, draft_len_schedule=((1, 4), (2, 0)), clock=lambda: now[0]
    )
    serve(runtime, [make_request(request_id=name) for name in "ab"])
    assert serve_one(runtime, make_request(request_id="c")).stats.drafted == 0
    assert draft.forwards == []
    now[0] += RISE_AFTER_NS
    assert serve_one(runtime, make_request(request_id="d")).stats.drafted > 0


def test_schedule_bounds_drafts_by_load_and_lets_them_return() -> None:
    """Four requests run without drafts. When three have ended, the last one drafts again, and its
    text does not change.
    """
    target, draft = TableEngine(1), TableEngine(1)
    runtime = make_runtime(
        target, draft, max_draft_len=4, draft_len_schedule=FALLING, clock=slow_clock()
    )
    requests = [make_request([1, index], 8 if index else 60, str(index)) for index in range(4)]
    outcomes = serve(runtime, requests)
    alone = serve(make_runtime(TableEngine(1)), requests)
    assert [outcome.ids for outcome in outcomes] == [outcome.ids for outcome in alone]
    assert all(outcome.stats.drafted == 0 for outcome in outcomes[1:])
    last = outcomes[0].stats
    assert last.drafted_by_position[3] > 0
    # Both engines are the same, so the draft must have caught up on what it missed.
    assert last.acceptance_rate == 1.0


def test_the_prompt_is_not_fed_to_a_draft_that_the_load_turns_off() -> None:
    """Not even of the first request, which is alone until the others are read."""
    draft = TableEngine(1)
    runtime = make_runtime(TableEngine(1), draft, draft_len_schedule=((1, 4), (2, 0)))
    requests = [make_request((1, 2, 3), 20, name) for name in "abc"]
    outcomes = serve(runtime, requests)
    assert [len(outcome.ids) for outcome in outcomes] == [20] * 3
    assert draft.forwards == []


def test_the_schedule_bounds_a_request_that_states_its_draft_length() -> None:
    """Its length holds while the load allows it, and what bounds it is told."""
    runtime = make_runtime(
        TableEngine(1),
        TableEngine(1),
        max_draft_len=4,
        draft_len_schedule=((1, 4), (2, 1), (3, 0)),
        clock=slow_clock(),
    )
    long, short = (
        make_request(max_tokens=count, request_id=str(count), draft_len=3) for count in (40, 12)
    )
    alone = serve(runtime, [long])[0].stats
    assert (alone.drafted_by_position[2] > 0, set(alone.steps_by_reason)) == (True, {"request"})
    first, second = (outcome.stats for outcome in serve(runtime, [long, short]))
    assert (second.drafted_by_position, set(second.steps_by_reason)) == ((5, 0, 0), {"load"})
    assert first.drafted_by_position[0] > first.drafted_by_position[2] > 0
    assert set(first.steps_by_reason) == {"request", "load"}
    crowd = serve(runtime, [make_request(request_id=str(i), draft_len=i % 4) for i in range(8)])
    assert not any(outcome.stats.drafted for outcome in crowd)
    # A length that the schedule allows anyway is the request's own.
    assert [set(outcome.stats.steps_by_reason) for outcome in crowd[:2]] == [{"request"}, {"load"}]
