"""Texts from a JSON Lines file: what calibration and validation read, with one idea of what a
usable line is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.errors import UsageError

__all__ = ["read_labels", "read_texts"]


def read_texts(file: Path, *keys: str, limit: int | None = None) -> list[str]:
    """The string under the first of `keys` that each line has; blank lines are skipped, and a byte
    order mark.

    limit: take that many at most, and look no further. Raises UsageError for a file that is missing
    or holds no text, and for a line that is not UTF-8, no JSON, without such a string, or has an
    empty one: with its number.
    """
    form = f'write one JSON object per line: {{"{keys[0]}": "..."}}'
    texts: list[str] = []
    for number, line in _lines(file):
        where = f"{file}:{number}"
        try:
            row = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise UsageError(
                f"line {number} is not UTF-8 (byte {error.start + 1})", where=where, hint=form
            ) from error
        except json.JSONDecodeError as error:
            what = f"line {number} is not valid JSON ({error.msg}, column {error.colno})"
            raise UsageError(what, where=where, hint=form) from error
        except RecursionError as error:
            raise UsageError(
                f"line {number} is nested too deeply", where=where, hint=form
            ) from error
        text = (
            next((row[key] for key in keys if key in row), None) if isinstance(row, dict) else None
        )
        if not isinstance(text, str):
            named = " or ".join(f"`{key}`" for key in keys)
            raise UsageError(
                f"line {number} has no {named} string (it is {_kind(row)})", where=where, hint=form
            )
        if not text.strip():
            raise UsageError(
                f"line {number} holds an empty text",
                where=where,
                hint="remove the line, or give it text",
            )
        if not _is_unicode(text):
            what = f"line {number} holds half of a surrogate pair, which is no character"
            raise UsageError(
                what,
                where=where,
                hint="write characters beyond U+FFFF as they are, or as both halves",
            )
        texts.append(text)
        if len(texts) == limit:
            break
    if not texts:
        raise UsageError("the file is empty", where=file, hint=form)
    return texts


def read_labels(file: Path, key: str, otherwise: str, limit: int | None = None) -> list[str]:
    """What lines say under `key`, where it is text, for the same lines that read_texts takes."""
    rows = [json.loads(line) for _, line in _lines(file)][:limit]
    return [row[key] if isinstance(row.get(key), str) else otherwise for row in rows]


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """(number, line) of lines that are not blank. Lines end at a newline alone: U+2028 may stand
    inside a string.
    """
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UsageError(
            f"cannot be read: {error.strerror}",
            where=file,
            hint="check the path and its permissions",
        ) from error
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if line.strip():
            yield number, line


def _kind(row: Any) -> str:
    return (
        f"an object with {', '.join(map(repr, row)) or 'no keys'}"
        if isinstance(row, dict)
        else type(row).__name__
    )


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
