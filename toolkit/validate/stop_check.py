"""Does a stop word end the text where it stands, also inside a block of accepted drafts?

The stop words are taken from the plain texts themselves, so what has to come out is known without
another model: the plain text up to the word's first place. A block that is accepted whole and
looked at only at its end runs past it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from toolkit.records.judged import StopCheck
from toolkit.validate.arms import Sender

if TYPE_CHECKING:
    from toolkit.client import RequestTiming

__all__ = ["check_stops", "stop_words"]

LENGTH = 3  # characters of a stop word
REQUESTS = 24


def stop_words(texts: Sequence[str], count: int, seed: int) -> Iterator[tuple[int, str, str]]:
    """(index of a text, a word out of it, the text before the word's first place), from places
    chosen by `seed`.
    """
    generator = random.Random(seed)
    long_enough = [index for index, text in enumerate(texts) if len(text) > 2 * LENGTH]
    for number in range(count if long_enough else 0):
        index = long_enough[number % len(long_enough)]
        text = texts[index]
        place = generator.randrange(LENGTH, len(text) - LENGTH + 1)
        word = text[place : place + LENGTH]
        yield index, word, text[: text.index(word)]


def check_stops(
    sender: Sender,
    prompts: Sequence[str],
    plain: Sequence[RequestTiming],
    same: Sequence[bool],
    *,
    seed: int,
    **options: Any,
) -> StopCheck | None:
    """Greedy requests of the speculative arm, on prompts whose speculative text is the plain one
    (`same`).
    """
    indices = [index for index, equal in enumerate(same) if equal]
    wrong, first, sent = 0, None, 0
    for index, word, before in stop_words([plain[index].text for index in indices], REQUESTS, seed):
        number = indices[index]
        timing = sender.send(
            number, prompts[number], "speculative", temperature=0.0, stop=(word,), **options
        )
        sent += 1
        if (fault := _fault(timing.text, timing.finish_reason, word, before)) is not None:
            wrong += 1
            first = (
                first
                or f"prompt {number + 1}, stop word {word!r} at character {len(before) + 1}:"
                f" {fault}"
            )
    return StopCheck(sent, wrong, first) if sent else None


def _fault(text: str, finish_reason: str | None, word: str, before: str) -> str | None:
    """A server may leave the stop word in the text or out of it. A text that is another before the
    word has met a near-tie, which is not judged here.
    """
    ends = f"ends by {finish_reason} after {len(text)} characters"
    if word in text.removesuffix(word):
        return f"the text runs past it and {ends}"
    if text in (before, before + word):
        return None if finish_reason == "stop" else f"the text stands still there, but {ends}"
    return f"the text {ends}" if finish_reason == "stop" and before.startswith(text) else None
