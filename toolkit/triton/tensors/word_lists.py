"""Packs lists of words into the format of TensorRT-LLM's tensors, and unpacks them.

A list is [2, n] int32. The first row holds the ids of all words, one word after the other. The
second row holds the end index of each word in the first, padded with -1.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["pack", "unpack"]


def pack(words: Sequence[Sequence[int]]) -> list[list[int]]:
    """Words -> rows [2, n]."""
    ids = [token for word in words for token in word]
    ends, end = [], 0
    for word in words:
        end += len(word)
        ends.append(end)
    return [ids, ends + [-1] * (len(ids) - len(ends))]


def unpack(rows: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Rows [2, n] -> words. Raises ValueError for ends that do not rise or point beyond the ids."""
    ids, ends = rows
    words, start = [], 0
    for end in ends:
        if end == -1:
            continue
        if not start < end <= len(ids):
            raise ValueError(
                f"a word that ends at {end}, after one that ends at {start}, of {len(ids)} ids"
            )
        words.append(tuple(ids[start:end]))
        start = end
    return tuple(words)
