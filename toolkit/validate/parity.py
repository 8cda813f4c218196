"""Speculative against plain decoding, token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

__all__ = ["Reference"]


@dataclass(frozen=True, slots=True)
class Reference:
    """The target model outside the server, asked for its opinion where the two arms differ.

    encode: prompt text -> prompt ids, as the server encodes it (with its BOS habits).
    next_logits: all token ids so far -> logits [vocab] of the next one, float.
    eos_token_ids: what ends a text.
    noise: (seed, position, vocab) -> the Gumbel noise [vocab] that `coupled` adds to logits / temperature for the token at
    `position`, counted over prompt and output together (the first output token has position len(prompt ids)). None: a
    divergence of seeded requests is reported as unexplained.
    """

    encode: Callable[[str], Sequence[int]]
    next_logits: Callable[[Sequence[int]], NDArray[Any]]
    eos_token_ids: tuple[int, ...]
    noise: Callable[[int, int, int], NDArray[Any]] | None = None
