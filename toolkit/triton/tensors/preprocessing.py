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
from toolkit.triton.tensors.word_lists import pack

__all__ = ["Encoder", "Preprocessor"]

Array = NDArray[Any]
MULTIMODAL = ("IMAGE_BYTES", "IMAGE_URL", "VIDEO_BYTES", "DECODER_QUERY")


class Encoder(Protocol):
    vocab_size: int

    def encode(self, prompt: str, *, special_tokens: bool = True) -> list[int]: ...


class Preprocessor:
    """end_ids: the ids that end a text; the first is the engine's end_id. add_special_tokens:
    whether BOS is put before prompts.
    """

    def __init__(
        self, encoder: Encoder, *, end_ids: Sequence[int], add_special_tokens: bool = True
    ) -> None:
        self._encoder = encoder
        self._end_ids = tuple(end_ids)
        self._add_special_tokens = add_special_tokens

    def run(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """The output arrays for one request. Raises RequestError for more than one prompt, text
        that is not UTF-8, or inputs that are not served.
        """
        for name in MULTIMODAL:
            if name in arrays:
                raise RequestError(f"{name} is not served: only text can be sent")
        (prompt,) = self._texts(arrays, "QUERY") if arrays["QUERY"].size == 1 else (None,)
        if prompt is None:
            raise RequestError(
                f"QUERY takes one prompt, and {arrays['QUERY'].size} were sent",
                hint="Send one request per prompt.",
            )
        ids = self._encoder.encode(prompt, special_tokens=self._add_special_tokens)
        if not ids:
            raise RequestError("the prompt has no tokens", hint="Send at least one character.")
        end = self._end_ids[0] if self._end_ids else -1
        if "END_ID" in arrays:
            end = int(arrays["END_ID"].reshape(-1)[0])
        pad = int(arrays["PAD_ID"].reshape(-1)[0]) if "PAD_ID" in arrays else end
        return {
            "INPUT_ID": _ints([ids]),
            "REQUEST_INPUT_LEN": _ints([[len(ids)]]),
            "DECODER_INPUT_ID": _ints([[pad]]),
            "REQUEST_DECODER_INPUT_LEN": _ints([[1]]),
            "BAD_WORDS_IDS": _ints([pack(self._words(arrays, "BAD_WORDS_DICT"))]),
            "STOP_WORDS_IDS": _ints([pack(self._words(arrays, "STOP_WORDS_DICT"))]),
            "EMBEDDING_BIAS": self._bias(arrays),
            "REQUEST_OUTPUT_LEN": _ints(arrays["REQUEST_OUTPUT_LEN"].reshape(1, -1)),
            "OUT_END_ID": _ints([[end]]),
            "OUT_PAD_ID": _ints([[pad]]),
        }

    def _words(self, arrays: Mapping[str, Array], name: str) -> list[list[int]]:
        words = [
            self._encoder.encode(word, special_tokens=False) for word in self._texts(arrays, name)
        ]
        return [ids for ids in words if ids]

    def _bias(self, arrays: Mapping[str, Array]) -> Array:
        """[1, vocab]: for each token, the sum of the weights of the words that contain it. [1, 0]
        if no words are biased.
        """
        words = self._words(arrays, "EMBEDDING_BIAS_WORDS")
        if not words:
            return np.zeros((1, 0), dtype=np.float32)
        weights = arrays.get("EMBEDDING_BIAS_WEIGHTS", np.zeros(0)).reshape(-1)
        if len(weights) != len(words):
            raise RequestError(
                f"{len(words)} EMBEDDING_BIAS_WORDS came with {len(weights)} EMBEDDING_BIAS_WEIGHTS"
            )
        bias = np.zeros((1, self._encoder.vocab_size), dtype=np.float32)
        for ids, weight in zip(words, weights, strict=True):
            bias[0, ids] += weight
        return bias

    @staticmethod
    def _texts(arrays: Mapping[str, Array], name: str) -> list[str]:
        texts = []
        for value in arrays.get(name, np.zeros(0, dtype=np.object_)).reshape(-1).tolist():
            try:
                texts.append(value if isinstance(value, str) else bytes(value).decode("utf-8"))
            except UnicodeDecodeError as error:
                raise RequestError(
                    f"{name} is not valid UTF-8: {error.reason} at byte {error.start}"
                ) from error
        return texts


def _ints(rows: Any) -> Array:
    return np.asarray(rows, dtype=np.int32)
