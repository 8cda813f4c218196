from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.errors import UsageError
from toolkit.validate.prompts import read_prompts


def test_the_first_lines_are_taken_and_blank_ones_skipped(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"text": "b\\u2028c"}\n{"prompt": "d"}\n', encoding="utf-8")
    assert read_prompts(path, 2) == ("a", "b\u2028c")


@pytest.mark.parametrize("line", ["not json", '{"other": "x"}', '{"prompt": 3}', '{"prompt": ""}', '["x"]'])
def test_a_bad_line_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n' + line + "\n")
    with pytest.raises(UsageError, match=r"prompts\.jsonl:2: "):
        read_prompts(path, 10)


def test_empty_missing_and_foreign_files_are_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(UsageError, match="no prompts"):
        read_prompts(empty, 10)
    with pytest.raises(UsageError, match="cannot be read"):
        read_prompts(tmp_path / "missing.jsonl", 10)
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(UsageError, match="not UTF-8"):
        read_prompts(tmp_path / "latin.jsonl", 10)
