"""Text in, ids out; ids in, text out bit by bit, never showing what a later token could still change.

Held back are a character whose bytes are not all there and the beginning of a stop word. What is shown in the end, put
together, is the decoding of all output ids up to the stop word, special tokens left out. (One exception: a byte-fallback
decoder turns a whole run of byte tokens into replacement characters once one of them is broken. Characters of such a run that
were complete are out by then and stay.)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from toolkit.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Decoder", "TextCodec", "TextStream"]

CONTEXT_TOKENS = 6  # of the prompt, so that the first word keeps its leading space
LONGEST_WINDOW = 64  # tokens decoded together at most while they end in broken characters
BROKEN = "\N{REPLACEMENT CHARACTER}"
GROUP = 16  # tokens looked through for stop words with one call of the decoder


class Decoder(Protocol):
    def decode_many(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """The text of each row of ids, special tokens left out."""
        ...


class TextCodec:
    """A tokenizer.json. Thread-safe: streams keep their own state."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        tokenizer.no_truncation()  # tokenizer.json may carry the limits of its training script
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)

    @classmethod
    def from_file(cls, path: Path, *, skip_special_tokens: bool = True) -> TextCodec:
        """Raises CheckpointError for a missing or damaged file."""
        from tokenizers import Tokenizer

        try:
            return cls(Tokenizer.from_file(str(path)), skip_special_tokens=skip_special_tokens)
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"cannot be read as a tokenizer: {error}", where=path) from error

    def encode(self, prompt: str, *, special_tokens: bool = True) -> list[int]:
        """The ids of a prompt; with special_tokens, behind whatever the tokenizer itself puts before it (BOS or nothing)."""
        ids: list[int] = self._tokenizer.encode(prompt, add_special_tokens=special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=self._skip)
        return text

    def decode_many(self, rows: Sequence[Sequence[int]]) -> list[str]:
        # One by one: a row is a few tokens (1 us), and decode_batch wakes a thread pool for it (0.1 ms on two cores).
        return [self.decode(row) for row in rows]

    def stream(self, prompt_ids: Sequence[int], stop: Sequence[str]) -> TextStream:
        return TextStream(self, prompt_ids, stop)


class TextStream:
    """The text of one request. `push` tokens as they come; `stopped_by` is set once a stop word is complete.

    The decoder may be far away, so it is called once per push (and per GROUP tokens, where there are stop words to find).
    """

    def __init__(self, decoder: Decoder, prompt_ids: Sequence[int], stop: Sequence[str]) -> None:
        self._decoder = decoder
        self._stop = tuple(stop)
        self._window = list(prompt_ids[-CONTEXT_TOKENS:])  # ids that are decoded together
        self._done = len(self._window)  # of them, those whose text is out
        self._shown: int | None = None  # characters of the window's text that are out; None: all of the first `_done` ids'
        self._held = ""  # text that may be the beginning of a stop word
        self.stopped_by: str | None = None

    def push(self, tokens: Sequence[int]) -> tuple[int, str]:
        """Add tokens. Returns (how many of them belong to the output, the text that is certain now).

        All of them do, unless a stop word was completed: then those up to and including the one that completed it.
        """
        if not tokens:
            return 0, ""
        if not self._stop:
            return len(tokens), self._add(tokens, [len(tokens)])[1]
        text = ""
        for start in range(0, len(tokens), GROUP):
            group = tokens[start : start + GROUP]
            count, new = self._add(group, range(1, len(group) + 1))
            text += new
            if self.stopped_by is not None:
                return start + count, text
        return len(tokens), text

    def finish(self) -> str:
        """What was held back, when no further token comes. An unfinished character decodes to the replacement character."""
        if self.stopped_by is not None:
            return ""
        rest = "" if self._shown is None else self._decoder.decode_many([self._window])[0][self._shown :]
        self._window.clear()
        self._done, self._shown = 0, None
        text = self._pass(rest)
        if self.stopped_by is None:
            text, self._held = text + self._held, ""
        return text

    def _add(self, tokens: Sequence[int], looks: Sequence[int]) -> tuple[int, str]:
        """Extend the window and let its new text through, as it stands after so many tokens as each of `looks` says.

        Text that ends in a broken character waits, since the next token may complete it. Once none is left, the window starts
        anew with what was added as context: a decoder may treat the first token of a text differently (leading spaces), and
        never one in the middle.
        """
        before = len(self._window)
        self._window.extend(tokens)
        ends = [before + look for look in looks]
        known = self._shown is not None
        rows = ([] if known else [self._window[: self._done]]) + [self._window[:end] for end in ends]
        texts = self._decoder.decode_many(rows)
        shown = self._shown if self._shown is not None else len(texts.pop(0))
        out, clean, grew, settled = "", self._done, False, False
        for look, end, text in zip(looks, ends, texts, strict=True):
            if text.endswith(BROKEN) and end - clean < LONGEST_WINDOW:
                certain = max(shown, len(text.rstrip(BROKEN)))
                new, settled = text[shown:certain], False
            else:
                certain, clean, settled = max(shown, len(text)), end, True
                new = text[shown:]
            shown, grew = certain, grew or bool(new)
            out += self._pass(new)
            if self.stopped_by is not None:
                return look, out
        self._shown = shown
        if settled and (grew or ends[-1] - self._done >= LONGEST_WINDOW):
            del self._window[: self._done]
            self._done, self._shown = len(self._window), None
        return len(tokens), out

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
