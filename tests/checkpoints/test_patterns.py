"""Which expressions of a tokenizer are refused, and that those in use are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from toolkit.checkpoints.patterns import expressions, gives_up, runs_away
from toolkit.checkpoints.tokenizer import load_tokenizer
from toolkit.errors import CheckpointError

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize(
    "expression",
    [
        GPT2,
        LLAMA3,
        O200K,
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
    assert not gives_up(expression)


@pytest.mark.parametrize(
    "expression", [r"(a|a)+$", r"(?:x|xx?)*y", r"(?:\w|\p{L})+\s$", r"(ab|a|b)+c", r"(?:é|\S)+1"]
)
def test_alternatives_that_overlap_are_found_by_trying(expression: str) -> None:
    assert not runs_away(expression)
    assert gives_up(expression)


def test_an_expression_that_is_none_is_left_to_the_library() -> None:
    assert not gives_up("(a")


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


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        (r"(\w+\s?)+$", "repeats what repeats"),
        (r"(\w|\p{L})+$", "matches some texts in very many ways"),
    ],
)
def test_a_tokenizer_with_such_an_expression_is_refused_before_it_is_used(
    tmp_path: Path, expression: str, why: str
) -> None:
    split = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated"}
    content = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "X"}, split]}}
    assert list(expressions(content)) == [expression]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"exponentially long.* {why}") as refused:
        load_tokenizer(tmp_path)
    assert expression in str(refused.value)
