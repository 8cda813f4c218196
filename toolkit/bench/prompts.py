"""The prompts file: JSON Lines with a `prompt` (or `text`) string per line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from toolkit.errors import UsageError
from toolkit.pipeline.texts import read_texts

__all__ = ["check_lengths", "read_prompts"]


def read_prompts(path: Path, limit: int) -> tuple[str, ...]:
    """The first `limit` prompts. Raises UsageError, which names the line that cannot be used."""
    return tuple(read_texts(path, "prompt", "text", limit=limit))


def check_lengths(
    path: Path, limit: int, encode: Callable[[str], Sequence[int]], max_input_len: int
) -> None:
    """Raise UsageError for the first prompt that is longer than the engine accepts."""
    for number, prompt in enumerate(read_prompts(path, limit), start=1):
        length = len(encode(prompt))
        if length > max_input_len:
            raise UsageError(
                f"prompt {number} has {length} tokens, and engine.max_input_len is {max_input_len}:"
                f" {prompt[:40]!r}...",
                where=path,
                hint="shorten or remove it, or raise max_input_len",
            )
