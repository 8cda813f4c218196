"""Which expressions of a tokenizer are refused, and that those in use are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from toolkit.checkpoints.patterns import expressions, runs_away
from toolkit.checkpoints.tokenizer import load_tokenizer
from toolkit.errors import CheckpointError

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize(
    "expression",
    [
        GPT2,
        LLAMA3,
        r"(a+){1,3}",
        r"[(a+)]+",
        r"\(a+\)+",
        r"(?:ab)+c*",
        r"(a{2})+",
        r"[]+)(]+x*",
        "",
    ],
)
def test_what_tokenizers_use_is_allowed(expression: str) -> None:
    assert not runs_away(expression)


@pytest.mark.parametrize(
    "expression",
    [
        r"(a+)+$",
        r"(?:\s*)*x",
        r"((a+)b?)+",
        r"([a-z]+)*",
        r"(a+){1,30}",
        r"(?i:(x|y+))+?",
        r"(a{2,})+",
    ],
)
def test_a_repeat_inside_a_repeat_is_found(expression: str) -> None:
    assert runs_away(expression)


def test_a_tokenizer_with_such_an_expression_is_refused_before_it_is_used(tmp_path: Path) -> None:
    split = {"type": "Split", "pattern": {"Regex": r"(\w+\s?)+$"}, "behavior": "Isolated"}
    content = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "X"}, split]}}
    assert list(expressions(content)) == [r"(\w+\s?)+$"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="a prompt can take exponentially long") as refused:
        load_tokenizer(tmp_path)
    assert r"(\w+\s?)+$" in str(refused.value)
