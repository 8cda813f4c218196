"""Reading an output in blocks ends it where reading it token by token would."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.runtimes import CODEC
from toolkit.speculative.ending import after_stop_sequence, ending_of, last_text, read_block
from toolkit.speculative.text import TextStream

A, B, C = CODEC.encode("abc")
LETTERS = {A: "a", B: "b", C: "c"}
END_IDS = frozenset([256, 257])
TOKENS = st.sampled_from([A, B, C, *END_IDS])
EURO = CODEC.encode("\N{EURO SIGN}")
REPLACEMENT_CHARACTER = "\N{REPLACEMENT CHARACTER}"


def text_read_token_by_token(
    tokens: Sequence[int], max_tokens: int, stop: Sequence[str]
) -> tuple[int, str, str | None, str | None]:
    """(tokens of the output, its text, why it ends, the stop word)."""
    text = ""
    for count, token in enumerate(tokens, start=1):
        if token in END_IDS:
            return count, text, "stop", None
        text += LETTERS[token]
        completed = [(text.index(word), -len(word), word) for word in stop if word in text]
        if completed:
            start, _, word = min(completed)
            return count, text[:start], "stop", word
        if count == max_tokens:
            return count, text, "length", None
    return len(tokens), text, None, None


def ids_read_token_by_token(
    tokens: Sequence[int],
    max_tokens: int,
    stop: Sequence[tuple[int, ...]],
) -> tuple[int, str | None]:
    for count, token in enumerate(tokens, start=1):
        words = [word for word in stop if 0 < len(word) <= count]
        stopped = any(tuple(tokens[count - len(word) : count]) == word for word in words)
        if token in END_IDS or stopped:
            return count, "stop"
        if count == max_tokens:
            return count, "length"
    return len(tokens), None


@settings(max_examples=300, deadline=None)
@given(
    blocks=st.lists(st.lists(TOKENS, max_size=6), max_size=8),
    max_tokens=st.integers(1, 20),
    stop=st.lists(st.text("abc", min_size=1, max_size=3), max_size=3),
)
def test_blocks_of_text_end_where_a_reader_of_single_tokens_ends(
    blocks: list[list[int]], max_tokens: int, stop: list[str]
) -> None:
    stream, output, text, reason = CODEC.stream([], stop), list[int](), "", None
    for tokens in blocks:
        block = read_block(stream, tokens, max_tokens - len(output), END_IDS)
        output += block.tokens
        text, reason = text + block.text, block.reason
        if reason is not None:
            break
    rest, reason_with_rest = last_text(stream, reason or "cancelled")
    whole = [token for block in blocks for token in block]
    count, expected, ends, word = text_read_token_by_token(whole, max_tokens, stop)
    assert (output, text + rest, reason, stream.stopped_by) == (whole[:count], expected, ends, word)
    assert reason_with_rest == (ends or "cancelled")


@settings(max_examples=300, deadline=None)
@given(
    blocks=st.lists(st.lists(TOKENS, max_size=6), max_size=8),
    max_tokens=st.integers(1, 20),
    stop=st.lists(st.lists(TOKENS, max_size=4).map(tuple), max_size=3),
)
def test_blocks_of_tokens_end_where_a_reader_of_single_tokens_ends(
    blocks: list[list[int]], max_tokens: int, stop: list[tuple[int, ...]]
) -> None:
    output, reason = list[int](), None
    for tokens in blocks:
        known = tuple(output)
        ending = ending_of(
            tokens,
            max_tokens - len(output),
            END_IDS,
            lambda visible, known=known: after_stop_sequence(known, visible, stop),
        )
        output += tokens[: ending.count]
        reason = ending.reason
        if reason is not None:
            break
    whole = [token for block in blocks for token in block]
    count, ends = ids_read_token_by_token(whole, max_tokens, stop)
    assert (output, reason) == (whole[:count], ends)


@pytest.mark.parametrize(
    ("tokens", "room", "count", "reason"),
    [
        ([A, B, 256], 3, 3, "stop"),  # the last token that there is room for is an end token
        ([A, B, 256], 2, 2, "length"),  # an end token that there is no room for does not count
        ([A, B], 2, 2, "length"),
        ([A, 256, B, 257], 9, 2, "stop"),  # the first of two
        ([A, B], 3, 2, None),
        ([], 3, 0, None),
    ],
)
def test_the_edges_of_the_rule(
    tokens: list[int],
    room: int,
    count: int,
    reason: str | None,
) -> None:
    ending = ending_of(tokens, room, END_IDS, lambda visible: None)
    assert (ending.count, ending.reason) == (count, reason)


def test_a_stop_word_wins_over_a_later_end_token_and_over_the_room() -> None:
    assert read_block(CODEC.stream([], ("b",)), [A, B, C, 256], 9, END_IDS).tokens == [A, B]
    block = read_block(CODEC.stream([], ("b",)), [A, B], 2, END_IDS)
    assert (block.tokens, block.text, block.reason) == ([A, B], "a", "stop")


def test_what_was_held_back_may_complete_a_stop_word() -> None:
    stream: TextStream = CODEC.stream([], (REPLACEMENT_CHARACTER,))
    block = read_block(stream, [A, *EURO[:2]], 3, END_IDS)
    assert (block.text, block.reason, stream.stopped_by) == ("a", "length", None)
    assert last_text(stream, "length") == ("", "stop")
    assert stream.stopped_by == REPLACEMENT_CHARACTER
