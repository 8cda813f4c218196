"""report.md and the report in a terminal, word for word: a change of wording is a reviewed diff."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from toolkit.bench.limits import judge
from toolkit.bench.verdict import verdict
from toolkit.config.schema import LatencyGates, LoadGates, QualityGates
from toolkit.records.judged import DraftCheck
from toolkit.records.report import ValidationReport
from toolkit.report.markdown import render_markdown
from toolkit.report.terminal import print_report
from toolkit.validate.gates import (
    agreement_gate,
    check_gates,
    quality_gates,
    ratio_gates,
)
from toolkit.validate.load import judge_load

TERMINAL_WIDTH = 110


@pytest.fixture(scope="module")
def with_every_gate(advised: ValidationReport) -> ValidationReport:
    """Everything that a report can hold, and gates of every kind."""
    assert advised.speedup is not None
    source = replace(
        advised.agreements[0],
        against="source",
        kind=None,
        decided_margin=1.5,
        decided=400,
        decided_differing=2,
    )
    of_source = agreement_gate(source)
    assert of_source is not None
    assert advised.load is not None
    limits = LoadGates(rate="auto", goodput=advised.load.goodput_ms, max_ttft_p99_ms=350.0)
    ratios = LatencyGates(max_ratios={"ttft_p50": 1.1, "e2e_p90": 1.5, "icl_p99": 2.0})
    gates = (
        *advised.gates,
        of_source,
        *ratio_gates(advised.speedup.latencies, ratios),
        *check_gates(DraftCheck(4, 40, 30, 30, 90, 60, 60), None, ()),
        *quality_gates(None, QualityGates(min_top1_agreement=0.98), quantized=True),
        *(gate for point in advised.loads for gate in judge((), point, at=True)),
        *judge_load(advised.load, limits),
    )
    return replace(advised, gates=gates, verdict=verdict(gates))


def test_markdown_is_as_reviewed(
    with_every_gate: ValidationReport, golden: Callable[[str, str], None]
) -> None:
    golden("report.md", render_markdown(with_every_gate))


def test_the_terminal_is_as_reviewed(
    with_every_gate: ValidationReport,
    golden: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    text = io.StringIO()
    print_report(with_every_gate, Console(file=text, width=TERMINAL_WIDTH), full=True)
    golden("report-terminal.txt", "\n".join(map(str.rstrip, text.getvalue().split("\n"))))
