"""report.md: short enough for a pull-request comment, long tables folded away."""

from __future__ import annotations

import re

from toolkit.records import ValidationReport
from toolkit.report.cells import Table
from toolkit.report.figures import gates_table, headline, next_steps, tables

__all__ = ["render_markdown"]

MARKS = {"PASS": "✅", "FAIL": "❌", "INCONCLUSIVE": "❔"}
OPEN = 1  # tables that are not folded away
SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~@])")


def render_markdown(report: ValidationReport) -> str:
    """GitHub's Markdown. Cells are escaped, so that a prompt can neither break a table nor mention anybody."""
    lines = [f"## {MARKS.get(report.verdict, '')} {_escape(report.name)}: {report.verdict}", "", _escape(headline(report)), ""]
    lines += _rows(gates_table(report))
    lines += ["", "**What to do next**", "", *(f"- {_escape(step)}" for step in next_steps(report)), ""]
    for index, table in enumerate(tables(report)):
        body = [*_rows(table), *(["", _escape(table.note)] if table.note else [])]
        if index < OPEN:
            lines += [f"**{_escape(table.title)}**", "", *body, ""]
        else:
            lines += [f"<details><summary>{_escape(table.title)}</summary>", "", *body, "", "</details>", ""]
    return "\n".join(lines)


def _rows(table: Table) -> list[str]:
    align = [":--", *(":--" if table.text else "--:" for _ in table.columns[1:])]
    cells = [table.columns, tuple(align), *(tuple(map(_escape, row)) for row in table.rows)]
    return ["| " + " | ".join(row) + " |" for row in cells]


def _escape(text: str) -> str:
    # A zero-width space after @ keeps a name from being notified; line breaks would end the row.
    flat = " ".join(text.split())
    return SPECIAL.sub(lambda match: "@\u200b" if match[1] == "@" else "\\" + match[1], flat)
