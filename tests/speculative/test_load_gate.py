"""Instances that serve at once draft only where all of them gain by it, as what they see shows."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import pytest

from tests.support.runtimes import CODEC
from tests.support.scripted_engines import END, PROMPT, TEXT, Scripted
from toolkit.interfaces import RequestStats
from toolkit.speculative.adaptive import AdaptiveSettings, Controller
from toolkit.speculative.bls_loop import Adaptive, Drafts, Part, Rounds, Settings
from toolkit.speculative.call_costs import CallCosts
from toolkit.speculative.load_gate import EPOCH_TOKENS, LEAST_EPOCHS, LoadGate


def gates(count: int) -> list[LoadGate]:
    memory = bytearray(LoadGate.SIZE)
    return [LoadGate(memory, place) for place in range(count)]


def take_epoch(gate: LoadGate, plain_ns: int, drafting_ns: int, at_work: int) -> bool:
    """An epoch in which each token takes so long. Returns whether it was one of drafting."""
    may_draft = gate.look()
    gate.note(
        EPOCH_TOKENS * at_work, EPOCH_TOKENS * at_work * (drafting_ns if may_draft else plain_ns)
    )
    return may_draft


def test_a_request_alone_may_draft() -> None:
    gate = LoadGate()
    gate.begin()
    assert all(take_epoch(gate, 100, 1000, 1) for _ in range(20))


@pytest.mark.parametrize(("drafting_ns", "drafts"), [(150, False), (60, True)])
def test_what_is_slower_is_tried_once_and_then_rarely(drafting_ns: int, drafts: bool) -> None:
    """Each trial of what takes half as long again loses half an epoch, and 0.5 % may be lost."""
    gate, *others = gates(8)
    for each in (gate, *others):
        each.begin()
    epochs = [take_epoch(gate, 100, drafting_ns, 8) for _ in range(400)]
    assert epochs[:2] == [False, True]
    assert epochs[2:50] == [drafts] * 48
    slower = sum(epoch is not drafts for epoch in epochs[2:])
    assert 1 <= slower <= 6


def test_what_becomes_faster_is_found() -> None:
    gate, *others = gates(4)
    for each in (gate, *others):
        each.begin()
    for _ in range(100):
        take_epoch(gate, 100, 110, 4)
    epochs = [take_epoch(gate, 100, 50, 4) for _ in range(100)]
    assert all(epochs[40:60])


def test_a_surprise_is_tried_again_soon() -> None:
    """One epoch may have been luck."""
    gate, other = gates(2)
    gate.begin(), other.begin()
    for _ in range(3):
        take_epoch(gate, 100, 110, 2)
    while not take_epoch(gate, 100, 60, 2):
        pass
    epochs = [take_epoch(gate, 100, 110, 2) for _ in range(8 * LEAST_EPOCHS)]
    assert epochs.index(False) == LEAST_EPOCHS  # the first trial
    assert not any(epochs[4 * LEAST_EPOCHS : 5 * LEAST_EPOCHS])


def test_every_load_is_decided_for_itself() -> None:
    gate, *others = gates(8)
    gate.begin()
    for other in others[:3]:
        other.begin()
    for _ in range(3):
        take_epoch(gate, 100, 50, 4)
    assert gate.look()
    for other in others[3:]:
        other.begin()
    assert gate.has_changed()
    assert not gate.look()
    for other in others:
        other.end()
    assert gate.look()


def test_what_was_seen_at_another_load_does_not_count() -> None:
    gate, other = gates(2)
    gate.begin(), other.begin()
    assert not gate.look()
    other.end()
    gate.note(1000, 1)
    other.begin()
    assert not gate.look()


def test_a_request_that_decides_nothing_counts_and_holds_nobody_up() -> None:
    """The first instance at work that decides ends the epochs."""
    other, gate = gates(2)
    other.begin(decides=False)
    gate.begin()
    assert [take_epoch(gate, 100, 150, 2) for _ in range(4)] == [False, True, False, False]


def test_what_all_give_together_is_compared() -> None:
    """Here one of two gains by drafting, and the other loses more."""
    first, second = gates(2)
    first.begin(), second.begin()
    epochs = []
    for _ in range(20):
        epochs.append(first.look())
        second.look()
        tokens = EPOCH_TOKENS
        second.note(tokens, tokens * (400 if epochs[-1] else 100))
        first.note(tokens, tokens * (50 if epochs[-1] else 100))
    assert epochs == [False, True] + [False] * 18


def test_an_instance_beyond_the_board_shows_that_it_works() -> None:
    memory = bytearray(LoadGate.SIZE)
    LoadGate(memory, 1000).begin()
    gate = LoadGate(memory, 0)
    gate.begin()
    assert not gate.look()


class Machine(Scripted):
    """Engines on a machine that all instances share: a call takes the longer, the more of them
    draft.
    """

    now = 0
    drafting: set[int] = set()  # noqa: RUF012  (of all, on purpose)

    def __init__(self, place: int) -> None:
        super().__init__(TEXT, TEXT)
        self._place = place

    def _take(self, ns: int) -> None:
        Machine.now += ns * (2 + len(self.drafting))

    def draft(self, ids: Sequence[int], count: int) -> Drafts:
        self.drafting.add(self._place)
        return super().draft(ids, count)

    def verify(self, ids: Sequence[int], drafts: Drafts) -> Part:
        self._take(50)
        return super().verify(ids, drafts)

    def plain(self, ids: Sequence[int], count: int) -> Generator[Part, None, None]:
        self.drafting.discard(self._place)
        for part in super().plain(ids, count):
            self._take(40 * len(part.ids))
            yield part


def requests(
    place: int, adaptive: Adaptive, done: list[RequestStats]
) -> Generator[None, None, None]:
    """Serve one after the other, an event at a time."""
    settings = Settings("r", PROMPT, 60, 3, frozenset([END]), 0)
    while True:
        adaptive.gate.begin()
        rounds = Rounds(
            settings,
            Machine(place),
            CODEC.stream(PROMPT, ()),
            clock=lambda: Machine.now,
            adaptive=adaptive,
        )
        for event in rounds:
            if event.stats is not None:
                done.append(event.stats)
            yield
        adaptive.gate.end()


@pytest.mark.parametrize(("at_work", "drafts"), [(1, True), (8, False)])
def test_instances_do_not_draft_where_each_would_gain_and_all_would_lose(
    at_work: int, drafts: bool
) -> None:
    """Among eight that decode plainly, one that drafts gets four tokens for little more than the
    time of one. If all draft, each call takes five times as long.
    """
    Machine.drafting.clear()
    done: list[RequestStats] = []
    running = []
    for place, gate in enumerate(gates(at_work)):
        costs = CallCosts(3)
        adaptive = Adaptive(Controller(AdaptiveSettings(), costs, 3), costs, gate)
        running.append(requests(place, adaptive, done))
    while len(done) < 20 * at_work:
        for each in running:
            next(each)
    last = done[-8 * at_work :]
    plain = sum(each.steps_by_reason.get("load", 0) for each in last)
    share = plain / sum(sum(each.steps_by_reason.values()) for each in last)
    assert share < 0.05 if drafts else share > 0.9


class OneByOne(Machine):
    """Each token is a call, as at first."""

    def plain(self, ids: Sequence[int], count: int) -> Generator[Part, None, None]:
        for token in self._new(ids, count):
            yield Part((token,))


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 40])
@pytest.mark.parametrize("others", [0, 1, 3])
def test_every_request_ends_whatever_the_load_was_before(max_tokens: int, others: int) -> None:
    """One of two tokens is decoded plainly at once, and nobody goes on if that ends sooner."""
    gate, *rest = gates(4)
    costs = CallCosts(3)
    adaptive = Adaptive(Controller(AdaptiveSettings(), costs, 3), costs, gate)
    gate.look()
    for other in rest[:others]:
        other.begin()
    gate.begin()
    settings = Settings("r", PROMPT, max_tokens, 3, frozenset([END]), 0)
    rounds = Rounds(settings, OneByOne(0), CODEC.stream(PROMPT, ()), adaptive=adaptive)
    events = []
    for number, event in enumerate(rounds):
        events.append(event)
        for other in rest:  # the load changes after every answer
            other.end() if number % 2 else other.begin()
    ids = [token for event in events for token in event.token_ids]
    assert (ids, events[-1].finish_reason) == (TEXT[:max_tokens], "length")


@pytest.mark.parametrize("others", [0, 2])
def test_what_calls_take_is_learned_only_from_a_request_alone(others: int) -> None:
    gate, *rest = gates(4)
    costs = CallCosts(3)
    adaptive = Adaptive(Controller(AdaptiveSettings(), costs, 3), costs, gate)
    for other in rest[:others]:
        other.begin()
    gate.begin()
    settings = Settings("r", PROMPT, 100, 3, frozenset([END]), 0)
    for _ in range(8):
        assert list(Rounds(settings, Machine(0), CODEC.stream(PROMPT, ()), adaptive=adaptive))
    assert (costs.untried() is None) is (others == 0)


def test_a_request_whose_draft_has_failed_leaves_the_epochs_to_others() -> None:
    first, second = gates(2)
    costs = CallCosts(3)
    adaptive = Adaptive(Controller(AdaptiveSettings(), costs, 3), costs, first)
    first.begin()
    settings = Settings("r", PROMPT, 40, 3, frozenset([END]), 0, on_draft_failure="plain")
    failing = Scripted(TEXT, TEXT, fails_after=0)
    events = list(Rounds(settings, failing, CODEC.stream(PROMPT, ()), adaptive=adaptive))
    assert events[-1].finish_reason == "length"
    second.begin()
    assert [take_epoch(second, 100, 150, 2) for _ in range(3)] == [False, True, False]
