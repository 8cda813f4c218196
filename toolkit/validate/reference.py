"""The target model outside the server: what judges a divergence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from numpy.typing import NDArray

from toolkit.interfaces import StepEngine

__all__ = ["Reference", "reference_from_engine"]

SLOT = 0


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


def reference_from_engine(
    load: Callable[[], StepEngine],
    encode: Callable[[str], Sequence[int]],
    eos_token_ids: Sequence[int],
    noise: Callable[[int, int, int], NDArray[Any]] | None = None,
) -> Reference:
    """A reference that loads its engine when it is first asked, which is never if no text diverges.

    The engine is the reference's alone: each question runs a whole prefix through its first slot, as plain prefill does.
    """
    engine = cache(load)

    def next_logits(token_ids: Sequence[int]) -> NDArray[Any]:
        import torch

        model = engine()
        model.rewind([SLOT], [0])
        for start in range(0, len(token_ids), model.max_step_tokens):
            block = torch.tensor([list(token_ids[start : start + model.max_step_tokens])], dtype=torch.int64)
            logits = model.forward([SLOT], block, last_only=True)
        answer: NDArray[Any] = logits[0, -1].double().cpu().numpy().copy()
        model.rewind([SLOT], [0])
        return answer

    return Reference(encode, next_logits, tuple(eos_token_ids), noise)
