"""The report after `tune`: it shows the advice for its own engines; advice for others is named in a
finding and left out.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.reports import keep
from tests.support.stages import Silent
from toolkit.pipeline.store import Store
from toolkit.records.report import ValidationReport
from toolkit.report.render import read_report
from toolkit.workflows.report import publish_report

SERVED: dict[str, Any] = {
    "config": {"name": "tiny", "max_prompts": 60, "temperature": 0.8, "max_rounds": 3},
    "inputs": {"engines": {"target": "sha256:t", "draft": "sha256:d"}, "prompts": "sha256:p"},
    "machine": {"cpu": "one"},
}
TUNED: dict[str, Any] = {
    "config": {"max_prompts": 60, "temperature": 0.8, "threads": 1},
    "inputs": {
        "target": "sha256:t",
        "drafts": {"draft": "sha256:d", "ngram": None},
        "prompts": "sha256:p",
    },
    "machine": {"cpu": "one"},
}
COMPARED: dict[str, Any] = {
    **TUNED,
    "inputs": {
        "engines": {"target": ["sha256:x", "sha256:t"], "draft": ["sha256:d", "sha256:y"]},
        "prompts": "sha256:p",
    },
}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def published(store: Store, tmp_path: Path) -> tuple[ValidationReport, bool]:
    changed = publish_report(store, "tiny", tmp_path / "report", Silent())
    return read_report(tmp_path / "report" / "report.json"), changed


def test_without_a_validation_there_is_nothing_to_publish(
    store: Store, advised: ValidationReport, tmp_path: Path
) -> None:
    assert advised.advice is not None
    keep(store, "tune", advised.advice, TUNED)
    assert not publish_report(store, "tiny", tmp_path / "report", Silent())
    assert not (tmp_path / "report").exists()


def test_what_was_found_since_joins_the_report_without_measuring_again(
    store: Store, passing: ValidationReport, advised: ValidationReport, tmp_path: Path
) -> None:
    assert advised.advice is not None and advised.grid is not None
    keep(store, "validate", passing, SERVED)
    assert published(store, tmp_path) == (passing, True)
    keep(store, "tune", advised.advice, TUNED)
    assert published(store, tmp_path) == (replace(passing, advice=advised.advice), True)
    keep(store, "grid", advised.grid, COMPARED)
    expected = replace(passing, advice=advised.advice, grid=advised.grid)
    assert published(store, tmp_path) == (expected, True)
    assert published(store, tmp_path) == (expected, False)
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert "Speed-up over draft length" in page and "Precisions of target and draft" in page
    assert (tmp_path / "report" / "server.log").read_text() == "what the server said"
    assert json.loads((tmp_path / "report" / "report.json").read_text())["grid"]["cells"][3]["best"]


@pytest.mark.parametrize(
    ("section", "key", "value", "difference"),
    [
        ("inputs", "target", "sha256:older", "other engines"),
        ("inputs", "drafts", {"another": "sha256:e"}, "other engines"),
        ("inputs", "prompts", "sha256:q", "other prompts"),
        ("config", "temperature", 1.0, "another temperature"),
        ("machine", "cpu", "two", "another machine"),
    ],
)
def test_advice_for_something_else_is_named_and_left_out(
    section: str,
    key: str,
    value: Any,
    difference: str,
    store: Store,
    passing: ValidationReport,
    advised: ValidationReport,
    tmp_path: Path,
) -> None:
    assert advised.advice is not None
    advice_of_build = replace(advised.advice, reason="of the build itself")
    keep(store, "validate", replace(passing, advice=advice_of_build), SERVED)
    keep(store, "tune", advised.advice, {**TUNED, section: {**TUNED[section], key: value}})
    report, _ = published(store, tmp_path)
    assert report.advice == advice_of_build
    (finding,) = [finding for finding in report.findings if finding.check == "advice"]
    assert finding.severity == "warning"
    assert difference in finding.detail and "toolkit tune CONFIG" in finding.detail
    assert difference in (tmp_path / "report" / "report.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("compiled_from", "stale"), [("sha256:q", False), ("sha256:other", True)])
def test_advice_for_tensorrt_llm_is_of_the_checkpoints_that_its_engines_are_made_of(
    compiled_from: str,
    stale: bool,
    store: Store,
    passing: ValidationReport,
    advised: ValidationReport,
    tmp_path: Path,
) -> None:
    """`tune` measured other engines of the same checkpoints, and its costs are of no machine."""
    assert advised.advice is not None
    for role, checkpoint in (("target", compiled_from), ("draft", "sha256:r")):
        keep(store, f"compile/{role}", advised.advice, {"inputs": {"checkpoint": checkpoint}})
    inputs = {
        **TUNED["inputs"],
        "target": "sha256:twin",
        "checkpoints": {"target": ["sha256:q"], "draft": ["sha256:r"]},
    }
    by_role = {"target": ["sha256:q", "sha256:q8"], "draft": ["sha256:r8", "sha256:r"]}
    keep(store, "validate", passing, SERVED)
    keep(store, "tune", advised.advice, {**TUNED, "inputs": inputs, "machine": {"cpu": "two"}})
    assert advised.grid is not None
    compared = {**COMPARED["inputs"], "engines": {}, "checkpoints": by_role}
    keep(store, "grid", advised.grid, {**COMPARED, "inputs": compared, "machine": {"cpu": "two"}})
    report, _ = published(store, tmp_path)
    assert ((report.advice is None), (report.grid is None)) == (stale, stale)
    assert [
        finding.detail.partition(",")[0] for finding in report.findings if finding.check == "advice"
    ] == (["the last advice is for other checkpoints"] if stale else [])


def test_a_grid_without_the_served_engines_is_left_out(
    store: Store, passing: ValidationReport, advised: ValidationReport, tmp_path: Path
) -> None:
    """The served draft's engine is in the list of the target, and not in that of the draft."""
    assert advised.grid is not None
    keep(store, "validate", passing, SERVED)
    pairs = {"target": ["sha256:t", "sha256:d"], "draft": ["sha256:x", "sha256:y"]}
    keep(
        store,
        "grid",
        advised.grid,
        {**COMPARED, "inputs": {**COMPARED["inputs"], "engines": pairs}},
    )
    report, _ = published(store, tmp_path)
    assert report.grid is None
    assert [finding.detail for finding in report.findings if finding.check == "grid"] == [
        "the last grid is for other engines, and is not shown; measure again: toolkit tune CONFIG"
        " --grid"
    ]


def test_a_rehearsal_takes_nothing_from_the_real_deployment(
    store: Store, passing: ValidationReport, advised: ValidationReport, tmp_path: Path
) -> None:
    assert advised.advice is not None
    rehearsed = replace(passing, replaced=("target: a small one",))
    keep(store, "validate", rehearsed, SERVED)
    keep(store, "tune", advised.advice, TUNED)
    assert published(store, tmp_path)[0] == rehearsed
