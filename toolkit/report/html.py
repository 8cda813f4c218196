"""report.html: one file that needs nothing else. Verdict, gates and what to do first; then plots;
then every table.

There is no script in it, and its content policy forbids every request, so nothing in a prompt can
act or call home. Everything that comes from a record passes `escape`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from importlib.resources import files

from toolkit.records.measured import Definition
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
from toolkit.report.plots import Plot, plots

__all__ = ["render_html"]

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
SHORT = re.compile(r"\([\w%., +-]{1,24}\)")
EXPONENT = re.compile(r"\d[\d.]*e-\d+")
NAME_JOINT = re.compile(r"(?<=\w)[_.](?=[a-zA-Z])")
SIGNS = {"PASS": "✓", "FAIL": "✕", "INCONCLUSIVE": "?"}


def render_html(report: ValidationReport) -> str:
    """The whole page."""
    style = files("toolkit.report").joinpath("style.css").read_text(encoding="utf-8")
    title = escape(f"{report.name}: {report.verdict}")
    steps = "".join(f"<li>{escape(step)}</li>" for step in next_steps(report))
    remarks = "".join(f"<li>{escape(note)}</li>" for note in notes(report))
    remarks = f'<h2>Remarks</h2>\n<ul class="steps">{remarks}</ul>\n' if remarks else ""
    figures = "".join(_plot(plot, report.definitions) for plot in plots(report))
    sections = "".join(_table(table, report.definitions) for table in tables(report))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<main>
<header><h1>{escape(report.name)}</h1>{_verdict(report.verdict, proviso(report))}</header>
<p class="lead">{escape(headline(report))}</p>
<div class="tiles">{_tiles(report)}</div>
<h2>Gates</h2>
<ul class="gates">{_gates(report)}</ul>
<h2>What to do next</h2>
<ol class="steps">{steps}</ol>
{remarks}<h2>What was measured</h2>
<div class="plots">{figures}</div>
<h2>All figures</h2>
{sections}
<footer>A gate passes when its whole interval is on the good side of its limit, fails when none of it is, and is inconclusive in
between. report.json beside this page holds every number, with its definition.</footer>
</main>
</body>
</html>
"""


def _verdict(verdict: str, proviso: str) -> str:
    said = (
        f'<span class="verdict {escape(verdict)}">{SIGNS.get(verdict, "")} {escape(verdict)}</span>'
    )
    return said + (f"<span>{escape(proviso)}</span>" if proviso else "")


def _tiles(report: ValidationReport) -> str:
    sampled = f"T = {report.sampled.temperature:g}"
    found: list[tuple[str, str, str]] = []  # value, label, name of its definition
    for label, speedup in (("greedy", report.speedup), (sampled, report.sampled.speedup)):
        if speedup is not None:
            found.append(
                (
                    f"{speedup.estimate:.2f}x",
                    f"speed-up, {label} ({speedup.low:.2f} to {speedup.high:.2f})",
                    "speedup",
                )
            )
    deployed = report.arms.speculative or report.arms.plain
    found.append((number(deployed.tokens_per_s), "output tokens/s, greedy", "tokens_per_s"))
    if report.acceptance is not None and report.acceptance.length is not None:
        label = f"tokens per verify step ({percent(report.acceptance.rate)} accepted)"
        found.append((number(report.acceptance.length), label, "acceptance_length"))
    if report.quality.target is not None:
        found.append(
            (
                number(report.quality.target.kl_mean),
                "nats per token: KL of the quantized target",
                "kl_mean",
            )
        )
    return "".join(
        "<div"
        f' class="tile"><b>{escape(value)}</b><span>{escape(label)}</span>{_definitions((name,), report.definitions)}</div>'
        for value, label, name in found
    )


def _gates(report: ValidationReport) -> str:
    rows: list[str] = []
    for gate in ordered(report.gates):
        measured, limit = shown(gate)
        rows.append(
            f'<li><span class="outcome {escape(gate.outcome)}">{SIGNS.get(gate.outcome, "")}'
            f" {escape(gate.outcome)}</span>"
            f'<span class="name">{escape(gate_title(gate.name, report.sampled.temperature))}</span>'
            f'<span class="figures">{escape(measured)} <i>limit {escape(limit)}</i></span>'
            f'<span class="why">{escape(gate.detail)}'
            f"{_definitions(gate_definitions(gate.name), report.definitions)}</span></li>"
        )
    return "".join(rows)


def _plot(plot: Plot, definitions: dict[str, Definition]) -> str:
    caption = f"{escape(plot.caption)}{_definitions(plot.definitions, definitions)}"
    return (
        "<figure"
        f' class="plot"><h3>{escape(plot.title)}</h3>{plot.svg}<figcaption>{caption}</figcaption></figure>'
    )


def _table(table: Table, definitions: dict[str, Definition]) -> str:
    kinds = ["" if table.right(i) else ' class="words"' for i in range(len(table.columns))]
    head = "".join(
        f'<th scope="col"{kind}>{escape(column)}</th>'
        for kind, column in zip(kinds, table.columns, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(f"<td{kind}>{_cell(cell)}</td>" for kind, cell in zip(kinds, row, strict=True))
        + "</tr>"
        for row in table.rows
    )
    note = f"<p class='why'>{escape(table.note)}</p>" if table.note else ""
    kind = ' class="text"' if table.text else ""
    drawn = f'<div class="scroll"><table{kind}><tr>{head}</tr>{body}</table></div>'
    return (
        f'<section class="table"><h3>{escape(table.title)}</h3>{drawn}'
        f"{note}{_definitions(table.definitions, definitions)}</section>"
    )


def _cell(text: str) -> str:
    """Escaped, with a place to break in long names; a number, and what is short and in
    parentheses, is kept on one line.
    """
    kept = SHORT.sub(
        r'<span class="kept">\g<0></span>', NAME_JOINT.sub(r"\g<0><wbr>", escape(text))
    )
    return EXPONENT.sub(r'<span class="whole">\g<0></span>', kept)


def _definitions(names: Iterable[str], definitions: dict[str, Definition]) -> str:
    found = [(name, definitions[name]) for name in names if name in definitions]
    if not found:
        return ""
    parts: list[str] = []
    for name, one in found:
        parts.append(
            f"<dt>{escape(name)} = {escape(one.formula)}</dt><dd>numerator:"
            f" {escape(one.numerator)}</dd>"
        )
        parts += [f"<dd>denominator: {escape(one.denominator)}</dd>"] if one.denominator else []
        parts += [f"<dd>{escape(one.note)}</dd>"] if one.note else []
    return f"<details><summary>formula</summary><dl>{''.join(parts)}</dl></details>"
