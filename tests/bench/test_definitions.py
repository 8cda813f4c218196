"""The one table of metrics, and docs/metrics.md, which is made from it."""

from __future__ import annotations

import typing
from pathlib import Path

import pytest

from toolkit.bench.definitions import LATENCIES, METRICS, heading
from toolkit.records.measured import Better, Metric, Unit

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
HEAD = """# Metrics

Every figure of a report or a bench, under its name in `definitions` and in the gates of their JSON.
This page is made from the one table, in `toolkit/bench/definitions.py`. A share is of 1, and shown
as percent.

| name | title | unit | better | formula |
|---|---|---|---|---|
"""


def escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


def page() -> str:
    rows = "".join(
        f"| `{one.name}` | {one.title} | {one.unit or '-'} | {one.better} |"
        f" {escaped(one.formula)} |\n"
        for one in METRICS.values()
    )
    return HEAD + rows + "".join(map(section, METRICS.values()))


def section(metric: Metric) -> str:
    parts = [("Stands for", metric.spelled_out), ("Numerator", metric.numerator)]
    parts += [("Denominator", metric.denominator), ("Note", metric.note)]
    lines = "".join(f"- {what}: {escaped(text)}\n" for what, text in parts if text)
    return f"\n## {metric.name}\n\n{lines}"


def test_the_page_in_the_docs_is_the_table(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--update-golden"):
        DOCS.write_text(page(), encoding="utf-8")
    assert page() == DOCS.read_text(encoding="utf-8"), "refresh with --update-golden"


def test_every_metric_is_whole() -> None:
    for name, metric in METRICS.items():
        assert metric.name == name
        assert metric.title and metric.formula and metric.numerator, name
        assert metric.unit in typing.get_args(Unit), name
        assert metric.better in typing.get_args(Better), name


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tpot", "TPOT, ms"),
        ("goodput", "goodput, requests/s"),
        ("top1_agreement", "top-1 agreement"),  # cells are percentages
        ("speedup", "speed-up"),  # cells end in x
    ],
)
def test_a_heading_names_the_unit_that_its_cells_do_not(name: str, text: str) -> None:
    assert heading(name) == text


def test_every_latency_says_what_it_stands_for() -> None:
    assert all(METRICS[name].spelled_out for name in LATENCIES)
