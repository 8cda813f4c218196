"""The prompts file. toolkit.pipeline.rows says which forms its rows have.

`toolkit bench` keeps a conversation as messages until it is sent: a chat endpoint gets the messages
and writes them with its own template, every other endpoint gets text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from toolkit.errors import UsageError
from toolkit.pipeline.rows import Row, read_rows
from toolkit.pipeline.texts import PROMPT_KEYS, Writer, read_texts

__all__ = [
    "Conversation",
    "Prompt",
    "check_lengths",
    "name_of",
    "numbered",
    "read_prompts",
    "read_unwritten",
    "text_of",
]

# More than a token holds on average. Of a much longer prompt only this much is encoded first: a
# tokenizer takes seconds for ten megabytes in one line, and for some texts minutes.
CHARACTERS_PER_TOKEN = 16


def read_prompts(path: Path, limit: int, chat: Path | None = None) -> tuple[str, ...]:
    """The first `limit` prompts, as text. chat: the checkpoint whose template writes conversations.
    Raises UsageError, which names the line that cannot be used.
    """
    return tuple(read_texts(path, *PROMPT_KEYS, limit=limit, chat=chat))


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt of messages. chat: the checkpoint whose template writes them as text, if known."""

    row: Row
    chat: Path | None

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages up to what the user asks."""
        return [dict(message) for message in self.row.messages[: self.row.asked]]


Prompt: TypeAlias = "str | Conversation"


def read_unwritten(
    path: Path, limit: int, chat: Path | None = None
) -> tuple[tuple[Prompt, ...], tuple[str, ...]]:
    """(the first `limit` prompts, conversations as such; the domain of each). Raises UsageError
    like read_prompts, except for what the template would refuse.
    """
    rows = read_rows(path, *PROMPT_KEYS, limit=limit)
    prompts = (Conversation(row, chat) if row.messages else row.text or "" for row in rows)
    return tuple(prompts), tuple(row.domain for row in rows)


def text_of(prompt: Prompt) -> str:
    """The prompt as text. Raises UsageError for a conversation that no known template writes, and
    what Writer raises.
    """
    return prompt if isinstance(prompt, str) else Writer(prompt.chat).text(prompt.row)


def name_of(prompt: Prompt) -> str:
    """What tells prompts apart, whatever a template makes of them."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt.messages)


def numbered(prompt: Prompt, number: int) -> Prompt:
    """The prompt with a number in front; of a conversation, in front of its first message. That
    changes every prefix of it, except for what the template writes before all conversations.
    """
    if isinstance(prompt, str):
        return f"{number}. {prompt}"
    first, *others = prompt.row.messages
    messages = ({**first, "content": f"{number}. {first['content']}"}, *others)
    text = None if prompt.row.text is None else f"{number}. {prompt.row.text}"
    return Conversation(replace(prompt.row, messages=messages, text=text), prompt.chat)


def check_lengths(
    path: Path,
    limit: int,
    encode: Callable[[str], Sequence[int]],
    max_input_len: int,
    chat: Path | None = None,
) -> None:
    """Raise UsageError for the first prompt that is longer than the engine accepts. chat: as in
    read_prompts.
    """
    for number, prompt in enumerate(read_prompts(path, limit, chat), start=1):
        encoded = prompt[: CHARACTERS_PER_TOKEN * max_input_len]
        length = len(encode(encoded))
        if length <= max_input_len and encoded != prompt:
            encoded, length = prompt, len(encode(prompt))
        if length > max_input_len:
            at_least = "" if encoded == prompt else "at least "
            raise UsageError(
                f"prompt {number} has {at_least}{length} tokens, and engine.max_input_len is"
                f" {max_input_len}:"
                f" {prompt[:40]!r}...",
                where=path,
                hint="shorten or remove it, or raise max_input_len",
            )
