"""The prompts file: JSON Lines with a `prompt` (or `text`) string per line."""

from __future__ import annotations

from pathlib import Path

from toolkit.pipeline.texts import read_texts

__all__ = ["read_prompts"]


def read_prompts(path: Path, limit: int) -> tuple[str, ...]:
    """The first `limit` prompts. Raises UsageError naming the line that cannot be used."""
    return tuple(read_texts(path, "prompt", "text", limit=limit))
