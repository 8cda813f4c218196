"""The prompts file. What makes a line usable is tested with the reader, in
tests/pipeline/test_texts.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from toolkit.bench.prompts import check_lengths, read_prompts
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


@pytest.mark.parametrize(
    ("prompt", "encoded", "words"),
    [
        ("abcdefghi", 9, "prompt 1 has 9 tokens"),
        ("a" * 10_000_000, 128, "prompt 1 has at least 128 tokens"),
        ("a" * 127 + " " * 100 + "a", 228, None),
    ],
)
def test_a_prompt_is_encoded_no_further_than_it_takes_to_refuse_it(
    tmp_path: Path, prompt: str, encoded: int, words: str | None
) -> None:
    """A tokenizer that makes a token of every letter, and of any number of spaces."""
    path, longest = tmp_path / "prompts.jsonl", 0
    path.write_text(json.dumps({"prompt": prompt}))

    def encode(text: str) -> Sequence[int]:
        nonlocal longest
        longest = max(longest, len(text))
        return [1] * len(text.replace(" ", ""))

    if words is None:
        check_lengths(path, 4, encode, 128)
    else:
        with pytest.raises(UsageError, match=words):
            check_lengths(path, 4, encode, 8)
    assert longest == encoded
