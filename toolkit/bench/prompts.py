"""The prompts file: JSON Lines with a `prompt` (or `text`) string per line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from toolkit.errors import UsageError
from toolkit.pipeline.texts import read_texts

__all__ = ["check_lengths", "read_prompts"]

# More than a token holds on average. Of a much longer prompt only this much is encoded first: a
# tokenizer takes seconds for ten megabytes in one line, and for some texts minutes.
CHARACTERS_PER_TOKEN = 16


def read_prompts(path: Path, limit: int) -> tuple[str, ...]:
    """The first `limit` prompts. Raises UsageError, which names the line that cannot be used."""
    return tuple(read_texts(path, "prompt", "text", limit=limit))


def check_lengths(
    path: Path, limit: int, encode: Callable[[str], Sequence[int]], max_input_len: int
) -> None:
    """Raise UsageError for the first prompt that is longer than the engine accepts."""
    for number, prompt in enumerate(read_prompts(path, limit), start=1):
        encoded = prompt[: CHARACTERS_PER_TOKEN * max_input_len]
        length = len(encode(encoded))
        if length <= max_input_len and encoded != prompt:
            encoded, length = prompt, len(encode(prompt))
        if length > max_input_len:
            at_least = "" if encoded == prompt else "at least "
            raise UsageError(
                f"prompt {number} has {at_least}{length} tokens, and engine.max_input_len is"
                f" {max_input_len}:"
                f" {prompt[:40]!r}...",
                where=path,
                hint="shorten or remove it, or raise max_input_len",
            )
