"""Files of calibration texts and prompts: valid ones, and every fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.errors import UsageError
from toolkit.pipeline.texts import read_labels, read_texts


def written(tmp_path: Path, *lines: str) -> Path:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return file


def test_either_key_is_read_the_first_one_named_wins_and_blank_lines_are_skipped(
    tmp_path: Path,
) -> None:
    file = written(
        tmp_path,
        '{"text": "one"}',
        "",
        '{"prompt": "two\\nlines", "id": 3}',
        '{"prompt": "a", "text": "b"}',
    )
    assert read_texts(file, "text", "prompt") == ["one", "two\nlines", "b"]
    assert read_texts(file, "prompt", "text") == ["one", "two\nlines", "a"]


def test_lines_after_the_limit_are_not_looked_at(tmp_path: Path) -> None:
    assert read_texts(
        written(tmp_path, '{"text": "one"}', '{"text": "two"}', "bad"), "text", limit=2
    ) == ["one", "two"]


def test_a_byte_order_mark_windows_line_ends_and_foreign_separators_do_no_harm(
    tmp_path: Path,
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes('\ufeff{"text": "one"}\r\n{"text": "a\u2028b \\ud83d\\ude00"}'.encode())
    assert read_texts(file, "text") == ["one", "a\u2028b \U0001f600"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'text': 1}", r"line 2 is not valid JSON \(Expecting property name .*, column 2\)"),
        ('{"text": "cut', "line 2 is not valid JSON"),
        ("[" * 100_000, "line 2 is nested too deeply"),
        ('["text"]', "line 2 has no `text` or `prompt` string .it is list"),
        ('{"txt": "a"}', "line 2 has no `text` or `prompt` string .it is an object with 'txt'"),
        ('{"text": 3}', "line 2 has no `text`"),
        ('{"text": "  "}', "line 2 has an empty text"),
        ('{"text": "\\ud800"}', "line 2 has half of a surrogate pair"),
    ],
)
def test_a_bad_line_is_named(line: str, message: str, tmp_path: Path) -> None:
    file = written(tmp_path, '{"text": "one"}', line, '{"text": "three"}')
    with pytest.raises(UsageError, match=message) as caught:
        read_texts(file, "text", "prompt")
    assert str(caught.value).startswith(f"{file}:2: ")


def test_bytes_that_are_not_utf8_are_named(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "one"}\n{"text": "\xff"}\n')
    with pytest.raises(UsageError, match=r"line 2 is not UTF-8 \(byte 11\)"):
        read_texts(file, "text")


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_file_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(
        UsageError, match=r'the file is empty\n  write one JSON object per line: {"prompt": "..."}'
    ):
        read_texts(tmp_path / "a.jsonl", "prompt")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_texts(tmp_path / "a.jsonl", "text")


def test_a_label_that_no_report_can_hold_is_refused(tmp_path: Path) -> None:
    file = written(
        tmp_path, '{"prompt": "a", "domain": "code"}', '{"prompt": "b", "domain": "\\ud800"}'
    )
    assert read_labels(file, "domain", "all", limit=1) == ["code"]
    with pytest.raises(UsageError, match="line 2 has in `domain` half of a surrogate pair"):
        read_labels(file, "domain", "all")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        read_texts(tmp_path, "text")
