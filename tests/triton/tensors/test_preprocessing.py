"""What preprocessing refuses before it encodes anything. No server is needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.runtimes import RUNAWAY_TEXT, runaway_codec
from toolkit.errors import RequestError
from toolkit.triton.tensors.preprocessing import Encoder, Preprocessor
from toolkit.triton.tensors.size_limits import (
    MAX_BIASED_WORDS,
    MAX_STOP_IDS,
    MAX_STOP_WORDS,
    MAX_WORD_BYTES,
)


class CountingEncoder:
    """An id per character, as an encoder that counts what it was given."""

    vocab_size = 256

    def __init__(self) -> None:
        self.characters = 0

    def encode(self, prompt: str, *, special_tokens: bool = True) -> list[int]:
        self.characters += len(prompt)
        return [ord(character) % 256 for character in prompt]


def words(*values: bytes) -> Any:
    return np.array([values], dtype=np.object_)


def run(encoder: Encoder, **arrays: Any) -> dict[str, Any]:
    prompt = {"QUERY": words(b"hello"), "REQUEST_OUTPUT_LEN": np.array([[1]], dtype=np.int32)}
    return Preprocessor(encoder, end_ids=[1], max_input_len=4).run({**prompt, **arrays})


def test_what_the_limits_allow_is_served() -> None:
    outputs = run(
        CountingEncoder(),
        QUERY=words(b"x" * 64),
        STOP_WORDS_DICT=words(*[b"ab"] * MAX_STOP_WORDS),
        BAD_WORDS_DICT=words(*[b"ab"] * MAX_BIASED_WORDS),
    )
    assert outputs["INPUT_ID"].shape == (1, 64)
    assert outputs["STOP_WORDS_IDS"].shape == (1, 2, 2 * MAX_STOP_WORDS)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"QUERY": words(b"x" * 65)}, "QUERY has 65 bytes"),
        (
            {"STOP_WORDS_DICT": words(*[b"a"] * (MAX_STOP_WORDS + 1))},
            "STOP_WORDS_DICT holds 65 words; 64 are served at most",
        ),
        (
            {"BAD_WORDS_DICT": words(b"a" * (MAX_WORD_BYTES + 1))},
            "BAD_WORDS_DICT holds a word of 257 bytes",
        ),
        (
            {"EMBEDDING_BIAS_WORDS": words(*[b"a"] * (MAX_BIASED_WORDS + 1))},
            "EMBEDDING_BIAS_WORDS holds 1025 words",
        ),
        (
            {"STOP_WORDS_DICT": words(*[b"a" * 128] * 33)},
            f"STOP_WORDS_DICT holds {33 * 128} ids; {MAX_STOP_IDS} are served at most",
        ),
    ],
)
def test_what_would_cost_the_others_time_is_refused(arrays: dict[str, Any], message: str) -> None:
    encoder = CountingEncoder()
    with pytest.raises(RequestError, match=message):
        run(encoder, **arrays)
    assert encoder.characters <= 64 + MAX_STOP_WORDS * MAX_WORD_BYTES


@pytest.mark.parametrize("name", ["QUERY", "STOP_WORDS_DICT", "BAD_WORDS_DICT"])
def test_what_the_tokenizer_gives_up_is_refused(name: str) -> None:
    """The model answers a RequestError, and nothing else."""
    with pytest.raises(RequestError, match="the tokenizer cannot encode this text"):
        run(runaway_codec(), **{name: words(RUNAWAY_TEXT.encode())})
