"""The eager engine keeps the contract of every StepEngine, in each dtype."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.contract import StepEngineContract
from toolkit.engines.embedded.engine import EmbeddedEngine, open_checkpoint


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
