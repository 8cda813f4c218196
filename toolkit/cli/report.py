"""`toolkit report`: print the last report, or open it in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.cli.common import (
    EXIT_CODES,
    Debug,
    Json,
    Overrides,
    app,
    here,
    load,
    print_report,
    shell_path,
    show,
    show_json,
)
from toolkit.errors import UsageError
from toolkit.rounding import size

if TYPE_CHECKING:
    from toolkit.pipeline.manifest import Verified


@app.command()
def report(
    config: Annotated[
        Path,
        typer.Argument(
            help="The deployment's YAML file; for --verify also a deployed folder.",
            metavar="CONFIG",
            show_default=False,
        ),
    ],
    overrides: Overrides = None,
    as_json: Json = False,
    open_it: Annotated[
        bool, typer.Option("--open", help="Open the HTML report in a browser.")
    ] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help=(
                "Compare every file of engines/NAME and triton_repo/NAME, or of a copy of either,"
                " with its manifest SHA256SUMS. Exit code 1 if one differs."
            ),
        ),
    ] = False,
    debug: Debug = False,
) -> None:
    """Print or open the last report, or verify what is deployed."""
    if verify:
        _verify(config, overrides, as_json=as_json)
        return
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


def _verify(config: Path, overrides: list[str] | None, *, as_json: bool) -> None:
    """Verify a folder, or the folders of a deployment."""
    from toolkit.cli.progress import displayed
    from toolkit.workflows.verify import deployed_folders, verify_folders

    folders = [config]
    if not config.is_dir():
        folders = deployed_folders(load(config, overrides, texts=False), here())
    with displayed() as display:
        results = verify_folders(folders, display.started)
    if as_json:
        show_json(list(results))
    else:
        for verified in results:
            show("\n".join(_lines(verified)))
    if not all(verified.is_whole for verified in results):
        raise typer.Exit(EXIT_CODES["FAIL"])


def _lines(verified: Verified) -> list[str]:
    faults = {
        "changed": verified.changed,
        "missing": verified.missing,
        "added": verified.added,
    }
    return [
        f"{shell_path(verified.path)}: {verified.files} files, {size(verified.num_bytes)}, are as"
        " they were built",
        *(f"  {fault:8} {name}" for fault, names in faults.items() for name in names),
        *(f"  expected {name}: serving adds it" for name in verified.expected),
        f"  manifest {verified.digest}",
    ]
