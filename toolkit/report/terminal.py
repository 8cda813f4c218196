"""Print the report on a terminal: figures, gates, what to do next and the verdict. There are
colours only where rich finds a terminal.
"""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from toolkit.records.report import ValidationReport
from toolkit.report.cells import Table
from toolkit.report.figures import gates_table, headline, next_steps, notes, proviso, tables

__all__ = ["print_report"]

STYLES = {
    "PASS": "bold green",
    "FAIL": "bold red",
    "INCONCLUSIVE": "bold yellow",
    "NOT JUDGED": "dim",
}


def print_report(report: ValidationReport, console: Console, *, full: bool = False) -> None:
    """Print the figures first, so that gates, what to do next and the verdict come last, where the
    reader looks. `full` prints every table.
    """
    console.print()
    for table in tables(report):
        if full or table.is_brief:
            console.print(_rich(table))
            if table.note:
                console.print(Text(table.note, style="dim"))
            console.print()
    console.print(_rich(gates_table(report)))
    console.print()
    console.print(Text(headline(report)))
    for step in next_steps(report):
        console.print(Text(f"- {step}"))
    for note in notes(report):
        console.print(Text(f"- {note}", style="dim"))
    line = Text.assemble(f"{report.name}: ", (report.verdict, STYLES.get(report.verdict, "")))
    if proviso(report):
        line.append(f" ({proviso(report)})")
    console.print(line)


def _rich(table: Table) -> RichTable:
    drawn = RichTable(
        title=table.title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
    )
    for index, column in enumerate(table.columns):
        drawn.add_column(column, justify="right" if table.right(index) else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
    return drawn
