"""What a build does only once."""

from __future__ import annotations

import json
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


@pytest.mark.slow
def test_an_fp8_kv_cache_beside_unquantized_weights_is_built_served_and_judged(
    tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """The engine is the reference, with the same cache. The source is none: nothing says how far
    the cache may move its logits.
    """
    file = write_config(tmp_path, tiny_pair)
    data = json.loads(file.read_text())
    data["engine"] |= {"dtype": "float32", "kv_cache_dtype": "fp8"}
    data["validation"]["parity"]["source"] = "always"
    file.write_text(json.dumps(data))
    built = build(load_config(file), Workplace(tmp_path), Silent(), Store(tmp_path / "store"))
    report = built.report
    assert report is not None and report.verdict == "PASS", report and report.gates
    outcomes = {gate.name: gate.outcome for gate in report.gates}
    assert outcomes["parity"] == outcomes["agreement_engine"] == "PASS"
    assert outcomes["quality_kl"] == "NOT JUDGED"
    assert "agreement_source" not in outcomes
    assert {engine.kv_dtype for engine in report.engines.values()} == {"fp8"}
