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
from toolkit.errors import RequestError
from toolkit.interfaces import RequestStats, TokenEvent
from toolkit.speculative.bls_loop import DraftFailed, Drafts, Part, Rounds, Settings

PROMPT = tuple(CODEC.encode("ab"))
END = 257


class Scripted:
    """Engines that return a fixed text. hides_end: the target does not return its end token, as
    some backends do not.
    """

    def __init__(
        self,
        text: Sequence[int],
        drafts: Sequence[int],
        *,
        hides_end: bool = False,
        fails_after: int | None = None,
    ) -> None:
        self.text, self.drafts, self.hides_end = list(text), list(drafts), hides_end
        self.draft_calls, self.plain_calls, self.closed = 0, 0, 0
        self.fails_after = fails_after

    def _new(self, ids: Sequence[int], count: int) -> list[int]:
        start = len(ids) - len(PROMPT)
        new = self.text[start : start + count]
        if END in new:
            new = new[: new.index(END) + (0 if self.hides_end else 1)]
        return new

    def draft(self, ids: Sequence[int], count: int) -> Drafts:
        self.draft_calls += 1
        if self.fails_after is not None and self.draft_calls > self.fails_after:
            raise DraftFailed("it is dead")
        start = len(ids) - len(PROMPT)
        return Drafts(tuple(self.drafts[start : start + count]))

    def verify(self, ids: Sequence[int], drafts: Drafts) -> Part:
        new = self._new(ids, len(drafts.ids) + 1)
        accepted = 0
        while accepted < min(len(new), len(drafts.ids)) and new[accepted] == drafts.ids[accepted]:
            accepted += 1
        new = new[: accepted + 1]
        return Part(tuple(new), tuple(-0.5 for _ in new))

    def plain(self, ids: Sequence[int], count: int) -> Generator[Part, None, None]:
        self.plain_calls += 1
        try:
            new = self._new(ids, count)
            for start in range(0, len(new), 2):
                yield Part(
                    tuple(new[start : start + 2]), tuple(-0.5 for _ in new[start : start + 2])
                )
        finally:
            self.closed += 1


def serve(
    engines: Scripted, *, stop: tuple[str, ...] = (), **fields: Any
) -> tuple[list[TokenEvent], Rounds]:
    cancelled = fields.pop("cancelled", lambda: False)
    clock = fields.pop("clock", lambda: 0)
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
