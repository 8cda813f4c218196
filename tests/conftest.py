"""Fixtures that cost are made once per run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkpoints import write_pair


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(target, draft): seeded two-layer and one-layer Llama checkpoints with the byte tokenizer."""
    return write_pair(tmp_path_factory.mktemp("tiny_pair"))
