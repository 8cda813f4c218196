"""How large a part of a request may be: the numbers that keep one request from slowing the others.

All of them are checked before the part is read, since reading is what costs. A prompt is encoded,
and stop words are searched for after every token, on threads that serve everybody.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized

from toolkit.errors import RequestError

__all__ = [
    "MAX_BIASED_WORDS",
    "MAX_BYTES_PER_TOKEN",
    "MAX_LOGITS_BYTES",
    "MAX_STOP_IDS",
    "MAX_STOP_WORDS",
    "MAX_WORD_BYTES",
    "check_logits",
    "check_prompt_bytes",
    "check_stop_ids",
    "check_words",
]

# Text has about 4 bytes per token, code and text without Latin letters fewer.
MAX_BYTES_PER_TOKEN = 16
MAX_STOP_WORDS = 64
MAX_BIASED_WORDS = 1024  # bad words and words with a bias: each is encoded once per request
MAX_WORD_BYTES = 256
# Of the logits that a request gets back: 256 tokens of a vocabulary of 128k. A draft's call asks
# for those of its few drafts.
MAX_LOGITS_BYTES = 128 << 20
MAX_STOP_IDS = 4096  # of all stop words together, where they come as ids


def check_prompt_bytes(prompt: Sized, max_input_len: int | None, name: str) -> None:
    """Raises RequestError for a prompt in UTF-8 that is too long to be worth encoding.
    max_input_len: the deployment's, in tokens; None: unknown, so any length passes.
    """
    if max_input_len is not None and len(prompt) > MAX_BYTES_PER_TOKEN * max_input_len:
        raise RequestError(
            f"{name} has {len(prompt)} bytes, and this deployment takes up to"
            f" {MAX_BYTES_PER_TOKEN * max_input_len}: {MAX_BYTES_PER_TOKEN} for each of its"
            f" {max_input_len} tokens (max_input_len)",
            hint="Send a shorter prompt, or build with a larger engine.max_input_len.",
        )


def check_words(words: Sequence[Sized], name: str, max_words: int = MAX_STOP_WORDS) -> None:
    """Raises RequestError for more words than max_words, or a word in UTF-8 that is too long."""
    if len(words) > max_words:
        raise RequestError(f"{name} holds {len(words)} words; {max_words} are served at most")
    longest = max(map(len, words), default=0)
    if longest > MAX_WORD_BYTES:
        raise RequestError(
            f"{name} holds a word of {longest} bytes; a word has {MAX_WORD_BYTES} at most"
        )


def check_stop_ids(count: int, name: str) -> None:
    """Raises RequestError for stop words of more than MAX_STOP_IDS ids."""
    if count > MAX_STOP_IDS:
        raise RequestError(f"{name} holds {count} ids; {MAX_STOP_IDS} are served at most")


def check_logits(tokens: int, vocab_size: int) -> None:
    """Raises RequestError if the float32 logits of so many tokens are too many to keep for an
    answer.
    """
    size = 4 * tokens * vocab_size
    if size > MAX_LOGITS_BYTES:
        raise RequestError(
            f"return_generation_logits of {tokens} tokens takes {size} bytes, and at most"
            f" {MAX_LOGITS_BYTES} are served",
            hint=f"Ask for at most {MAX_LOGITS_BYTES // (4 * vocab_size)} tokens in one request.",
        )
