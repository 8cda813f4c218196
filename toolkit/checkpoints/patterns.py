"""Regular expressions of a tokenizer that run away.

A tokenizer.json brings its own expressions, and every prompt goes through them. A part that repeats
without bound inside another one that does, such as `(a+)+$`, can be matched in exponentially many
ways. The library gives up after ten million tries at one place of a text, so thirty characters cost
half a second and an error. But a text of many places that stay just below that costs 12 s per
kilobyte, which is hours for the longest prompts. None of the families that the toolkit reads has
such a part.

A look at the expression's form finds nested repeats. Alternatives that overlap, such as
`(a|ab?)+$`, are found by trying: texts that repeat a piece of the expression, at which the library
gives up. What neither finds is served, and what `TextCodec.encode` cannot encode is refused.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

__all__ = ["expressions", "gives_up", "runs_away"]

MANY = 10  # a part that may repeat so often counts as repeating without bound
MOST_CHARACTERS = 256  # of an expression, whose pieces are tried
MOST_SECONDS = 10.0  # of trying; GPT-2's expression takes 0.04
PIECE_REPEATS = 32  # two ways to match each piece are more tries than the library makes
SAMPLES = ("a", "A", "1", " ", "\n", "'", ".", "_", "\u00e9", "\u4e2d")  # of the usual classes
ENDS = ("!", "\n", "\u4e2d", "a")  # one of them is no match, so that every other way is tried
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


def gives_up(expression: str) -> bool:
    """Whether the library gives up on a text that repeats one or two neighbouring characters of the
    expression, or of the usual classes. False if the expression is no valid one, or if MOST_SECONDS
    were not enough to find out: a busy machine is no reason to refuse a tokenizer.
    """
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Split

    try:
        split = Split(Regex(expression), "isolated")
    except Exception:  # the library's errors are plain ones
        return False
    begin = expression[:MOST_CHARACTERS]
    pieces = {begin[i : i + width] for i in range(len(begin)) for width in (1, 2)}
    # The library does not even begin where a character that each match needs is not in the text.
    needed = begin + "".join(SAMPLES)
    latest = time.monotonic() + MOST_SECONDS
    for piece in (*SAMPLES, *sorted(pieces)):
        if time.monotonic() > latest:
            break
        for end in ("", *(end + needed for end in ENDS)):
            try:
                split.pre_tokenize_str(piece * PIECE_REPEATS + end)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException:  # a fault in Rust is a PanicException, which is no Exception
                return True
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
