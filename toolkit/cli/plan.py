"""`toolkit plan`: what a deployment will come to, before anything runs."""

from __future__ import annotations

import sys

import typer

from toolkit.cli.common import (
    PIPED_WIDTH,
    USAGE,
    Config,
    Debug,
    Json,
    Overrides,
    app,
    load,
    show_json,
)


@app.command()
def plan(
    config: Config, overrides: Overrides = None, as_json: Json = False, debug: Debug = False
) -> None:
    """Say whether it can work, what will be changed in silence, what it needs, how fast it can
    be and what will run.
    """
    from toolkit.workflows.plan import plan_of

    made = plan_of(load(config, overrides, texts=False))
    if as_json:
        show_json(made)
    else:
        from rich.console import Console

        from toolkit.report.plan import print_plan

        print_plan(made, Console(width=None if sys.stdout.isatty() else PIPED_WIDTH))
    if not made.possible:
        raise typer.Exit(USAGE)
