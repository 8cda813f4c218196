"""Check that a stop word ends the text where it stands, also inside a block of accepted tokens.

The stop words are taken from the plain texts themselves, so the right answer is known without
another model: the plain text up to the word's first place. A server that looks only at the end of
an accepted block runs past the word.
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
    """Yield (index of a text, a word in it, the text before the word's first place). `seed` chooses
    the places.
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
    """Send greedy requests with stop words to the speculative arm.

    same: whether the speculative text of each prompt is the plain one; only those prompts are used.
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
            place = f"prompt {number + 1}, stop word {word!r} at character {len(before) + 1}"
            first = first or f"{place}: {fault}"
    return StopCheck(sent, wrong, first) if sent else None


def _fault(text: str, finish_reason: str | None, word: str, before: str) -> str | None:
    """Say what is wrong with a text, or return None.

    A server may return the stop word or leave it out. A text that differs before the word met a
    near-tie, which is not judged here.
    """
    ends = f"ends by {finish_reason} after {len(text)} characters"
    if word in text.removesuffix(word):
        return f"the text runs past it and {ends}"
    if text in (before, before + word):
        return None if finish_reason == "stop" else f"the text stops there, but {ends}"
    return f"the text {ends}" if finish_reason == "stop" and before.startswith(text) else None
