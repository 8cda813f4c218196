"""configs/quickstart/widen.py: the wide target computes what the narrow one does."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn import functional

from tests.support.cli import toolkit

SCRIPT = Path(__file__).parents[2] / "configs" / "quickstart" / "widen.py"
UP, GATE, DOWN = (f"model.layers.0.mlp.{part}_proj.weight" for part in ("up", "gate", "down"))


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("widen", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_copies_of_neurons_give_the_same_output(script: ModuleType) -> None:
    generator = torch.Generator().manual_seed(1)
    narrow = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in ((GATE, (5, 3)), (UP, (5, 3)), (DOWN, (3, 5)))
    }
    wide = script.wide_weights(narrow, 4, generator)
    x = torch.randn(7, 3, generator=generator, dtype=torch.float64)

    def mlp(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return (functional.silu(x @ weights[GATE].T) * (x @ weights[UP].T)) @ weights[DOWN].T

    assert wide[UP].shape == (20, 3)
    assert len(wide[UP].unique(dim=0)) == 20
    torch.testing.assert_close(mlp(wide), mlp(narrow))


def test_the_pair_passes_the_plan(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["widen.py", "--out", str(tmp_path), "--times", "2"])
    script.main()
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    assert config["intermediate_size"] == 2 * 448
    row = json.loads((tmp_path / "data" / "calib.jsonl").read_text().splitlines()[0])
    assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
    assert toolkit("plan", "wide.yaml", cwd=tmp_path).returncode == 0
