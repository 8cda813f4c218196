"""What was written is read back equal, and nothing else is read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from toolkit.records.codec import from_json, to_json


@dataclass(frozen=True, slots=True)
class Part:
    count: int
    share: float | None = None


@dataclass(frozen=True, slots=True)
class Whole:
    name: str
    path: Path
    parts: tuple[Part, ...]
    pair: tuple[int, int | None]
    shares: dict[str, tuple[float, ...]]
    anything: dict[str, Any]
    outcome: Literal["PASS", "FAIL"]
    is_known: bool
    either: int | str | Part | None = None


def a_whole(**fields: Any) -> Whole:
    return Whole(
        **{
            "name": "x",
            "path": Path("/a/b"),
            "parts": (Part(1, 0.5), Part(2)),
            "pair": (1, None),
            "shares": {"ttft": (1.0, 2.5)},
            "anything": {"list": [1, {"deep": [True, None]}]},
            "outcome": "PASS",
            "is_known": True,
            **fields,
        }
    )


@pytest.mark.parametrize("either", [None, 4, "four", Part(4)])
def test_every_member_of_a_union_is_read_back(either: object) -> None:
    record = a_whole(either=either)
    assert from_json(Whole, json.loads(json.dumps(to_json(record)))) == record


def test_a_whole_number_stands_for_a_float() -> None:
    part = from_json(Part, {"count": 1, "share": 2})
    assert part == Part(1, 2.0)
    assert isinstance(part.share, float)


def test_a_path_that_is_no_utf_8_is_read_back() -> None:
    record = a_whole(path=Path("/a/\udcff"), name="\ud800")
    assert from_json(Whole, json.loads(json.dumps(to_json(record)))) == record


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("name", 5, "name: 5 is not text"),
        ("path", 5, "path: 5 is not text"),
        ("parts", "x", "parts: 'x' is not a list"),
        ("parts", [5], "parts[0]: 5 is not an object"),
        ("parts", [{"count": 1}, {"count": 1.5}], "parts[1].count: 1.5 is not a whole number"),
        ("parts", [{"count": 1.0}], "parts[0].count: 1.0 is not a whole number"),
        ("parts", [{"count": True}], "parts[0].count: true is not a whole number"),
        ("parts", [{"count": "1"}], "parts[0].count: '1' is not a whole number"),
        ("parts", [{"count": 1, "share": True}], "parts[0].share: true is not a finite number"),
        ("parts", [{"count": 1, "share": "1"}], "parts[0].share: '1' is not a finite number"),
        ("parts", [{"count": 1, "share": float("nan")}], "nan is not a finite number"),
        ("parts", [{"count": 1, "share": float("inf")}], "inf is not a finite number"),
        ("parts", [{"count": 1, "share": 10**400}], "is not a finite number"),
        ("parts", [{}], "parts[0].count: it is missing"),
        ("parts", [{"count": 1, "more": 2}], "parts[0].more: there is no such field"),
        ("pair", [1], "pair[1]: it is missing"),
        ("pair", [1, 2, 3], "pair: [1, 2, 3]: Tuple should have at most 2 items"),
        ("shares", [], "shares: [] is not an object"),
        ("shares", {"ttft": [None]}, "shares.ttft[0]: None is not a finite number"),
        ("outcome", "PASSED", "outcome: 'PASSED' is not 'PASS' or 'FAIL'"),
        ("is_known", 1, "is_known: 1 is not true or false"),
        ("either", 1.5, "1.5 is not a whole number"),
        ("surplus", 1, "surplus: there is no such field"),
    ],
)
def test_what_is_never_written_is_refused_with_its_place(
    field: str, value: object, said: str
) -> None:
    with pytest.raises(ValueError) as raised:
        from_json(Whole, {**to_json(a_whole()), field: value})
    assert said in str(raised.value)


def test_what_is_no_object_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^\[\] is not an object$"):
        from_json(Part, [])
