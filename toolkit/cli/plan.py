"""`toolkit plan`: predict what a deployment will do, before anything runs."""

from __future__ import annotations

import typer

from toolkit.cli.common import (
    EXIT_USAGE,
    Config,
    Debug,
    Json,
    Overrides,
    app,
    console,
    load,
    show_json,
)


@app.command()
def plan(
    config: Config, overrides: Overrides = None, as_json: Json = False, debug: Debug = False
) -> None:
    """Say whether a deployment can work, what it needs, how fast it can be and what will run.

    It also lists the settings that will be changed silently.
    """
    from toolkit.workflows.plan import plan_of

    planned = plan_of(load(config, overrides, texts=False))
    if as_json:
        show_json(planned)
    else:
        from toolkit.report.plan import print_plan

        print_plan(planned, console())
    if not planned.possible:
        raise typer.Exit(EXIT_USAGE)
