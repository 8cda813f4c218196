"""Which slot a sequence gets, and what of it is reused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.speculative.slots import Slot, choose_place, common_length

SYSTEM = list(range(100, 140))


def slots_of(*held: list[int]) -> list[Slot]:
    """Slots that were used one after the other, the first of them longest ago."""
    return [Slot(number, ids, last_use=number + 1 if ids else 0) for number, ids in enumerate(held)]


def chosen(
    free: list[Slot], ids: list[int], used: tuple[Slot, ...] = (), *, copies: bool = True
) -> tuple[int, int, int]:
    place = choose_place(free, used, ids, "", copies=copies)
    return place.slot.number, place.source.number, place.reused


@pytest.mark.parametrize("copies", [False, True])
def test_a_chat_that_goes_on_takes_its_own_slot(copies: bool) -> None:
    slots = slots_of([*SYSTEM, 1, 2, 3], [*SYSTEM, 4, 5], [7, 8])
    assert chosen(slots, [*SYSTEM, 4, 5, 6], copies=copies) == (1, 1, 42)


@pytest.mark.parametrize("copies", [False, True])
def test_the_last_token_is_always_computed(copies: bool) -> None:
    assert chosen(slots_of([7], [1, 2, 3, 4]), [1, 2, 3, 4], copies=copies) == (1, 1, 3)


@pytest.mark.parametrize("copies", [False, True])
def test_without_a_match_the_slot_that_was_used_longest_ago_is_taken(copies: bool) -> None:
    assert chosen(slots_of([1, 2], [3, 4])[::-1], [9, 9], copies=copies) == (0, 0, 0)
    assert chosen(slots_of([1, 2], [], []), [9, 9], copies=copies) == (1, 1, 0)


def test_a_shared_beginning_is_copied_and_costs_no_long_sequence() -> None:
    chat = [*SYSTEM, *range(60)]
    assert chosen(slots_of([1, 2], chat), [*SYSTEM, 99]) == (0, 1, 40)
    # An engine that does not copy: the longest match wins.
    assert chosen(slots_of([1, 2], chat), [*SYSTEM, 99], copies=False) == (1, 1, 40)


def test_what_a_running_request_holds_is_copied_where_the_engine_copies() -> None:
    running = Slot(5, [*SYSTEM, 1], last_use=9)
    assert chosen(slots_of([1, 2]), [*SYSTEM, 99], (running,)) == (0, 5, 40)
    assert chosen(slots_of([1, 2]), [*SYSTEM, 99], (running,), copies=False) == (0, 0, 0)


def test_a_few_tokens_are_not_worth_a_copy() -> None:
    assert chosen(slots_of([1], [*range(9), *range(50, 90)]), list(range(20))) == (0, 0, 0)


def test_another_salt_shares_nothing() -> None:
    slots = slots_of([1], [*SYSTEM, 2])
    slots[1].salt = "a"
    for salt, reused in (("a", 40), ("b", 0), ("", 0)):
        assert choose_place(slots, (), [*SYSTEM, 2], salt, copies=True).reused == reused


@given(
    first=st.lists(st.integers(0, 1), max_size=40), second=st.lists(st.integers(0, 1), max_size=40)
)
def test_the_common_length_is_that_of_the_longest_common_beginning(
    first: list[int], second: list[int]
) -> None:
    length = common_length(first, second)
    assert first[:length] == second[:length]
    assert length == min(len(first), len(second)) or first[length] != second[length]
