"""Text in, ids out; ids in, text out bit by bit, never showing what a later token could still change.

Held back are a character whose bytes are not all there and the beginning of a stop word. What is shown in the end, put
together, is the decoding of all output ids up to the stop word, special tokens left out. (One exception: a byte-fallback
decoder turns a whole run of byte tokens into replacement characters once one of them is broken. Characters of such a run that
were complete are out by then and stay.)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["TextCodec", "TextStream"]

CONTEXT_TOKENS = 6  # of the prompt, so that the first word keeps its leading space
LONGEST_WINDOW = 64  # tokens decoded together at most while they end in broken characters
BROKEN = "\N{REPLACEMENT CHARACTER}"


class TextCodec:
    """A tokenizer.json. Thread-safe: streams keep their own state."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_truncation()  # tokenizer.json may carry the limits of its training script
        tokenizer.no_padding()
        self._tokenizer = tokenizer

    @classmethod
    def from_file(cls, path: Path) -> TextCodec:
        """Raises CheckpointError for a missing or damaged file."""
        from tokenizers import Tokenizer

        try:
            return cls(Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"cannot be read as a tokenizer: {error}", where=path) from error

    def encode(self, prompt: str) -> list[int]:
        """The ids of a prompt, with whatever the tokenizer itself puts before it (BOS or nothing)."""
        ids: list[int] = self._tokenizer.encode(prompt).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def stream(self, prompt_ids: Sequence[int], stop: Sequence[str]) -> TextStream:
        return TextStream(self, prompt_ids, stop)


class TextStream:
    """The text of one request. `push` tokens as they come; `stopped_by` is set once a stop word is complete."""

    def __init__(self, codec: TextCodec, prompt_ids: Sequence[int], stop: Sequence[str]) -> None:
        self._codec = codec
        self._stop = tuple(stop)
        self._window = list(prompt_ids[-CONTEXT_TOKENS:])  # ids that are decoded together
        self._done = len(self._window)  # of them, those whose text is out
        self._shown = len(codec.decode(self._window))  # characters of the window's text that are out
        self._held = ""  # text that may be the beginning of a stop word
        self.stopped_by: str | None = None

    def push(self, tokens: Sequence[int]) -> tuple[int, str]:
        """Add tokens. Returns (how many of them belong to the output, the text that is certain now).

        All of them do, unless a stop word was completed: then those up to and including the one that completed it.
        """
        if not self._stop:
            return len(tokens), self._decode(tokens)
        text = ""
        for index, token in enumerate(tokens):
            text += self._pass(self._decode((token,)))
            if self.stopped_by is not None:
                return index + 1, text
        return len(tokens), text

    def finish(self) -> str:
        """What was held back, when no further token comes. An unfinished character decodes to the replacement character."""
        if self.stopped_by is not None:
            return ""
        rest = self._codec.decode(self._window)[self._shown :]
        self._window.clear()
        self._shown = self._done = 0
        text = self._pass(rest)
        if self.stopped_by is None:
            text, self._held = text + self._held, ""
        return text

    def _decode(self, tokens: Sequence[int]) -> str:
        """New text of the window. Text that ends in a broken character waits, since the next token may complete it.

        The window then starts anew behind what is out, with those last tokens as context: a decoder may treat the first token
        of a text differently (leading spaces), and never one in the middle.
        """
        self._window.extend(tokens)
        text = self._codec.decode(self._window)
        if text.endswith(BROKEN) and len(self._window) - self._done < LONGEST_WINDOW:
            certain = len(text.rstrip(BROKEN))
            new, self._shown = text[self._shown : certain], max(self._shown, certain)
            return new
        new = text[self._shown :]
        if new or len(self._window) - self._done >= LONGEST_WINDOW:
            del self._window[: self._done]
            self._done = len(self._window)
            self._shown = len(self._codec.decode(self._window))
        return new

    def _pass(self, text: str) -> str:
        """Let text through up to the first stop word, or up to what may become one."""
        if not self._stop:
            return text
        text, self._held = self._held + text, ""
        found = [(text.find(word), word) for word in self._stop]
        hits = [(at, -len(word), word) for at, word in found if at >= 0]
        if hits:
            at, _, self.stopped_by = min(hits)
            return text[:at]
        keep = max(_overlap(text, word) for word in self._stop)
        if keep:
            text, self._held = text[:-keep], text[-keep:]
        return text


def _overlap(text: str, word: str) -> int:
    """Length of the longest end of `text` that is a beginning of `word`."""
    for length in range(min(len(text), len(word) - 1), 0, -1):
        if text.endswith(word[:length]):
            return length
    return 0
