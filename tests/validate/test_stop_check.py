from __future__ import annotations

import pytest

from toolkit.validate.stop_check import _fault, stop_words

TEXT = "def read(path): return open(path)"


def test_stop_words_are_taken_out_of_the_texts_and_end_them_at_their_first_place() -> None:
    found = list(stop_words([TEXT, "", "ab"], 20, seed=1))
    assert len(found) == 20
    for index, word, before in found:
        assert (index, len(word)) == (0, 3)
        assert TEXT.startswith(before + word) and word not in before
    assert len({word for _, word, _ in found}) > 5
    assert list(stop_words(["", "ab"], 20, seed=1)) == []


@pytest.mark.parametrize(
    ("text", "reason", "wrong"),
    [
        ("def read", "stop", False),
        ("def read(pa", "stop", False),  # a server that leaves the stop word in
        ("def read(path): return", "length", True),
        ("def read(path): ret", "stop", True),
        ("def read", "length", True),
        ("def r", "stop", True),
        (
            "def open(file): return",
            "length",
            False,
        ),  # another text: a near-tie, which parity judges
    ],
)
def test_a_text_that_runs_past_its_stop_word_or_ends_before_it_is_wrong(
    text: str, reason: str, wrong: bool
) -> None:
    assert (_fault(text, reason, "(pa", "def read") is not None) == wrong
