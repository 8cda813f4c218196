"""Calibration text and a silent progress."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from toolkit.config.schema import CalibrationConfig


@pytest.fixture
def calibration(tmp_path: Path) -> CalibrationConfig:
    """24 short lines of several lengths; the last two are held out."""
    file = tmp_path / "calib.jsonl"
    lines = [
        {"text": f"def f{i}(x):\n    return x + {i * i}  # {'word ' * (i % 5)}"} for i in range(24)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return CalibrationConfig(dataset=file, calib_size=8, calib_max_seq_length=48)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Models this small gain nothing from more, and on a busy machine threads that wait for one
    another cost a great deal.
    """
    import torch

    torch.set_num_threads(1)
