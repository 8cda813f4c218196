"""Keys, limits per minute, places."""

from __future__ import annotations

import pytest

from toolkit.errors import UsageError
from toolkit.gateway.guard import Guard, read_keys
from toolkit.gateway.protocol import Refusal

KEY, OTHER = "a-key-of-sixteen-characters", "another-key-of-many-characters"


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_keys_are_separated_by_commas() -> None:
    assert read_keys({"TOOLKIT_API_KEYS": f"{KEY}, {OTHER},"}) == (KEY, OTHER)
    assert read_keys({}) == ()


@pytest.mark.parametrize("stated", ["", " , ", "short", f"{KEY},with a space in the key"])
def test_keys_that_cannot_be_used_are_refused_and_not_printed(stated: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_keys({"TOOLKIT_API_KEYS": stated})
    assert "TOOLKIT_API_KEYS" in str(caught.value)
    assert not stated.strip(", ") or stated not in str(caught.value)


def test_a_key_has_a_name_that_does_not_tell_it() -> None:
    guard = Guard((KEY, OTHER), None, 1, Clock())
    name = guard.name(f"Bearer {OTHER}")
    assert name == guard.name(f"bearer  {OTHER} ")
    assert name != guard.name(f"Bearer {KEY}")
    assert name not in OTHER
    assert len(name) == 8


@pytest.mark.parametrize("sent", [None, "", KEY, f"Basic {KEY}", "Bearer", "Bearer wrong-key"])
def test_other_keys_are_refused(sent: str | None) -> None:
    with pytest.raises(Refusal) as caught:
        Guard((KEY,), None, 1, Clock()).name(sent)
    assert caught.value.status == 401
    assert KEY not in caught.value.message


def test_a_minute_has_so_many_requests_and_they_come_back_evenly() -> None:
    clock = Clock()
    guard = Guard((), 3, 1, clock)
    for _ in range(3):
        guard.count("a")
    with pytest.raises(Refusal) as caught:
        guard.count("a")
    assert (caught.value.status, caught.value.retry_after_s) == (429, 20)
    guard.count("b")
    clock.now_s = 19.0
    with pytest.raises(Refusal):
        guard.count("a")
    clock.now_s = 20.5
    guard.count("a")
    clock.now_s = 3600.0
    for _ in range(3):
        guard.count("a")
    with pytest.raises(Refusal):
        guard.count("a")


def test_a_full_house_says_when_to_come_again() -> None:
    clock = Clock()
    guard = Guard((), None, 2, clock)
    with guard.place(), guard.place():
        assert guard.running == 2
        with pytest.raises(Refusal) as caught, guard.place():
            pass
        assert (caught.value.status, caught.value.retry_after_s) == (503, 1)
        clock.now_s = 20.0
    assert guard.running == 0
    assert guard.retry_after_s() == 10
