"""Verify steps that the engine takes by itself: the same texts and figures as step by step, told
while they run, and never in the way of another request.
"""

from __future__ import annotations

import functools
import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.runtimes import (
    CODEC,
    Outcome,
    assert_idle,
    make_request,
    make_runtime,
    serve,
    serve_one,
)
from tests.support.step_engines import BurstingTableEngine, ChainingTableEngine, TableEngine
from toolkit.interfaces import Sampling, TokenEvent
from toolkit.speculative.acceptance import Numbers
from toolkit.speculative.bursts import MAX_NS, Bursts

RACED: dict[str, Any] = {"max_tokens": 60, "temperature": 0.8, "seed": 5}
DRAWN = {**RACED, "acceptance": "rejection"}
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 60},
    "plain": {"max_tokens": 60, "draft_len": 0},
    "one draft": {"draft_len": 1},
    "one token": {"max_tokens": 1},
    "two tokens": {"max_tokens": 2},
    "five tokens": {"max_tokens": 5},
    "stop word": {"max_tokens": 60, "stop": ("!",)},
    "plain stop word": {"max_tokens": 60, "draft_len": 0, "stop": ("!",)},
    "figures": {"running_stats": True},
    "drawn": DRAWN,
    "drawn plainly": {**DRAWN, "draft_len": 0},
    "drawn to a stop word": {**DRAWN, "stop": ("!",)},
    "drawn of few": {**DRAWN, "top_k": 5, "top_p": 0.7},
    "raced of few": {**RACED, "top_k": 5, "top_p": 0.7},
    "raced": RACED,
    "raced plainly": {**RACED, "draft_len": 0},
    "raced to five": {**RACED, "max_tokens": 5},
}


def eos_of(target_seed: int) -> int:
    """A token that the greedy text has, late."""
    ids = serve_one(make_runtime(TableEngine(target_seed)), make_request(max_tokens=60)).ids
    return ids[40]


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("closeness", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("with_eos", [False, True])
@pytest.mark.parametrize("doubts_every", [10**9, 3])
def test_everything_is_as_step_by_step(
    name: str, closeness: float, with_eos: bool, doubts_every: int
) -> None:
    outcomes = []
    eos = (eos_of(1),) if with_eos else ()
    # Any text of this vocabulary has one of these letters soon.
    letter = CODEC.decode([serve_one(make_runtime(TableEngine(1)), make_request()).ids[12]])
    fields = {**REQUESTS[name]}
    if "stop" in fields:
        fields["stop"] = (letter,)
    doubtful = functools.partial(BurstingTableEngine, doubts_every=doubts_every)
    for kind in (TableEngine, doubtful):
        target = kind(1, closeness=0.0)
        draft = ChainingTableEngine(1 if closeness == 1.0 else 2, closeness=0.0)
        runtime = make_runtime(target, draft, eos_token_ids=eos)
        outcomes.append(serve_one(runtime, make_request(**fields)))
        assert_idle(runtime, target, draft)
        runtime.close()
    plain, burst = outcomes
    assert burst.ids == plain.ids
    assert burst.text == plain.text
    assert burst.finish_reason == plain.finish_reason
    assert [event.token_ids for event in burst.events] == [
        event.token_ids for event in plain.events
    ]
    for figure in (
        *("verify_steps", "drafted_by_position", "accepted_by_position", "output_tokens"),
        "steps_by_reason",
    ):
        assert getattr(burst.stats, figure) == getattr(plain.stats, figure), figure


def test_requests_follow_one_another_in_the_same_slots() -> None:
    target, draft = BurstingTableEngine(1, max_batch_size=1), ChainingTableEngine(2)
    runtime = make_runtime(target, draft, reuse_prefixes=True)
    expected = make_runtime(TableEngine(1, max_batch_size=1))
    for number in range(4):
        request = make_request((1, 2, 3, number % 2), request_id=str(number), max_tokens=30)
        assert serve_one(runtime, request).ids == serve_one(expected, request).ids
    runtime.close()


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"temperature": 0.7, "acceptance": "sample_match"}, {}),
        ({"frequency_penalty": 0.5}, {}),
        ({"cumulative_logprob": True}, {}),
        ({"acceptance": "verify_only"}, {}),
    ],
)
def test_what_the_engine_cannot_decide_is_decided_step_by_step(
    fields: dict[str, Any], options: dict[str, Any]
) -> None:
    target = BurstingTableEngine(1)
    runtime = make_runtime(target, ChainingTableEngine(2), **options)
    serve_one(runtime, make_request(**fields))
    assert target.bursts == []
    runtime.close()


def test_most_steps_of_a_request_alone_are_in_bursts() -> None:
    target = BurstingTableEngine(1)
    runtime = make_runtime(target, ChainingTableEngine(2))
    outcome = serve_one(runtime, make_request(max_tokens=60))
    assert sum(target.bursts) == outcome.stats.verify_steps
    assert max(target.bursts) > 8
    runtime.close()


def test_a_request_whose_steps_are_all_undecided_is_hardly_tried_again() -> None:
    target = BurstingTableEngine(1, doubts_every=1)
    runtime = make_runtime(target)
    outcome = serve_one(runtime, make_request(max_tokens=60, temperature=0.8, seed=5))
    assert len(outcome.ids) == 60
    assert target.bursts == [0] * 4  # of 59 steps, one in 17
    runtime.close()


def test_a_request_that_comes_ends_the_burst() -> None:
    target = BurstingTableEngine(1)
    runtime = make_runtime(target, ChainingTableEngine(2))
    second = Outcome()

    def submit(step: int) -> None:
        if step == 2 and not second.events and len(target.bursts) == 0:
            runtime.submit(make_request((7, 8), request_id="b"), second.events.append)

    target.before_step = submit
    first = serve(runtime, [make_request(max_tokens=50)])[0]
    assert target.bursts[0] == 2
    assert len(target.bursts) > 1  # the longer one is alone again
    alone = make_runtime(TableEngine(1))
    assert first.ids == serve_one(alone, make_request(max_tokens=50)).ids
    assert second.ids == serve_one(alone, make_request((7, 8))).ids
    assert_idle(runtime, target)
    runtime.close()


def test_a_request_that_is_cancelled_ends_before_the_next_step() -> None:
    target = BurstingTableEngine(1)
    runtime = make_runtime(target)
    target.before_step = lambda step: runtime.cancel("a") if step == 3 else None
    outcome = serve_one(runtime, make_request(max_tokens=50))
    assert outcome.finish_reason == "cancelled"
    assert target.bursts == [3]
    assert len(outcome.ids) == 1 + 3
    assert_idle(runtime, target)
    runtime.close()


def wait_for(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return condition()


def test_a_burst_lasts_no_longer_than_the_deadline_allows() -> None:
    engine = BurstingTableEngine(1)
    runtime = make_runtime(engine, clock=lambda: 1_000_000)
    for deadline_ns in (None, 5_000_000, 10**12, 1_000_001):
        serve_one(runtime, make_request(deadline_ns=deadline_ns))
    assert engine.limits_ns == [MAX_NS, 4_000_000, MAX_NS, 1]


def test_tokens_are_told_while_the_burst_runs() -> None:
    target = BurstingTableEngine(1)
    runtime = make_runtime(target)
    outcome, told = Outcome(), []
    # Before each step, all tokens of the steps before have arrived.
    target.before_step = lambda step: told.append(wait_for(lambda: len(outcome.ids) == step + 1))
    runtime.submit(make_request(max_tokens=20), outcome.events.append)
    while runtime.step():
        pass
    assert len(told) == 19
    assert all(told)
    runtime.close()


def test_what_was_told_goes_on_before_the_next_step() -> None:
    target = BurstingTableEngine(1)
    runtime = make_runtime(target)
    outcome, stop = Outcome(), threading.Event()
    calls: list[tuple[str, int]] = []  # thread, tokens that were told before
    told: list[bool] = []
    # The first token, which no burst gave, does not wait for the burst behind it.
    target.before_step = lambda step: told.append(
        wait_for(lambda: ("burst reader" if step else "runner", step + 1) in calls)
    )
    runner = threading.Thread(
        target=runtime.run,
        args=(stop, lambda: calls.append((threading.current_thread().name, len(outcome.ids)))),
        name="runner",
    )
    runtime.submit(make_request(max_tokens=20), outcome.events.append)
    runner.start()
    has_ended = wait_for(lambda: ("runner", 20) in calls)
    stop.set()
    runner.join()
    runtime.close()
    assert has_ended
    assert len(told) == 19
    assert all(told)


class LateLock:
    """The lock of a reader that waits for a processor before it has it; others have it at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reader: threading.Thread | None = None
        self.is_there, self.may_go_on = threading.Event(), threading.Event()

    def __enter__(self) -> None:
        if threading.current_thread() is self.reader:
            self.is_there.set()
            assert self.may_go_on.wait(10)
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


def test_a_reader_that_comes_late_takes_no_step_of_the_burst_before() -> None:
    target = BurstingTableEngine(1, max_batch_size=1)
    bursts, lock = Bursts(target, None, 0), LateLock()
    bursts._reading = lock  # type: ignore[assignment]
    lock.reader = threading.Thread(target=bursts.take_known)
    first: list[int] = []
    second: list[int] = []

    def run(tokens: list[int], room: int) -> None:
        bursts.run(
            0,
            [0],
            0,
            0,
            room,
            (),
            MAX_NS,
            Numbers(Sampling()),
            lambda step: tokens.append(step.token) or True,
        )

    run(first, 5)
    lock.reader.start()
    assert lock.is_there.wait(10)

    def go_on(step: int) -> None:
        if step == 0:
            lock.may_go_on.set()
            lock.reader.join()

    target.before_step = go_on
    target.rewind([0], [0])
    run(second, 2)
    assert (len(first), len(second)) == (5, 2)


def test_a_stop_word_ends_the_burst_and_leaves_nothing_behind() -> None:
    target = BurstingTableEngine(1)
    runtime = make_runtime(target, reuse_prefixes=True)
    ids = serve_one(make_runtime(TableEngine(1)), make_request(max_tokens=40)).ids
    outcome = Outcome()
    target.before_step = lambda step: None if step < 12 else time.sleep(0.002)
    request = make_request(max_tokens=40, stop=(CODEC.decode(ids[10:13]),))
    runtime.submit(request, outcome.events.append)
    while runtime.step():
        pass
    assert outcome.finish_reason == "stop"
    assert outcome.ids == ids[: len(outcome.ids)]
    assert len(outcome.ids) <= 13
    assert target.length(0) < 3 + 13
    # The slot is used again by the same prompt, which finds nothing that does not belong to it.
    again = serve_one(runtime, make_request(max_tokens=40, request_id="b"))
    assert again.ids == ids
    runtime.close()


def test_logits_that_are_not_finite_end_the_request() -> None:
    target = BurstingTableEngine(1, blind_at=20)
    runtime = make_runtime(target, ChainingTableEngine(2))
    outcome = serve_one(runtime, make_request(max_tokens=50))
    assert outcome.finish_reason == "error"
    assert "not finite" in str(outcome.events[-1].error)
    assert (
        outcome.ids
        == serve_one(make_runtime(TableEngine(1)), make_request(max_tokens=50)).ids[
            : len(outcome.ids)
        ]
    )
    assert_idle(runtime, target)
    runtime.close()


def test_a_draft_that_is_not_finite_goes_on_plainly() -> None:
    target, draft = BurstingTableEngine(1), BurstingTableEngine(2, blind_at=20)
    runtime = make_runtime(target, draft)
    outcome = serve_one(runtime, make_request(max_tokens=50))
    plain = serve_one(make_runtime(TableEngine(1)), make_request(max_tokens=50))
    assert outcome.ids == plain.ids
    assert outcome.stats.steps_by_reason["draft failed"] > 10
    runtime.close()


def test_a_fault_of_the_receiver_ends_its_request() -> None:
    target = BurstingTableEngine(1)
    runtime = make_runtime(target)
    events: list[TokenEvent] = []

    def receive(event: TokenEvent) -> None:
        events.append(event)
        if len(events) == 4:
            raise OSError("gone")

    runtime.submit(make_request(max_tokens=50), receive)
    while runtime.step():
        pass
    assert events[-1].finish_reason == "error"
    assert "gone" in str(events[-1].error)
    assert_idle(runtime, target)
    runtime.close()


def readers() -> int:
    return sum(thread.name == "burst reader" for thread in threading.enumerate())


def test_the_reader_ends_with_its_runtime() -> None:
    gc.collect()
    assert wait_for(lambda: readers() == 0)
    closed, forgotten = (make_runtime(BurstingTableEngine(1)) for _ in range(2))
    for runtime in (closed, forgotten):
        serve_one(runtime, make_request())
    assert readers() == 2
    closed.close()
    assert wait_for(lambda: readers() == 1)
    del closed, forgotten, runtime
    gc.collect()
    assert wait_for(lambda: readers() == 0)
