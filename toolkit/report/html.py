"""Write report.html, one file that needs nothing else: verdict, gates and what to do come first,
then the plots, then every table.

The page is templates/report.html.j2. It has no script, and its content policy forbids every
request, so nothing in a prompt can act or call home. The template escapes every value except those
that are markup already: our style, the drawings, and the cells of tables, which `_breakable`
escapes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

from toolkit.bench.definitions import METRICS, heading
from toolkit.records.report import ValidationReport
from toolkit.report.cells import Table, number, percent
from toolkit.report.figures import (
    gate_definitions,
    gate_title,
    headline,
    next_steps,
    notes,
    ordered,
    proviso,
    shown,
    tables,
)
from toolkit.report.plots import plots
from toolkit.templates import render_template

__all__ = ["render_html"]

SHORT = re.compile(r"\([\w%., +-]{1,24}\)")
EXPONENT = re.compile(r"\d[\d.]*e-\d+")
NAME_JOINT = re.compile(r"(?<=\w)[_.](?=[a-zA-Z])")
SIGNS = {"PASS": "✓", "FAIL": "✕", "INCONCLUSIVE": "?"}


def render_html(report: ValidationReport) -> str:
    """Return the whole page."""
    return render_template(
        __file__,
        "report.html.j2",
        report=report,
        style=files("toolkit.report").joinpath("style.css").read_text(encoding="utf-8"),
        signs=SIGNS,
        proviso=proviso(report),
        headline=headline(report),
        tiles=_tiles(report),
        gates=_gates(report),
        steps=next_steps(report),
        remarks=notes(report),
        plots=plots(report),
        tables=tables(report),
        definitions=report.definitions,
        aligned=_aligned,
        breakable=_breakable,
    )


def _tiles(report: ValidationReport) -> list[dict[str, str]]:
    """Return the large figures above the gates: each a value, its label and its metric's name."""
    tiles: list[dict[str, str]] = []

    def add(value: str, label: str, definition: str) -> None:
        tiles.append({"value": value, "label": label, "definition": definition})

    sampled = f"T = {report.sampled.temperature:g}"
    for mode, speedup in (("greedy", report.speedup), (sampled, report.sampled.speedup)):
        if speedup is not None:
            label = f"{METRICS['speedup'].title}, {mode} ({speedup.low:.2f} to {speedup.high:.2f})"
            add(f"{speedup.estimate:.2f}x", label, "speedup")
    deployed = report.arms.speculative or report.arms.plain
    add(number(deployed.tokens_per_s), f"{METRICS['tokens_per_s'].title}, greedy", "tokens_per_s")
    if report.acceptance is not None and report.acceptance.length is not None:
        label = f"{heading('acceptance_length')} ({percent(report.acceptance.rate)} accepted)"
        add(number(report.acceptance.length), label, "acceptance_length")
    if report.quality.target is not None:
        kl_mean = number(report.quality.target.kl_mean)
        add(kl_mean, f"{heading('kl_mean')}, of the quantized target", "kl_mean")
    return tiles


def _gates(report: ValidationReport) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for gate in ordered(report.gates):
        measured, limit = shown(gate)
        rows.append(
            {
                "outcome": gate.outcome,
                "title": gate_title(gate),
                "measured": measured,
                "limit": limit,
                "detail": gate.detail,
                "definitions": gate_definitions(gate),
            }
        )
    return rows


def _aligned(table: Table, row: Sequence[str]) -> list[tuple[str, bool]]:
    """Pair the text of each cell with whether its column holds numbers."""
    sides = [table.right(index) for index in range(len(table.columns))]
    return list(zip(row, sides, strict=True))


def _breakable(text: str) -> str:
    """Escape a text and let the browser break long names at their joints. Numbers and short texts
    in parentheses stay on one line.
    """
    kept = SHORT.sub(
        r'<span class="kept">\g<0></span>', NAME_JOINT.sub(r"\g<0><wbr>", escape(text))
    )
    return EXPONENT.sub(r'<span class="whole">\g<0></span>', kept)
