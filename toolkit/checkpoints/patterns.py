"""Regular expressions of a tokenizer that run away.

A tokenizer.json brings its own expressions, and every prompt goes through them. A part that repeats
without bound inside another one that does, such as `(a+)+$`, can be matched in exponentially many
ways. The library gives up after ten million tries at one place of a text, so thirty characters cost
half a second and an error. But a text of many places that stay just below that costs 12 s per
kilobyte, which is hours for the longest prompts. None of the families that the toolkit reads has
such a part.

This is a look at the expression's form. It finds nested repeats, not alternatives that overlap,
such as `(a|a)+`: these are served, and what `TextCodec.encode` cannot encode is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

__all__ = ["expressions", "runs_away"]

MANY = 10  # a part that may repeat so often counts as repeating without bound
REPEAT = re.compile(r"([*+]|\{\d*,?\d*\})[?+]?")


def expressions(node: Any) -> Iterator[str]:
    """Every regular expression in the content of a tokenizer.json."""
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    for child in children:
        yield from expressions(child)
    if isinstance(node, dict) and isinstance(node.get("Regex"), str):
        yield node["Regex"]


def runs_away(expression: str) -> bool:
    """Whether a part that repeats without bound holds another one that does."""
    repeats = [False]  # for each open group: whether something in it repeats
    closed = False  # whether the last atom is a group with such a repeat
    place = 0
    while place < len(expression):
        character = expression[place]
        repeat = REPEAT.match(expression, place)
        if repeat is not None:
            if _is_unbounded(repeat[1]):
                if closed:
                    return True
                repeats[-1] = True
            place = repeat.end()
            continue
        closed = False
        if character == "\\":
            place += 1
        elif character == "[":
            place = _end_of_class(expression, place)
        elif character == "(":
            repeats.append(False)
            place += expression[place + 1 : place + 2] == "?"  # not a repeat, but the group's kind
        elif character == ")" and len(repeats) > 1:
            closed = repeats.pop()
            repeats[-1] |= closed
        place += 1
    return False


def _is_unbounded(repeat: str) -> bool:
    if repeat in "*+":
        return True
    most = repeat.strip("{}").rpartition(",")[2]
    return most == "" or int(most) >= MANY


def _end_of_class(expression: str, start: int) -> int:
    """The index of the bracket that closes the class which begins at `start`."""
    place, depth = start, 0
    while place < len(expression):
        character = expression[place]
        if character == "\\":
            place += 1
        elif character == "[":
            depth += 1
        elif character == "]" and place > start + 1 and expression[place - 2 : place] != "[^":
            depth -= 1
            if depth == 0:
                return place
        place += 1
    return place
