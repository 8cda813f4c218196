"""Commands about this installation: `doctor`, `schema` and `version`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli.common import EXIT_FAILED, Debug, Json, app, show, show_json

if TYPE_CHECKING:
    from toolkit.plan.doctor import DiagnosisStatus


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        version_command()
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    pass


@app.command()
def doctor(as_json: Json = False, debug: Debug = False) -> None:
    """List what works here, what is missing, and how to fix it."""
    from toolkit.engines.vllm.environment import find_environment
    from toolkit.pipeline.toolchain import compiler_path
    from toolkit.plan.doctor import diagnose
    from toolkit.triton.process.server import find_libpython, find_server

    def server() -> tuple[Path, Path | None]:
        install = find_server()
        return install.binary, install.wheel

    diagnoses = diagnose(
        Path.cwd(),
        find_server=server,
        find_libpython=find_libpython,
        find_compiler=compiler_path,
        find_vllm=lambda: find_environment().summary,
    )
    if as_json:
        show_json(diagnoses)
    else:
        _print_diagnoses(diagnoses)
    if any(diagnosis.essential and diagnosis.status == "missing" for diagnosis in diagnoses):
        raise typer.Exit(EXIT_FAILED)


def _print_diagnoses(diagnoses: Any) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    styles: dict[DiagnosisStatus, str] = {"ok": "green", "warn": "yellow", "missing": "bold red"}
    table = Table(box=None, pad_edge=False)
    for title in ("", "check", "what was found"):
        table.add_column(title, overflow="fold")
    for diagnosis in diagnoses:
        detail = Text(diagnosis.detail)
        if diagnosis.hint is not None:
            detail.append(f"\n-> {diagnosis.hint}")
        status = Text(diagnosis.status, style=styles[diagnosis.status])
        table.add_row(status, diagnosis.check, detail)
    Console().print(table)


@app.command()
def schema() -> None:
    """Print the JSON Schema of the YAML, for editors."""
    from toolkit.config.json_schema import json_schema

    show_json(json_schema())


@app.command("version")
def version_command() -> None:
    """Print the version."""
    from toolkit import __version__

    show(f"toolkit {__version__}")
