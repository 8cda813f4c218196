"""Conversations, and the files of published benchmarks, in the forms in which they are published.
The files of tests/data are made up in these forms.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import UsageError
from toolkit.pipeline.rows import Row, holds_conversations, read_rows

DATA = Path(__file__).parents[1] / "data"


def written(tmp_path: Path, *rows: Any) -> Path:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def shown(row: Row) -> list[str]:
    """Role's initial and content of each message; of a prompt's, with a star behind the last."""
    lines = [f"{message['role'][0]} {message['content']}" for message in row.messages]
    return [*lines[: row.asked], "*", *lines[row.asked :]]


def test_a_prompt_of_messages_ends_with_what_the_user_asks_last() -> None:
    rows = read_rows(DATA / "messages.jsonl", "prompt")
    assert [shown(row) for row in rows[1:3]] == [
        ["s Answer in one word.", "u Which month follows May?", "*", "a June."],
        [
            "u Name a bird.",
            "a Heron.",
            "u Another one,\nwhich cannot fly.",
            "*",
            "a Penguin.",
        ],
    ]
    assert [row.domain for row in rows] == ["short", "system", "turns", "code"]
    assert {row.text for row in rows} == {None}


def test_sharegpt_is_read_as_published() -> None:
    """Rows in which nobody asks are left out, and so is what does not alternate."""
    rows = read_rows(DATA / "sharegpt.json", "prompt")
    assert [shown(row) for row in rows] == [
        [
            "u How do I sort a list?",
            "*",
            "a Call sorted on it.",
            "u And backwards?",
            "a With reverse=True.",
        ],
        ["u Go on.", "*", "a That was all."],
        ["s You are terse.", "u Hello", "*", "a Hi."],
    ]
    assert [(row.number, row.text) for row in rows] == [
        (1, "How do I sort a list?"),
        (3, "Go on."),
        (4, "Hello"),
    ]


def test_questions_give_their_first_turn_and_their_category() -> None:
    rows = read_rows(DATA / "question.jsonl", "prompt")
    assert [(row.domain, row.text, len(row.messages)) for row in rows] == [
        ("writing", "Describe a harbour at dawn.", 1),
        ("math", "What is 12 times 12?", 1),
        ("coding", "Reverse a string.", 1),
    ]


def test_a_domain_wins_over_a_category_and_raw_text_may_have_either(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        {"prompt": "a", "domain": "d", "category": "c"},
        {"prompt": "b", "category": "c"},
        {"prompt": "c", "completion": "d"},
    )
    rows = read_rows(file, "prompt")
    assert [row.domain for row in rows] == ["d", "c", "all"]
    assert [row.completion for row in rows] == ["", "", "d"]


def test_messages_win_over_a_string_which_stands_for_them_without_a_template(
    tmp_path: Path,
) -> None:
    messages = [{"role": "user", "content": "a"}]
    (row,) = read_rows(written(tmp_path, {"prompt": "raw", "messages": messages}), "prompt")
    assert (row.text, row.asked) == ("raw", 1)


def test_a_field_of_another_meaning_is_no_conversation(tmp_path: Path) -> None:
    rows = read_rows(
        written(tmp_path, {"prompt": "a", "turns": 3}, {"prompt": "b", "messages": "none"}),
        "prompt",
    )
    assert [(row.text, row.messages) for row in rows] == [("a", ()), ("b", ())]


def test_of_a_list_no_more_entries_are_read_than_are_used(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('\ufeff [ {"prompt": "a"} ,\n {"prompt": "b"}, {"prompt": broken')
    assert [row.text for row in read_rows(file, "prompt", limit=2)] == ["a", "b"]
    with pytest.raises(UsageError) as caught:
        read_rows(file, "prompt")
    assert str(caught.value) == (
        f"{file}: entry 3 is not valid JSON (Expecting value, line 2 column 30)"
    )


@pytest.mark.parametrize(
    ("row", "error"),
    [
        (
            {"messages": [{"role": "user"}]},
            "line 1 cannot be used: messages[0].content: is missing",
        ),
        (
            {"messages": [{"role": "assistant", "content": "a"}]},
            "line 1 has no message with the role user",
        ),
        ({"messages": [{"role": "user", "content": " "}]}, "line 1 has an empty text"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "half of a surrogate pair"),
        ({"turns": []}, "line 1 has no string in `turns`"),
        ({"turns": [""]}, "line 1 has an empty text"),
        (
            {"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"]},
            "published without it\n  fetch the texts with NVIDIA's prepare_data.py",
        ),
    ],
)
def test_a_bad_conversation_is_named(tmp_path: Path, row: Any, error: str) -> None:
    file = written(tmp_path, row)
    with pytest.raises(UsageError) as caught:
        read_rows(file, "prompt")
    assert str(caught.value).startswith(f"{file}:1: line 1 ")
    assert error in str(caught.value)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("[]", "the file is empty"),
        ("[", "entry 1 is not valid JSON"),
        ('[{"prompt": "a"} {"prompt": "b"}]', r"entry 1 is not valid JSON \(Expecting ','"),
        ('["a"]', "entry 1 has no `prompt` string .it is str"),
        ("[" * 100_000, "entry 1 is nested too deeply"),
    ],
)
def test_a_bad_list_is_named(tmp_path: Path, content: str, error: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(UsageError, match=error):
        read_rows(tmp_path / "a.json", "prompt")


def test_a_parquet_file_is_refused_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "test.parquet").write_bytes(b"PAR1\x15\x04")
    with pytest.raises(UsageError, match=r"Parquet.*\n  with pandas: read_parquet\(FILE\)"):
        read_rows(tmp_path / "test.parquet", "prompt")


def test_a_quick_look_overlooks_no_conversation(tmp_path: Path) -> None:
    for name in ("messages.jsonl", "sharegpt.json", "question.jsonl"):
        assert holds_conversations(DATA / name)
    assert not holds_conversations(written(tmp_path, {"prompt": "turns of messages"}))
    assert not holds_conversations(tmp_path / "missing.jsonl")
