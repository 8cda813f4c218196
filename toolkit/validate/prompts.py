"""The prompts file: JSON Lines with a `prompt` (or `text`) string per line."""

from __future__ import annotations

import json
from pathlib import Path

from toolkit.errors import UsageError

__all__ = ["read_prompts"]


def read_prompts(path: Path, limit: int) -> tuple[str, ...]:
    """The first `limit` prompts. Raises UsageError naming the line that cannot be used."""
    mend = 'Write one JSON object per line: {"prompt": "..."}'
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise UsageError(
            f"the prompts cannot be read: {error.strerror}", where=path, mend="Correct validation.prompts."
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError("not UTF-8", where=path, mend="Save the file as UTF-8.") from error
    prompts: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
        except ValueError as error:
            raise UsageError(f"not JSON: {error}", where=f"{path}:{number}", mend=mend) from error
        prompt = data.get("prompt", data.get("text")) if isinstance(data, dict) else None
        if not isinstance(prompt, str) or not prompt:
            raise UsageError("no `prompt` string that says something", where=f"{path}:{number}", mend=mend)
        prompts.append(prompt)
        if len(prompts) == limit:
            break
    if not prompts:
        raise UsageError("no prompts in this file", where=path, mend=mend)
    return tuple(prompts)
