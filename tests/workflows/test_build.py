"""What a build does only once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cli import write_config
from tests.support.stages import Silent
from toolkit.config.load import load_config
from toolkit.pipeline.store import Store
from toolkit.plan import make
from toolkit.workflows.build import build
from toolkit.workflows.folders import Workplace


def test_the_plan_of_a_build_is_made_once(
    tiny_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made before the first stage, and passed to everything that needs it."""
    config = load_config(write_config(tmp_path, tiny_pair))
    plans: list[str] = []
    real = make.make_plan

    def counted(*arguments: object, **options: object) -> object:
        plans.append("plan")
        return real(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(make, "make_plan", counted)
    build(config, Workplace(tmp_path), Silent(), Store(tmp_path / "store"), until="package")
    assert plans == ["plan"]
