"""Text in, ids out; ids in, text out bit by bit, never showing what a later token could still
change.

Held back are a character whose bytes are not all there and the beginning of a stop word. What is
shown in the end, put together, is the decoding of all output ids up to the stop word, special
tokens left out. (One exception: a byte-fallback decoder turns a whole run of byte tokens into
replacement characters once one of them is broken. Characters of such a run that were complete are
out by then and stay.)

`tokenizers.DecodeStream` (0.22) was tried in its place: 2 us per token instead of 8, and the same
for whole characters. But it keeps an unfinished end to itself, holds back a block's whole
characters with it, waits without limit behind broken bytes, repeats the prompt where that ends
inside a character, and decodes in this process, where the BLS model asks another model.
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
LONGEST_CHARACTER = 4  # bytes, and so tokens of a tokenizer that falls back to them
LONGEST_WAIT = 64  # broken characters held back at most, in the hope that they are not
# tokens decoded together, beyond which every place is looked at where characters may be whole
LONGEST_WINDOW = 64
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
        """The ids of a prompt; with special_tokens, behind whatever the tokenizer itself puts
        before it (BOS or nothing).
        """
        ids: list[int] = self._tokenizer.encode(prompt, add_special_tokens=special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=self._skip)
        return text

    def decode_many(self, rows: Sequence[Sequence[int]]) -> list[str]:
        # One by one: a row is a few tokens (1 us), and decode_batch wakes a thread pool for it (0.1
        # ms on two cores).
        return [self.decode(row) for row in rows]

    def stream(self, prompt_ids: Sequence[int], stop: Sequence[str]) -> TextStream:
        return TextStream(self, prompt_ids, stop)


class TextStream:
    """The text of one request. `push` tokens as they come; `stopped_by` is set once a stop word is
    complete.

    The decoder may be far away, so it is called once per push (and per GROUP tokens, where there
    are stop words to find).
    """

    def __init__(self, decoder: Decoder, prompt_ids: Sequence[int], stop: Sequence[str]) -> None:
        self._decoder = decoder
        self._stop = tuple(stop)
        self._window = list(prompt_ids[-CONTEXT_TOKENS:])  # ids that are decoded together
        self._done = len(self._window)  # of them, those whose text is out
        self._shown: int | None = (
            # characters of the window's text that are out; None: all of the first `_done` ids'
            None
        )
        self._held = ""  # text that may be the beginning of a stop word
        self.stopped_by: str | None = None

    def push(self, tokens: Sequence[int]) -> tuple[int, str]:
        """Add tokens. Returns (how many of them belong to the output, the text that is certain
        now).

        All of them do, unless a stop word was completed: then those up to and including the one
        that completed it.
        """
        text, size = "", GROUP if self._stop else max(1, len(tokens))
        for start in range(0, len(tokens), size):
            count, new = self._add(tokens[start : start + size])
            text += new
            if self.stopped_by is not None:
                return start + count, text
        return len(tokens), text

    def finish(self) -> str:
        """What was held back, when no further token comes. An unfinished character decodes to
        the replacement character.
        """
        if self.stopped_by is not None:
            return ""
        rest = (
            ""
            if self._shown is None
            else self._decoder.decode_many([self._window])[0][self._shown :]
        )
        self._window.clear()
        self._done, self._shown = 0, None
        text = self._pass(rest)
        if self.stopped_by is None:
            text, self._held = text + self._held, ""
        return text

    def _add(self, tokens: Sequence[int]) -> tuple[int, str]:
        """Extend the window and let its new text through, as it stands after all tokens, or each
        where there are stop words.

        Text that ends in a broken character waits, since the next token may complete it. Once none
        is left, the window starts anew with what was added as context: a decoder may treat the
        first token of a text differently (leading spaces), and never one in the middle.
        """
        looks: Sequence[int] = range(1, len(tokens) + 1) if self._stop else [len(tokens)]
        self._window.extend(tokens)
        texts = self._aligned(len(tokens), looks)
        whole = self._last_whole(tokens, looks, texts)
        if whole:
            del self._window[len(self._window) - len(tokens) :]
            count, text = self._add(tokens[:whole])
            if self.stopped_by is not None:
                return count, text
            count, rest = self._add(tokens[whole:])
            return whole + count, text + rest

        shown = self._shown if self._shown is not None else len(texts.pop(0))
        out, waits = "", False
        for look, text in zip(looks, texts, strict=True):
            sound = len(text.rstrip(BROKEN))
            waits = 0 < len(text) - sound < LONGEST_WAIT
            certain = max(shown, sound if waits else len(text))
            out += self._pass(text[shown:certain])
            shown = certain
            if self.stopped_by is not None:
                return look, out
        if waits:
            self._shown = shown
        else:
            if out or self._held or len(self._window) >= LONGEST_WINDOW:
                del self._window[: self._done]
            self._done, self._shown = len(self._window), None
        return len(tokens), out

    def _aligned(self, added: int, looks: Sequence[int]) -> list[str]:
        """The window's texts, see _decode, from the beginning of a character on.

        The context is cut out of the prompt by tokens, and a decoder with byte fallback would break
        all bytes from the cut to the new ones.
        """
        texts = self._decode(added, looks)
        for _ in range(LONGEST_CHARACTER - 1):
            if self._shown is not None or self._done < 2 or not texts[0].startswith(BROKEN):
                break
            del self._window[0]
            self._done -= 1
            texts = self._decode(added, looks)
        return texts

    def _last_whole(self, tokens: Sequence[int], looks: Sequence[int], texts: Sequence[str]) -> int:
        """After how many of the added tokens all characters are whole, if that is so after some
        of them and not after all.
        """
        if not texts[-1].endswith(BROKEN):
            return 0
        if not self._stop:
            count = len(tokens)
            likely = count - LONGEST_CHARACTER + 1 if len(self._window) < LONGEST_WINDOW else 1
            looks = range(max(1, likely), count)
            texts = self._decode(count, looks) if looks else []
        whole = [
            look
            for look, text in zip(looks, texts[len(texts) - len(looks) :], strict=True)
            if not text.endswith(BROKEN)
        ]
        return max(whole, default=0)

    def _decode(self, added: int, looks: Sequence[int]) -> list[str]:
        """The text of what is out, where its length is not known, then that of the window after
        so many of the added tokens.
        """
        before = len(self._window) - added
        rows = [] if self._shown is not None else [self._window[: self._done]]
        return self._decoder.decode_many(
            [*rows, *[self._window[: before + look] for look in looks]]
        )

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
