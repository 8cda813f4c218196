"""The eager engine keeps the contract of every StepEngine, in each dtype."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engines.contract import StepEngineContract
from toolkit.engines.embedded.engine import (
    EmbeddedEngine,
    groups_of,
    open_checkpoint,
)
from toolkit.engines.embedded.model import Attention, Step, TorchOps


@pytest.fixture(scope="module")
def float64_engine(tiny_pair: tuple[Path, Path]) -> EmbeddedEngine:
    return open_checkpoint(tiny_pair[0], dtype="float64", max_batch_size=3, max_seq_len=96)


@pytest.fixture(scope="module")
def float32_engine(tiny_pair: tuple[Path, Path]) -> EmbeddedEngine:
    return open_checkpoint(tiny_pair[0], dtype="float32", max_batch_size=3, max_seq_len=96)


class TestFloat64(StepEngineContract):
    tolerance = 1e-12  # matrix libraries may split a product differently for another number of rows

    @pytest.fixture
    def engine(self, float64_engine: EmbeddedEngine) -> EmbeddedEngine:
        return float64_engine


class TestFloat32(StepEngineContract):
    tolerance = 1e-4

    @pytest.fixture
    def engine(self, float32_engine: EmbeddedEngine) -> EmbeddedEngine:
        return float32_engine


def test_a_nan_that_a_former_request_left_in_its_slot_is_never_read() -> None:
    """A longer sequence beside it makes the step read that far."""
    size, how = (2, 1, 32, 8), Attention(1, 1, 8, 1e-5, None, None, None, None, None)
    slots, lengths, starts = np.array([0, 1]), np.array([2, 20]), np.array([0, 1])
    unrotated = torch.ones(32, 4), torch.zeros(32, 4)
    groups = groups_of(slots, lengths, starts, 2, *unrotated)
    step = Step(*map(torch.from_numpy, (slots, lengths, starts)), *unrotated, groups)
    qkv = torch.randn(2, 1, 24, generator=torch.Generator().manual_seed(1))
    clean = TorchOps().attention(qkv, (torch.ones(size), torch.ones(size)), step, how)
    cache = torch.ones(size), torch.ones(size)
    for tensor in cache:
        tensor[0, :, 3:] = float("nan")
    assert torch.equal(TorchOps().attention(qkv, cache, step, how), clean)
