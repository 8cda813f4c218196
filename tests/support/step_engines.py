"""Step engines for tests of the runtime: a tiny language model with a cache that can go wrong, and wrappers that misbehave."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


class TableEngine:
    """Logits are a sum of random tables, one per look-back distance, read through a per-slot cache of tokens.

    A stand-in for attention where arithmetic has to be exact: the same prefix gives bitwise the same logits in any batch, width
    or dtype-preserving path, and garbage that a missing rewind or catch-up leaves in the cache changes them.
    `closeness` in [0, 1] mixes in the tables of seed 0, so engines of different seeds can be made to agree more or less.
    """

    def __init__(
        self,
        seed: int,
        *,
        vocab_size: int = 40,
        max_batch_size: int = 8,
        max_seq_len: int = 96,
        max_step_tokens: int = 9,
        closeness: float = 0.0,
        sharpness: float = 2.0,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.vocab_size = vocab_size
        self.max_batch_size = max_batch_size
        self.max_seq_len = max_seq_len
        self.max_step_tokens = max_step_tokens
        shape = (4, vocab_size, vocab_size)
        own = np.random.default_rng(seed).normal(size=shape)
        common = np.random.default_rng(0).normal(size=shape)
        self._tables = torch.tensor(sharpness * (closeness * common + (1 - closeness) * own)).to(dtype)
        self._cache = torch.zeros(max_batch_size, max_seq_len + 2 * max_step_tokens, dtype=torch.int64)
        self._lengths = [0] * max_batch_size
        self.forwards: list[tuple[int, int]] = []  # (batch, n) of every forward

    def forward(self, slots: Sequence[int], tokens: torch.Tensor, *, last_only: bool = False) -> torch.Tensor:
        rows, n = tokens.shape
        assert rows == len(slots) == len(set(slots))
        assert 0 < n <= self.max_step_tokens
        self.forwards.append((rows, n))
        out = torch.zeros(rows, n, self.vocab_size, dtype=self._tables.dtype)
        for row, slot in enumerate(slots):
            start = self._lengths[slot]
            self._cache[slot, start : start + n] = tokens[row]
            for back, table in enumerate(self._tables):
                at = torch.arange(start, start + n) - back
                known = at >= 0
                out[row, known] += table[self._cache[slot, at[known]]]
            self._lengths[slot] = start + n
        return out[:, -1:] if last_only else out

    def rewind(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        for slot, length in zip(slots, lengths, strict=True):
            if not 0 <= length <= self._lengths[slot]:
                raise ValueError(f"slot {slot} holds {self._lengths[slot]} tokens, not {length}")
            self._lengths[slot] = length

    def length(self, slot: int) -> int:
        return self._lengths[slot]


class ForgetfulRewind(TableEngine):
    """Claims to rewind and keeps the rejected tokens: the lengths it reports are right, what it computes with is not."""

    def __init__(self, seed: int, **settings: object) -> None:
        super().__init__(seed, **settings)  # type: ignore[arg-type]
        self._claimed = [0] * self.max_batch_size

    def forward(self, slots: Sequence[int], tokens: torch.Tensor, *, last_only: bool = False) -> torch.Tensor:
        for slot in slots:
            self._claimed[slot] += tokens.shape[1]
        self._cache = torch.nn.functional.pad(self._cache, (0, tokens.shape[1]))
        return super().forward(slots, tokens, last_only=last_only)

    def rewind(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        for slot, length in zip(slots, lengths, strict=True):
            self._claimed[slot] = length
            if length == 0:
                self._lengths[slot] = 0

    def length(self, slot: int) -> int:
        return self._claimed[slot]


class FailingEngine(TableEngine):
    """Raises in the forwards whose number (from 0) is in `failing`."""

    failing: frozenset[int] = frozenset()

    def forward(self, slots: Sequence[int], tokens: torch.Tensor, *, last_only: bool = False) -> torch.Tensor:
        if len(self.forwards) in self.failing:
            self.forwards.append((0, 0))
            raise RuntimeError("planted fault")
        return super().forward(slots, tokens, last_only=last_only)
