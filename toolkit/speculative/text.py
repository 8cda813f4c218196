"""Encoding of prompts, and decoding of output ids piece by piece: text is released only when no
later token can change it.

Two things are held back: a character that still lacks bytes, and the beginning of a stop word. All
pieces together are the decoding of all output ids up to the stop word, without special tokens. (One
exception: a byte-fallback decoder turns a whole run of byte tokens into replacement characters once
one of them is broken. Characters of such a run that were complete before are already released, and
stay.)

`tokenizers.DecodeStream` (0.22) was tried instead: it takes 2 us per token instead of 8, and gives
the same text for whole characters. But it never returns an unfinished end, holds back the whole
characters of a block together with it, waits without limit after broken bytes, repeats the prompt
if that ends inside a character, and decodes in this process, while the BLS model has to ask another
model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from toolkit.errors import CheckpointError, RequestError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Decoder", "TextCodec", "TextStream"]

CONTEXT_TOKENS = 6  # of the prompt, so that the first word keeps its leading space
MAX_CHARACTER_TOKENS = 4  # a character has up to 4 bytes, and byte fallback makes each a token
MAX_BROKEN_CHARACTERS = 64  # held back at most, since a later token may still complete them
# Tokens that are decoded together. Above this, every token is tried as the end of whole characters.
MAX_WINDOW_TOKENS = 64
REPLACEMENT_CHARACTER = "\N{REPLACEMENT CHARACTER}"
STOP_WORD_GROUP_TOKENS = 16  # searched for stop words with one call of the decoder


class Decoder(Protocol):
    def decode_many(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """The text of each row of ids, without special tokens."""
        ...


class TextCodec:
    """A tokenizer, read from tokenizer.json. Thread-safe: each stream keeps its own state."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        tokenizer.no_truncation()  # tokenizer.json may hold the limits of its training script
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._texts: dict[int, str] = {}  # of single tokens
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
        """The ids of a prompt. special_tokens: include what the tokenizer puts before a prompt (BOS
        or nothing).

        A batch of one, because it gives up Python's lock while it encodes. A single prompt does
        not: it would stop every other thread of the process, for half a second per megabyte.

        Raises RequestError for a text that the tokenizer gives up.
        """
        try:
            (encoding,) = self._tokenizer.encode_batch_fast(
                [prompt], add_special_tokens=special_tokens
            )
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        # A fault in Rust is a PanicException, which is no Exception. One is the limit that an
        # expression meets if it runs away. Whoever has to answer the request would miss it.
        except BaseException as error:
            raise RequestError(
                f"the tokenizer cannot encode this text: {error}",
                hint="Send another text. If others fail too, look at the expressions of"
                " tokenizer.json.",
            ) from error
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=self._skip)
        return text

    def decode_many(self, rows: Sequence[Sequence[int]]) -> list[str]:
        # One by one: a row has few tokens and takes 1 us, while decode_batch wakes a thread pool,
        # which takes 0.1 ms on two cores.
        return [self._text_of(row[0]) if len(row) == 1 else self.decode(row) for row in rows]

    def _text_of(self, token: int) -> str:
        """The text of one token, which is remembered: each is the context of the next one."""
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self.decode([token])
        return text

    def stream(self, prompt_ids: Sequence[int], stop: Sequence[str]) -> TextStream:
        return TextStream(self, prompt_ids, stop)


class TextStream:
    """The text of one request. `push` tokens as they come; `stopped_by` is set once a stop word is
    complete.

    The decoder may be in another process, so it is called once per push, or once per
    STOP_WORD_GROUP_TOKENS tokens if there are stop words.
    """

    def __init__(self, decoder: Decoder, prompt_ids: Sequence[int], stop: Sequence[str]) -> None:
        self._decoder = decoder
        self._stop = tuple(stop)
        self._window = list(prompt_ids[-CONTEXT_TOKENS:])  # ids that are decoded together
        self._released_ids = len(self._window)  # ids at its start whose text is released
        # Released characters of the window's text. None: exactly those of the first _released_ids.
        self._released_chars: int | None = None
        self._held = ""  # text that may be the beginning of a stop word
        self.stopped_by: str | None = None

    def push(self, tokens: Sequence[int]) -> tuple[int, str]:
        """Add tokens. Returns (how many of them belong to the output, the text that is final now).

        All of them belong to it, unless a stop word was completed: then those up to and including
        the token that completed it.
        """
        if not self._stop:
            return self._add(tokens) if tokens else (0, "")
        text = ""
        for start in range(0, len(tokens), STOP_WORD_GROUP_TOKENS):
            count, new = self._add(tokens[start : start + STOP_WORD_GROUP_TOKENS])
            text += new
            if self.stopped_by is not None:
                return start + count, text
        return len(tokens), text

    def finish(self) -> str:
        """Release what was held back, after the last token. An unfinished character becomes the
        replacement character.
        """
        if self.stopped_by is not None:
            return ""
        rest = ""
        if self._released_chars is not None:
            rest = self._decoder.decode_many([self._window])[0][self._released_chars :]
        self._window.clear()
        self._released_ids, self._released_chars = 0, None
        text = self._pass(rest)
        if self.stopped_by is None:
            text, self._held = text + self._held, ""
        return text

    def _add(self, tokens: Sequence[int]) -> tuple[int, str]:
        """Extend the window and release its new text. The text is read after all tokens, or after
        each token if there are stop words.

        Text that ends in a broken character waits, since the next token may complete it. When
        nothing waits, the window starts anew with the added tokens as context, because a decoder
        may treat the first token of a text differently (leading spaces), but never one in the
        middle.
        """
        counts: Sequence[int] = range(1, len(tokens) + 1) if self._stop else [len(tokens)]
        self._window.extend(tokens)
        texts = self._decode(len(tokens), counts)
        # Nothing waits, as with most tokens: what follows would find the same, and takes longer.
        if (
            self._released_chars is None
            and not self._stop
            and not texts[0].startswith(REPLACEMENT_CHARACTER)
            and not texts[1].endswith(REPLACEMENT_CHARACTER)
        ):
            new_text = texts[1][len(texts[0]) :]
            if new_text or len(self._window) >= MAX_WINDOW_TOKENS:
                del self._window[: self._released_ids]
            self._released_ids = len(self._window)
            return len(tokens), new_text
        texts = self._aligned(texts, len(tokens), counts)
        whole = self._last_whole(tokens, counts, texts)
        if whole:
            del self._window[len(self._window) - len(tokens) :]
            count, text = self._add(tokens[:whole])
            if self.stopped_by is not None:
                return count, text
            count, rest = self._add(tokens[whole:])
            return whole + count, text + rest

        released = self._released_chars if self._released_chars is not None else len(texts.pop(0))
        new_text, waits = "", False
        for count, text in zip(counts, texts, strict=True):
            unbroken = len(text.rstrip(REPLACEMENT_CHARACTER))
            waits = 0 < len(text) - unbroken < MAX_BROKEN_CHARACTERS
            final = max(released, unbroken if waits else len(text))
            new_text += self._pass(text[released:final])
            released = final
            if self.stopped_by is not None:
                return count, new_text
        if waits:
            self._released_chars = released
        else:
            if new_text or self._held or len(self._window) >= MAX_WINDOW_TOKENS:
                del self._window[: self._released_ids]
            self._released_ids, self._released_chars = len(self._window), None
        return len(tokens), new_text

    def _aligned(self, texts: list[str], added: int, counts: Sequence[int]) -> list[str]:
        """The texts of _decode, or those of a window that starts at the beginning of a character.

        The context is cut out of the prompt by tokens. If the cut is inside a character, a decoder
        with byte fallback would break all bytes from the cut to the new ones.
        """
        for _ in range(MAX_CHARACTER_TOKENS - 1):
            if (
                self._released_chars is not None
                or self._released_ids < 2
                or not texts[0].startswith(REPLACEMENT_CHARACTER)
            ):
                break
            del self._window[0]
            self._released_ids -= 1
            texts = self._decode(added, counts)
        return texts

    def _last_whole(
        self, tokens: Sequence[int], counts: Sequence[int], texts: Sequence[str]
    ) -> int:
        """The most added tokens after which all characters are whole. 0 if that is so after all of
        them, or after none.
        """
        if not texts[-1].endswith(REPLACEMENT_CHARACTER):
            return 0
        if not self._stop:
            total = len(tokens)
            is_small_window = len(self._window) < MAX_WINDOW_TOKENS
            first_count = total - MAX_CHARACTER_TOKENS + 1 if is_small_window else 1
            counts = range(max(1, first_count), total)
            texts = self._decode(total, counts) if counts else []
        whole = [
            count
            for count, text in zip(counts, texts[len(texts) - len(counts) :], strict=True)
            if not text.endswith(REPLACEMENT_CHARACTER)
        ]
        return max(whole, default=0)

    def _decode(self, added: int, counts: Sequence[int]) -> list[str]:
        """The window's text after each count of added tokens. Before these comes the text of the
        released ids, if the number of its characters is not known.
        """
        before = len(self._window) - added
        rows = [] if self._released_chars is not None else [self._window[: self._released_ids]]
        return self._decoder.decode_many(
            [*rows, *[self._window[: before + count] for count in counts]]
        )

    def _pass(self, text: str) -> str:
        """Return the text up to the first stop word, or up to what may become one."""
        if not self._stop:
            return text
        text, self._held = self._held + text, ""
        starts = [(text.find(word), word) for word in self._stop]
        hits = [(start, -len(word), word) for start, word in starts if start >= 0]
        if hits:
            start, _, self.stopped_by = min(hits)
            return text[:start]
        held_chars = max(_overlap(text, word) for word in self._stop)
        if held_chars:
            text, self._held = text[:-held_chars], text[-held_chars:]
        return text


def _overlap(text: str, word: str) -> int:
    """Length of the longest ending of `text` that is a beginning of `word`."""
    start = text.find(word[0], max(0, len(text) - len(word) + 1))
    while start >= 0:
        if word.startswith(text[start:]):
            return len(text) - start
        start = text.find(word[0], start + 1)
    return 0
