"""What the preprocessing model does with one request: arrays in, arrays out, with TensorRT-LLM's
names.

It turns the prompt, stop words, bad words and biased words into ids, and returns the id that ends a
text. TensorRT-LLM's engines know a single end id. If a model has several (Llama 3 has three), BLS
sends the others as stop words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import RequestError
from toolkit.triton.tensors.size_limits import (
    MAX_BIASED_WORDS,
    MAX_STOP_WORDS,
    check_prompt_bytes,
    check_stop_ids,
    check_words,
)
from toolkit.triton.tensors.word_lists import pack

__all__ = ["Encoder", "Preprocessor"]

Array = NDArray[Any]
# Outputs whose rows have the same length for every prompt.
SAME_LENGTH = (
    "REQUEST_INPUT_LEN",
    "DECODER_INPUT_ID",
    "REQUEST_DECODER_INPUT_LEN",
    "EMBEDDING_BIAS",
    "REQUEST_OUTPUT_LEN",
    "OUT_END_ID",
    "OUT_PAD_ID",
)
NO_WORDS: Array = np.zeros(0, dtype=np.object_)
MULTIMODAL = ("IMAGE_BYTES", "IMAGE_URL", "VIDEO_BYTES", "DECODER_QUERY")


class Encoder(Protocol):
    vocab_size: int

    def encode(self, prompt: str, *, special_tokens: bool = True) -> list[int]: ...


class Preprocessor:
    """end_ids: the ids that end a text; the first is the engine's end_id. add_special_tokens:
    whether BOS is put before prompts. max_input_len: of a prompt, in tokens; None: unknown.
    """

    def __init__(
        self,
        encoder: Encoder,
        *,
        end_ids: Sequence[int],
        add_special_tokens: bool = True,
        max_input_len: int | None = None,
    ) -> None:
        self._encoder = encoder
        self._end_ids = tuple(end_ids)
        self._add_special_tokens = add_special_tokens
        self._max_input_len = max_input_len

    def run(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """The output arrays for one request, with a row for every row of QUERY [batch, 1]. Shorter
        prompts are padded on the right, as in TensorRT-LLM. Raises RequestError for several prompts
        in a row, text that is not UTF-8 or too long, or inputs that are not served.
        """
        for name in MULTIMODAL:
            if name in arrays:
                raise RequestError(f"{name} is not served: only text can be sent")
        query = arrays["QUERY"]
        batch = len(query)
        if query.size != batch:
            raise RequestError(
                f"QUERY takes one prompt per row, and {batch} rows hold {query.size}",
                hint="Its shape is [batch, 1].",
            )
        rows = [
            self._row({name: array.reshape(batch, -1)[index] for name, array in arrays.items()})
            for index in range(batch)
        ]
        pads = [int(row["OUT_PAD_ID"][0]) for row in rows]
        return {
            "INPUT_ID": _ints(_padded([row["INPUT_ID"].tolist() for row in rows], pads)),
            "BAD_WORDS_IDS": _padded_words([row["BAD_WORDS_IDS"].tolist() for row in rows]),
            "STOP_WORDS_IDS": _padded_words([row["STOP_WORDS_IDS"].tolist() for row in rows]),
            **{name: np.stack([row[name] for row in rows]) for name in SAME_LENGTH},
        }

    def _row(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """The outputs for one prompt, without the batch dimension. arrays: its own inputs, flat."""
        check_prompt_bytes(arrays["QUERY"][0], self._max_input_len, "QUERY")
        (prompt,) = self._texts(arrays, "QUERY")
        ids = self._encoder.encode(prompt, special_tokens=self._add_special_tokens)
        if not ids:
            raise RequestError("the prompt has no tokens", hint="Send at least one character.")
        end = self._end_ids[0] if self._end_ids else -1
        if "END_ID" in arrays:
            end = int(arrays["END_ID"][0])
        pad = int(arrays["PAD_ID"][0]) if "PAD_ID" in arrays else end
        stop_words = self._words(arrays, "STOP_WORDS_DICT", MAX_STOP_WORDS)
        check_stop_ids(sum(map(len, stop_words)), "STOP_WORDS_DICT")
        return {
            "INPUT_ID": _ints(ids),
            "REQUEST_INPUT_LEN": _ints([len(ids)]),
            "DECODER_INPUT_ID": _ints([pad]),
            "REQUEST_DECODER_INPUT_LEN": _ints([1]),
            "BAD_WORDS_IDS": _ints(pack(self._words(arrays, "BAD_WORDS_DICT", MAX_BIASED_WORDS))),
            "STOP_WORDS_IDS": _ints(pack(stop_words)),
            "EMBEDDING_BIAS": self._bias(arrays),
            "REQUEST_OUTPUT_LEN": _ints(arrays["REQUEST_OUTPUT_LEN"]),
            "OUT_END_ID": _ints([end]),
            "OUT_PAD_ID": _ints([pad]),
        }

    def _words(self, arrays: Mapping[str, Array], name: str, max_words: int) -> list[list[int]]:
        """The ids of each word. Clients send an empty word to mean no word."""
        check_words(arrays.get(name, NO_WORDS).tolist(), name, max_words)
        return [
            self._encoder.encode(word, special_tokens=False)
            for word in self._texts(arrays, name)
            if word
        ]

    def _bias(self, arrays: Mapping[str, Array]) -> Array:
        """[vocab]: for each token, the sum of the weights of the words that contain it. [0] if the
        request has no biased words.
        """
        name = "EMBEDDING_BIAS_WORDS"
        check_words(arrays.get(name, NO_WORDS).tolist(), name, MAX_BIASED_WORDS)
        words = self._texts(arrays, name)
        if not words:
            return np.zeros(0, dtype=np.float32)
        weights = arrays.get("EMBEDDING_BIAS_WEIGHTS", np.zeros(0))
        if len(weights) != len(words):
            raise RequestError(
                f"{len(words)} EMBEDDING_BIAS_WORDS came with {len(weights)} EMBEDDING_BIAS_WEIGHTS"
            )
        bias = np.zeros(self._encoder.vocab_size, dtype=np.float32)
        for word, weight in zip(words, weights, strict=True):
            bias[self._encoder.encode(word, special_tokens=False)] += weight
        return bias

    @staticmethod
    def _texts(arrays: Mapping[str, Array], name: str) -> list[str]:
        texts = []
        for value in arrays.get(name, NO_WORDS).reshape(-1).tolist():
            try:
                texts.append(value if isinstance(value, str) else bytes(value).decode("utf-8"))
            except UnicodeDecodeError as error:
                raise RequestError(
                    f"{name} is not valid UTF-8: {error.reason} at byte {error.start}"
                ) from error
        return texts


def _ints(values: Any) -> Array:
    return np.asarray(values, dtype=np.int32)


def _padded(rows: Sequence[Sequence[int]], fills: Sequence[int]) -> list[list[int]]:
    """The rows, made as long as the longest, each with its own fill."""
    longest = max(map(len, rows))
    return [[*row, *[fill] * (longest - len(row))] for row, fill in zip(rows, fills, strict=True)]


def _padded_words(lists: Sequence[Sequence[Sequence[int]]]) -> Array:
    """[lists, 2, longest]: packed words, continued with no words."""
    ids, ends = zip(*lists, strict=True)
    count = len(lists)
    return _ints([_padded(ids, [0] * count), _padded(ends, [-1] * count)]).swapaxes(0, 1)
