"""Where an output ends: the one rule that the runtime, the rounds and the executor share.

A step brings a block of tokens: accepted drafts and one of the target's own behind them. Read from
the first to the last, the output ends with the first token that

- is an end token (EOS), or completes a stop word: the reason is "stop"; or
- is the last one that there is room for: the reason is "length".

Where one token is both, the reason is "stop". The token that ends the output belongs to it, and
what the block holds behind that token is dropped. An end token is no part of the text, so no stop
word is looked for in it.

Room is what is left of max_tokens. The context length needs no rule of its own: `limits` refuses a
request whose prompt and max_tokens exceed it together. Pure, and in Python's own library only: it
is shipped with the BLS model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Literal

from toolkit.speculative.text import TextStream

__all__ = [
    "Block",
    "Ending",
    "Reason",
    "after_stop_sequence",
    "ending_of",
    "last_text",
    "read_block",
]

Reason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Ending:
    """count: tokens of the block that belong to the output. reason: why it ends there, or None."""

    count: int
    reason: Reason | None


def ending_of(
    tokens: Sequence[int],
    room: int,
    end_ids: Set[int],
    after_stop_word: Callable[[Sequence[int]], int | None],
) -> Ending:
    """What a block means for the output.

    after_stop_word: is called once, with the tokens that stand before the first end token and that
    there is room for. It returns after how many of them a stop word is complete, or None.
    """
    places = (index for index, token in enumerate(tokens) if token in end_ids)
    before_end = next(places, len(tokens))
    stopped = after_stop_word(tokens[: min(before_end, room)])
    if stopped is not None:
        return Ending(stopped, "stop")
    if before_end < min(len(tokens), room):
        return Ending(before_end + 1, "stop")
    if room <= len(tokens):
        return Ending(room, "length")
    return Ending(len(tokens), None)


@dataclass(frozen=True, slots=True)
class Block:
    """tokens: those that belong to the output. text: what is certain now. reason: as in Ending."""

    tokens: list[int]
    text: str
    reason: Reason | None


def read_block(text: TextStream, tokens: Sequence[int], room: int, end_ids: Set[int]) -> Block:
    """The rule for stop words that are text. `text.stopped_by` names the one that ended it."""
    certain = ""

    def push(shown: Sequence[int]) -> int | None:
        nonlocal certain
        count, certain = text.push(shown)
        return None if text.stopped_by is None else count

    ending = ending_of(tokens, room, end_ids, push)
    return Block(list(tokens[: ending.count]), certain, ending.reason)


def last_text(text: TextStream, reason: Reason) -> tuple[str, Reason]:
    """The text that was held back until an end for this reason, and the reason now that it is out.

    An unfinished character comes out as the replacement character, which may complete a stop word.
    """
    rest = text.finish()
    if text.stopped_by is not None:
        return rest, "stop"
    return rest, reason


def after_stop_sequence(
    output: Sequence[int],
    tokens: Sequence[int],
    stop_sequences: Sequence[tuple[int, ...]],
) -> int | None:
    """For stop words that are tokens: after how many of `tokens`, behind `output`, one is complete.

    No stop word reaches back into the prompt, which is no part of `output`.
    """
    longest = max(map(len, stop_sequences), default=0)
    if longest == 0:
        return None
    start = max(0, len(output) - longest)
    recent = (*output[start:], *tokens)
    for count in range(1, len(tokens) + 1):
        end = len(output) - start + count
        if any(word and recent[max(0, end - len(word)) : end] == word for word in stop_sequences):
            return count
    return None
