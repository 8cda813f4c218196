"""Read texts from a JSON Lines file. Calibration and validation use this, so that both have the
same rule for a valid line.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.errors import UsageError

__all__ = ["is_unicode", "read_labels", "read_texts"]


def read_texts(file: Path, *keys: str, limit: int | None = None) -> list[str]:
    """The text of each line: the string under the first of `keys` that the line has. Blank lines
    and a byte order mark are skipped.

    limit: stop after this many texts; later lines are not checked. Raises UsageError if the file is
    missing or has no text. Raises UsageError with the number of the line if a line is not UTF-8, is
    not a JSON object with such a string, or has an empty text.
    """
    hint = f'write one JSON object per line: {{"{keys[0]}": "..."}}'
    texts: list[str] = []
    for number, line in _lines(file):
        where = f"{file}:{number}"
        try:
            row = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise UsageError(
                f"line {number} is not UTF-8 (byte {error.start + 1})", where=where, hint=hint
            ) from error
        except json.JSONDecodeError as error:
            message = f"line {number} is not valid JSON ({error.msg}, column {error.colno})"
            raise UsageError(message, where=where, hint=hint) from error
        except RecursionError as error:
            raise UsageError(
                f"line {number} is nested too deeply", where=where, hint=hint
            ) from error
        text = None
        if isinstance(row, dict):
            text = next((row[key] for key in keys if key in row), None)
        if not isinstance(text, str):
            key_names = " or ".join(f"`{key}`" for key in keys)
            raise UsageError(
                f"line {number} has no {key_names} string (it is {_described(row)})",
                where=where,
                hint=hint,
            )
        if not text.strip():
            raise UsageError(
                f"line {number} has an empty text",
                where=where,
                hint="remove the line, or give it text",
            )
        if not is_unicode(text):
            raise _half_character(file, number, "has")
        texts.append(text)
        if len(texts) == limit:
            break
    if not texts:
        raise UsageError("the file is empty", where=file, hint=hint)
    return texts


def read_labels(file: Path, key: str, otherwise: str, limit: int | None = None) -> list[str]:
    """The text under `key` of each line that read_texts takes; `otherwise` if there is none. Raises
    UsageError with the number of the line if a label is not Unicode, since no report could hold it.
    """
    labels = []
    for number, line in itertools.islice(_lines(file), limit):
        label = json.loads(line).get(key)
        label = label if isinstance(label, str) else otherwise
        if not is_unicode(label):
            raise _half_character(file, number, f"has in `{key}`")
        labels.append(label)
    return labels


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """(number, line) of each line that is not blank. Only a newline ends a line, since a string may
    contain U+2028.
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


def _described(row: Any) -> str:
    if isinstance(row, dict):
        return f"an object with {', '.join(map(repr, row)) or 'no keys'}"
    return type(row).__name__


def _half_character(file: Path, number: int, has: str) -> UsageError:
    return UsageError(
        f"line {number} {has} half of a surrogate pair, which is not a character",
        where=f"{file}:{number}",
        hint="write a character beyond U+FFFF as it is, or with both halves of its pair",
    )


def is_unicode(text: str) -> bool:
    """Whether the text can be sent and stored. Half of a surrogate pair is no character; Python
    also makes halves of bytes in an argument that are not UTF-8.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
