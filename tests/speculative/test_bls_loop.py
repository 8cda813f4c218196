"""Rounds over two engines that can only be called: whatever the drafts, the text is that of plain
decoding. Ends and failures.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.runtimes import CODEC
from tests.support.scripted_engines import END, PROMPT, TEXT, Scripted
from toolkit.errors import RequestError
from toolkit.interfaces import RequestStats, TokenEvent
from toolkit.speculative.adaptive import AdaptiveSettings, Controller
from toolkit.speculative.bls_loop import Adaptive, DraftFailed, Drafts, Part, Rounds, Settings
from toolkit.speculative.call_costs import CallCosts


def serve(
    engines: Scripted, *, stop: tuple[str, ...] = (), **fields: Any
) -> tuple[list[TokenEvent], Rounds]:
    cancelled = fields.pop("cancelled", lambda: False)
    clock = fields.pop("clock", lambda: 0)
    adaptive = fields.pop("adaptive", None)
    settings_fields = {
        "max_tokens": 12,
        "draft_len": 3,
        "end_ids": frozenset([END]),
        "arrival_ns": 0,
        **fields,
    }
    rounds = Rounds(
        Settings("r", PROMPT, **settings_fields),
        engines,
        CODEC.stream(PROMPT, stop),
        cancelled=cancelled,
        clock=clock,
        adaptive=adaptive,
    )
    return list(rounds), rounds


def summary(events: list[TokenEvent]) -> tuple[tuple[int, ...], str, str | None, str | None]:
    ids = tuple(token for event in events for token in event.token_ids)
    return (
        ids,
        "".join(event.text for event in events),
        events[-1].finish_reason,
        events[-1].stop_reason,
    )


def stats(events: list[TokenEvent]) -> RequestStats:
    assert events[-1].stats is not None
    return events[-1].stats


@settings(max_examples=150, deadline=None)
@given(
    text=st.lists(st.sampled_from([97, 98, 99, END]), min_size=14, max_size=14),
    drafts=st.lists(st.sampled_from([97, 98, 99, END]), min_size=14, max_size=14),
    draft_len=st.integers(1, 5),
    max_tokens=st.integers(1, 14),
    stop=st.sampled_from([(), ("bc",), ("aa", "cab")]),
    hides_end=st.booleans(),
)
def test_the_drafts_change_nothing(
    text: list[int],
    drafts: list[int],
    draft_len: int,
    max_tokens: int,
    stop: tuple[str, ...],
    hides_end: bool,
) -> None:
    plain, _ = serve(
        Scripted(text, drafts, hides_end=hides_end), draft_len=0, max_tokens=max_tokens, stop=stop
    )
    events, _ = serve(
        Scripted(text, drafts, hides_end=hides_end),
        draft_len=draft_len,
        max_tokens=max_tokens,
        stop=stop,
    )
    assert summary(events) == summary(plain)
    figures = stats(events)
    assert figures.output_tokens == len(summary(events)[0])
    assert (
        sum(figures.accepted_by_position)
        == figures.accepted
        <= figures.drafted
        == sum(figures.drafted_by_position)
    )


def test_a_step_that_accepts_all_drafts_counts_them() -> None:
    text = [97, 98, 99, 97, 98, 99, 97, 98, 99]
    events, rounds = serve(Scripted(text, text), max_tokens=9, log_probs=True)
    figures = stats(events)
    assert (figures.drafted, figures.accepted, figures.verify_steps) == (6, 6, 2)
    assert figures.cumulative_logprob == pytest.approx(-4.5)
    assert len(rounds.log_probs) == 9


def test_verify_only_verifies_drafts_and_accepts_none() -> None:
    text = [97, 98, 99, 97, 98, 99]
    events, _ = serve(Scripted(text, text), max_tokens=6, verify_only=True)
    assert summary(events)[0] == tuple(text)
    assert stats(events).accepted == 0
    assert stats(events).drafted > 0


@pytest.mark.parametrize("after", [0, 2])
def test_a_failed_draft_ends_the_request_or_leaves_it_to_the_target(after: int) -> None:
    text = [97, 98, 99] * 5
    with pytest.raises(DraftFailed, match="it is dead"):
        serve(Scripted(text, [0] * 15, fails_after=after))
    engines = Scripted(text, [0] * 15, fails_after=after)
    events, rounds = serve(engines, on_draft_failure="plain")
    assert summary(events)[0] == tuple(text[:12])
    assert str(rounds.draft_failure) == "it is dead"
    assert engines.plain_calls == engines.closed == 1
    assert stats(events).verify_steps == 11


class Choosy(Scripted):
    """The target refuses drafts."""

    def verify(self, ids: Sequence[int], drafts: Drafts) -> Part:
        if drafts.ids:
            raise RequestError("the shape of draft_logits is wrong")
        return super().verify(ids, drafts)


def test_drafts_that_the_target_refuses_leave_the_request_to_it() -> None:
    text = [97, 98, 99] * 5
    events, rounds = serve(Choosy(text, text), on_draft_failure="plain")
    assert summary(events)[0] == tuple(text[:12])
    assert "draft_logits is wrong" in str(rounds.draft_failure)
    assert stats(events).draft_failure == str(rounds.draft_failure)
    with pytest.raises(RequestError, match=r"^the shape") as caught:
        serve(Choosy(text, text))
    assert not isinstance(caught.value, DraftFailed)


def test_a_draft_that_fails_after_the_deadline_leaves_nothing_to_decode() -> None:
    engines = Scripted([97] * 15, [97] * 15, fails_after=0)
    ticks = iter([0, 1, 2, 3, *[100] * 20])
    events, _ = serve(engines, on_draft_failure="plain", deadline_ns=50, clock=lambda: next(ticks))
    assert (events[-1].finish_reason, engines.plain_calls) == ("deadline", 0)


@pytest.mark.parametrize("draft_len", [0, 3])
def test_deadlines_and_cancellation_end_between_calls(draft_len: int) -> None:
    engines = Scripted([97] * 20, [0] * 20)
    ticks = iter(range(1000))
    events, _ = serve(engines, draft_len=draft_len, deadline_ns=12, clock=lambda: next(ticks))
    assert events[-1].finish_reason == "deadline"
    assert 0 < stats(events).output_tokens < 12
    answers = iter([False, True])
    events, _ = serve(engines, draft_len=draft_len, cancelled=lambda: next(answers))
    assert events[-1].finish_reason == "cancelled"


def test_an_engine_that_returns_too_many_tokens_is_a_fault() -> None:
    class Talkative(Scripted):
        def verify(self, ids: Sequence[int], drafts: Drafts) -> Part:
            return Part((97,) * 30)

    with pytest.raises(RequestError, match="returned 30 tokens"):
        serve(Talkative([97] * 20, [97] * 20))


@pytest.mark.parametrize("draft_len", [0, 3])
def test_running_statistics_grow_from_event_to_event(draft_len: int) -> None:
    target = [97, 98, 99] * 4
    events, _ = serve(Scripted(target, target), draft_len=draft_len, running_stats=True)
    tokens = 0
    for event in events:
        tokens += len(event.token_ids)
        assert event.stats is not None
        assert event.stats.output_tokens == tokens
    assert len(events) > 1
    without, _ = serve(Scripted(target, target), draft_len=draft_len)
    assert [event.stats for event in without[:-1]] == [None] * (len(without) - 1)
    assert stats(without) == stats(events)


# Adaptive draft lengths.


class Timed(Scripted):
    """A call of the draft takes draft_ns per token, one of the target target_ns, and a plain token
    target_ns, too.
    """

    def __init__(self, *args: Any, draft_ns: int = 10, target_ns: int = 100, **more: Any) -> None:
        super().__init__(*args, **more)
        self.draft_ns, self.target_ns, self.now = draft_ns, target_ns, 0
        self.rounds: list[int] = []  # draft tokens asked for; 0: a plain call
        self.last: RequestStats | None = None

    def clock(self) -> int:
        return self.now

    def draft(self, ids: Sequence[int], count: int) -> Drafts:
        self.now += self.draft_ns * count
        self.rounds.append(count)
        return super().draft(ids, count)

    def verify(self, ids: Sequence[int], drafts: Drafts) -> Part:
        self.now += self.target_ns
        return super().verify(ids, drafts)

    def plain(self, ids: Sequence[int], count: int) -> Generator[Part, None, None]:
        self.rounds.append(0)
        for part in super().plain(ids, count):
            self.now += self.target_ns * len(part.ids)
            yield part


def adaptive_of(max_draft_len: int = 3) -> Adaptive:
    costs = CallCosts(max_draft_len)
    return Adaptive(Controller(AdaptiveSettings(), costs, max_draft_len), costs)


@settings(max_examples=100, deadline=None)
@given(
    text=st.lists(st.sampled_from([97, 98, 99]), min_size=90, max_size=90),
    right=st.lists(st.booleans(), min_size=90, max_size=90),
    draft_ns=st.sampled_from([0, 30, 90, 1000]),
    max_tokens=st.integers(1, 80),
    end=st.one_of(st.none(), st.integers(0, 79)),
    hides_end=st.booleans(),
)
def test_adaptive_lengths_change_nothing(
    text: list[int],
    right: list[bool],
    draft_ns: int,
    max_tokens: int,
    end: int | None,
    hides_end: bool,
) -> None:
    if end is not None:
        text = [*text[:end], END, *text[end + 1 :]]
    drafts = [token if good else 100 for token, good in zip(text, right, strict=True)]
    adaptive = adaptive_of()
    plain, _ = serve(
        Scripted(text, drafts, hides_end=hides_end), draft_len=0, max_tokens=max_tokens
    )
    for _ in range(4):  # the first ones measure what lengths cost
        engines = Timed(text, drafts, hides_end=hides_end, draft_ns=draft_ns)
        events, _ = serve(engines, max_tokens=max_tokens, clock=engines.clock, adaptive=adaptive)
        assert summary(events) == summary(plain)
        steps = stats(events).steps_by_reason
        assert sum(steps.values()) == stats(events).verify_steps


def learned(text: Sequence[int], drafts: Sequence[int], **times: int) -> Timed:
    """After a few requests that were drafted perfectly, one with these drafts."""
    adaptive = adaptive_of()
    for each in (text, text, text, drafts):
        engines = Timed(text, each, **times)
        events, _ = serve(engines, max_tokens=len(text), clock=engines.clock, adaptive=adaptive)
        engines.last = stats(events)
    return engines


WRONG = [100] * 200


def test_drafts_that_pay_are_asked_for_in_full() -> None:
    engines = learned(TEXT, TEXT)
    assert set(engines.rounds[:-2]) == {3}


def test_drafts_that_are_never_right_are_not_asked_for_but_probed() -> None:
    engines = learned(TEXT, WRONG)
    figures = engines.last
    assert figures is not None
    assert figures.drafted < 60
    assert figures.draft_probes >= 1
    assert figures.steps_by_reason["acceptance"] > 150
    assert figures.steps_by_reason["probe"] == figures.draft_probes


def test_drafts_that_become_right_are_asked_for_again() -> None:
    engines = learned(TEXT, [*WRONG[:80], *TEXT[80:]])
    assert 0 in engines.rounds
    assert engines.rounds[-8:-2] == [3] * 6


def test_a_draft_that_costs_more_than_it_can_save_is_off_for_the_load() -> None:
    engines = learned(TEXT, TEXT, draft_ns=1000)
    figures = engines.last
    assert figures is not None
    assert figures.steps_by_reason["load"] > 190


def test_where_no_draft_pays_a_request_soon_is_one_call() -> None:
    """Each call takes its time, so what was decided again and again is decided less often."""
    adaptive = adaptive_of()
    for _ in range(8):
        engines = Timed(TEXT, TEXT, draft_ns=1000)
        serve(engines, max_tokens=len(TEXT), clock=engines.clock, adaptive=adaptive)
    assert engines.rounds == [0]


def test_probes_of_many_short_texts_take_a_small_share_of_the_time() -> None:
    adaptive, calls, probes = adaptive_of(), 0, 0
    for number in range(80):
        short = 20 if number > 4 else 200
        engines = Timed(TEXT[:short], TEXT if number < 3 else WRONG, draft_ns=90)
        events, _ = serve(engines, max_tokens=short, clock=engines.clock, adaptive=adaptive)
        if number > 40:
            calls += len(engines.rounds)
            probes += stats(events).draft_probes
    assert calls - probes <= 45 and probes <= 4


def test_a_long_text_behind_many_short_ones_is_probed_as_soon_as_that_is_paid() -> None:
    """Short ones do not live to see a probe, and what they decide again and again holds no long
    one up.
    """
    adaptive = adaptive_of()
    for number in range(41):
        short = 40 if number > 9 else 200
        engines = Timed(TEXT[:short], TEXT if number < 1 else WRONG, draft_ns=60)
        serve(engines, max_tokens=short, clock=engines.clock, adaptive=adaptive)
    due = adaptive.controller.tokens_until_paid()
    long = TEXT * 10
    engines = Timed(long, long, draft_ns=60)
    events, _ = serve(engines, max_tokens=len(long), clock=engines.clock, adaptive=adaptive)
    figures = stats(events)
    assert 20 < due < 1000
    assert engines.rounds[0] == 0 and engines.rounds[1] > 0
    assert figures.steps_by_reason["acceptance"] < 1.2 * due


def test_a_draft_that_fails_says_so_in_the_steps_after_it() -> None:
    events, _ = serve(Scripted(TEXT, TEXT, fails_after=2), max_tokens=40, on_draft_failure="plain")
    assert list(stats(events).steps_by_reason) == ["fixed", "draft failed"]
