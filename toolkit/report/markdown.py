"""Write report.md, which fits into a pull-request comment and folds most tables away."""

from __future__ import annotations

import re

from toolkit.records.report import ValidationReport
from toolkit.report.cells import Table
from toolkit.report.figures import gates_table, headline, next_steps, notes, proviso, tables
from toolkit.words import Verdict

__all__ = ["render_markdown"]

MARKS: dict[Verdict, str] = {"PASS": "✅", "FAIL": "❌", "INCONCLUSIVE": "❔"}
LIMIT = 65_536  # characters that GitHub allows in a comment
ROOM = 300  # characters of these that are reserved for the line about tables left out
OPEN = 1  # number of tables, from the first, that are not folded
SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~@])")


def render_markdown(report: ValidationReport) -> str:
    """Return the report as GitHub's Markdown, within the length of a comment. Tables that do not
    fit are left out and named.

    Cells are escaped, so that a prompt can neither break a table nor mention anybody.
    """
    title = f"## {MARKS.get(report.verdict, '')} {_escape(report.name)}: {report.verdict}"
    title += f" ({_escape(proviso(report))})" if proviso(report) else ""
    lines = [title, "", _escape(headline(report)), ""]
    lines += _rows(gates_table(report))
    lines += [
        "",
        "**What to do next**",
        "",
        *(f"- {_escape(step)}" for step in next_steps(report)),
        "",
    ]
    if notes(report):
        lines += ["**Remarks**", "", *(f"- {_escape(note)}" for note in notes(report)), ""]
    text = "\n".join(lines)
    left_out: list[str] = []
    for index, table in enumerate(tables(report)):
        block = _table(table, folded=index >= OPEN)
        if len(text) + len(block) > LIMIT - ROOM - sum(map(len, left_out)):
            left_out.append(_escape(table.title))
        else:
            text += block
    if left_out:
        text += f"\nLeft out for length, but in report.html: {'; '.join(left_out)}.\n"
    return text if len(text) <= LIMIT else text[: LIMIT - 1] + "…"


def _table(table: Table, *, folded: bool) -> str:
    body = [*_rows(table), *(["", _escape(table.note)] if table.note else [])]
    if folded:
        lines = [
            f"<details><summary>{_escape(table.title)}</summary>",
            "",
            *body,
            "",
            "</details>",
            "",
        ]
    else:
        lines = [f"**{_escape(table.title)}**", "", *body, ""]
    return "\n" + "\n".join(lines)


def _rows(table: Table) -> list[str]:
    align = ["--:" if table.right(index) else ":--" for index in range(len(table.columns))]
    cells = [table.columns, tuple(align), *(tuple(map(_escape, row)) for row in table.rows)]
    return ["| " + " | ".join(row) + " |" for row in cells]


def _escape(text: str) -> str:
    # A zero-width space after @ keeps a name from being notified; line breaks would end the row.
    flat = " ".join(text.split())
    return SPECIAL.sub(lambda match: "@\u200b" if match[1] == "@" else "\\" + match[1], flat)
