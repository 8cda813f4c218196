"""About this installation: `doctor`, `schema`, `version`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli.common import FAILED, Debug, Json, app, show, show_json

if TYPE_CHECKING:
    from toolkit.plan.doctor import DiagnosisStatus


def _print_version(asked: bool) -> None:
    if asked:
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
    """List what works on this machine and what is missing, each with its fix."""
    from toolkit.engines.embedded.toolchain import compiler_path
    from toolkit.plan.doctor import diagnose
    from toolkit.triton.process.server import find_libpython, find_server

    def server() -> tuple[Path, Path | None]:
        install = find_server()
        return install.binary, install.wheel

    found = diagnose(
        Path.cwd(), find_server=server, find_libpython=find_libpython, find_compiler=compiler_path
    )
    if as_json:
        show_json(found)
    else:
        _print_diagnoses(found)
    if any(one.essential and one.status == "missing" for one in found):
        raise typer.Exit(FAILED)


def _print_diagnoses(found: Any) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    styles: dict[DiagnosisStatus, str] = {"ok": "green", "warn": "yellow", "missing": "bold red"}
    table = Table(box=None, pad_edge=False)
    for title in ("", "check", "what was found"):
        table.add_column(title, overflow="fold")
    for one in found:
        detail = Text(one.detail)
        if one.hint is not None:
            detail.append(f"\n-> {one.hint}")
        table.add_row(Text(one.status, style=styles[one.status]), one.check, detail)
    Console().print(table)


@app.command()
def schema() -> None:
    """Print the JSON Schema of the YAML, for editors."""
    from toolkit.config.schema import DeploymentConfig

    described = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **DeploymentConfig.model_json_schema(),
    }
    show_json(described)


@app.command("version")
def version_command() -> None:
    """Print the version."""
    from toolkit import __version__

    show(f"toolkit {__version__}")
