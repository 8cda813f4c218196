"""The prompts file. What makes a line usable is tested with the reader, in
tests/pipeline/test_texts.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.bench.prompts import read_prompts
from toolkit.errors import UsageError


def test_the_first_lines_are_taken_by_prompt_or_else_text(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "a", "text": "x"}\n\n{"text": "b"}\n{"prompt": "d"}\n', encoding="utf-8"
    )
    assert read_prompts(path, 2) == ("a", "b")
    with pytest.raises(
        UsageError, match=r"prompts\.jsonl:5: line 5 has no `prompt` or `text` string"
    ):
        path.write_text(path.read_text() + '{"other": "e"}')
        read_prompts(path, 10)
