"""Where an output ends: the one rule that the runtime, the BLS loop and the executor share.

A step adds a block of tokens: the accepted drafts and one token of the target's own after them.
Read from the first to the last, the output ends with the first token that

- is an end token (EOS) or completes a stop word: the reason is "stop"; or
- is the last one that there is room for: the reason is "length".

If one token is both, the reason is "stop". The token that ends the output belongs to it, and the
rest of the block is dropped. An end token is not part of the text, so it is not searched for stop
words.

Room is what is left of max_tokens. The context length needs no rule here: `limits` refuses a
request whose prompt and max_tokens together exceed it. This module is pure and needs only Python's
standard library, since it is shipped with the BLS model.
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
    """count: tokens of the block that belong to the output. reason: why the output ends there, or
    None if it goes on.
    """

    count: int
    reason: Reason | None


def ending_of(
    tokens: Sequence[int],
    room: int,
    end_ids: Set[int],
    after_stop_word: Callable[[Sequence[int]], int | None],
) -> Ending:
    """Find where a block ends the output, if it does.

    after_stop_word: called once, with the tokens before the first end token that there is room for.
    It returns after how many of them a stop word is complete, or None.
    """
    end_indices = (index for index, token in enumerate(tokens) if token in end_ids)
    before_end = next(end_indices, len(tokens))
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
    """tokens: those that belong to the output. text: what is final now. reason: as in Ending."""

    tokens: list[int]
    text: str
    reason: Reason | None


def read_block(text: TextStream, tokens: Sequence[int], room: int, end_ids: Set[int]) -> Block:
    """Apply the rule with stop words that are text. `text.stopped_by` names the one that ended
    the output.
    """
    if len(tokens) < room and end_ids.isdisjoint(tokens):  # almost every block
        count, final_text = text.push(tokens)
        reason: Reason | None = None if text.stopped_by is None else "stop"
        return Block(list(tokens[:count]), final_text, reason)
    final_text = ""

    def push(visible_tokens: Sequence[int]) -> int | None:
        nonlocal final_text
        count, final_text = text.push(visible_tokens)
        return None if text.stopped_by is None else count

    ending = ending_of(tokens, room, end_ids, push)
    return Block(list(tokens[: ending.count]), final_text, ending.reason)


def last_text(text: TextStream, reason: Reason) -> tuple[str, Reason]:
    """Release the text that was held back. Returns it, and the final reason.

    An unfinished character becomes the replacement character. That may complete a stop word, which
    makes the reason "stop".
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
    """For stop words that are tokens: after how many of `tokens`, which follow `output`, a stop
    word is complete. None if none is.

    `output` does not hold the prompt, so no stop word reaches back into it.
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
