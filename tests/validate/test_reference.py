from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from toolkit.validate.reference import reference_from_engine


class CountingEngine:
    """Its logits are the sum of all tokens cached so far, in the first entry, and their number, in the second."""

    vocab_size, max_batch_size, max_seq_len, max_step_tokens = 2, 1, 64, 4

    def __init__(self) -> None:
        self.cached: list[int] = []
        self.steps: list[int] = []

    def forward(self, slots: Sequence[int], tokens: Tensor, *, last_only: bool = False) -> Tensor:
        self.steps.append(tokens.shape[1])
        self.cached += tokens[0].tolist()
        return torch.tensor([[[float(sum(self.cached)), float(len(self.cached))]]])

    def rewind(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        self.cached = self.cached[: lengths[0]]

    def length(self, slot: int) -> int:
        return len(self.cached)


def test_a_prefix_runs_in_blocks_and_leaves_nothing_behind() -> None:
    engine = CountingEngine()
    reference = reference_from_engine(lambda: engine, lambda text: [1], (0,))
    for ids in ([5] * 10, [1, 2]):
        np.testing.assert_array_equal(reference.next_logits(ids), [sum(ids), len(ids)])
        assert engine.length(0) == 0
    assert engine.steps == [4, 4, 2, 2]


def test_the_engine_is_loaded_once_and_only_when_asked() -> None:
    loaded: list[CountingEngine] = []

    def load() -> CountingEngine:
        loaded.append(CountingEngine())
        return loaded[-1]

    reference = reference_from_engine(load, lambda text: [1], (0,))
    assert loaded == []
    reference.next_logits([1])
    reference.next_logits([2])
    assert len(loaded) == 1
