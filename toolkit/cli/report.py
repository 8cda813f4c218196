"""`toolkit report`: print the last report, or open it in a browser."""

from __future__ import annotations

from typing import Annotated

import typer

from toolkit.cli.common import (
    Config,
    Debug,
    Json,
    Overrides,
    app,
    here,
    load,
    print_report,
    show,
)
from toolkit.errors import UsageError


@app.command()
def report(
    config: Config,
    overrides: Overrides = None,
    as_json: Json = False,
    open_it: Annotated[
        bool, typer.Option("--open", help="Open the HTML report in a browser.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Print the last report in full, or open it in a browser."""
    folder = here().report(load(config, overrides).name)
    file = folder / "report.json"
    if not file.exists():
        raise UsageError(
            "there is no report yet", where=folder, hint=f"Make one: toolkit build {config}"
        )
    if open_it:
        import webbrowser

        page = (folder / "report.html").absolute()
        if not webbrowser.open(page.as_uri()):
            raise UsageError("no browser could be started", hint=f"Open the page yourself: {page}")
        show(str(page))
    elif as_json:
        show(file.read_text(encoding="utf-8").rstrip("\n"))
    else:
        from toolkit.report.render import read_report

        print_report(read_report(file), full=True)
        show(f"in full: {folder / 'report.html'}")
