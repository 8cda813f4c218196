"""Write a validation report to files and to a terminal. Everything here is made from the record
alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.errors import StageError
from toolkit.pipeline.saved import read_saved
from toolkit.records.codec import from_json, to_json
from toolkit.records.report import REPORT_SCHEMA_VERSION, ValidationReport
from toolkit.report.html import render_html
from toolkit.report.markdown import render_markdown

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["print_report", "read_report", "render_json", "write_report"]


def render_json(report: ValidationReport) -> str:
    """Return the text of report.json, which docs/report.md describes."""
    return json.dumps(to_json(report), indent=2, ensure_ascii=False) + "\n"


def write_report(report: ValidationReport, out_dir: Path) -> tuple[Path, Path, Path]:
    """Write report.json, report.md and report.html into out_dir, and return their paths in that
    order.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    texts = {
        "report.json": render_json(report),
        "report.md": render_markdown(report),
        "report.html": render_html(report),
    }
    for name, text in texts.items():
        # A prompt may hold a lone surrogate; a report about it still has to be written.
        (out_dir / name).write_text(text, encoding="utf-8", errors="backslashreplace")
    json_path, markdown_path, html_path = (out_dir / name for name in texts)
    return json_path, markdown_path, html_path


def read_report(path: Path) -> ValidationReport:
    """Read report.json back. Raises StageError if it is no report or has another version."""
    hint = "Validate again: toolkit validate CONFIG."
    try:
        data = read_saved(path)
    except (OSError, ValueError) as error:
        raise StageError("report", f"cannot be read: {error}", where=path, hint=hint) from error
    version = data.get("schema_version")
    if not isinstance(version, int):
        raise StageError(
            "report", "is no report: it has no `schema_version`", where=path, hint=hint
        )
    if version != REPORT_SCHEMA_VERSION:
        what = f"has schema_version {version}, but this toolkit reads {REPORT_SCHEMA_VERSION}"
        if version > REPORT_SCHEMA_VERSION:
            hint = "Read it with the toolkit that wrote it, or with a newer one."
        raise StageError("report", what, where=path, hint=hint)
    try:
        return from_json(ValidationReport, data)
    except ValueError as error:
        what = f"is damaged: its contents do not match schema_version {version}: {error}"
        raise StageError("report", what, where=path, hint=hint) from error


def print_report(report: ValidationReport, console: Console, *, full: bool = False) -> None:
    """Print the report; `full` prints every table."""
    from toolkit.report import terminal

    terminal.print_report(report, console, full=full)
