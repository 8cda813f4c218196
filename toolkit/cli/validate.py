"""`toolkit validate`: the last stage, or one divergence asked again from its replay file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.build import build_stages
from toolkit.cli.common import (
    Debug,
    Fresh,
    Json,
    Overrides,
    Rehash,
    app,
    here,
    say,
    show,
    show_json,
)
from toolkit.errors import UsageError


@app.command("validate")
def validate_command(
    config: Annotated[
        Path | None,
        typer.Argument(help="The deployment's YAML file.", metavar="CONFIG", show_default=False),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(
            help="Ask again about one divergence: a file of build/reports/NAME/replay/.",
            metavar="FILE",
        ),
    ] = None,
    fresh: Fresh = None,
    overrides: Overrides = None,
    rehash: Rehash = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Serve the repository, measure and judge it; the report is in build/reports/NAME/."""
    if replay is not None:
        if config is not None:
            raise UsageError(
                "--replay FILE holds its deployment itself",
                hint=f"toolkit validate --replay {replay}",
            )
        if overrides or fresh or rehash:
            what = (
                "--replay serves what is built, as it was built: --set, --fresh and --rehash have"
                " nothing to say"
            )
            raise UsageError(what, hint=f"toolkit validate --replay {replay}")
        _replay(replay, as_json=as_json)
    elif config is None:
        raise UsageError("a CONFIG or --replay FILE is needed", hint="toolkit validate CONFIG")
    else:
        build_stages(config, "validate", fresh, overrides, rehash, as_json)


def _replay(file: Path, *, as_json: bool) -> None:
    """Exit code 0 when the texts are the same now or differ by rounding, 1 when they differ
    beyond it.
    """
    from toolkit.workflows.replay import replay_divergence

    say("serving the deployment again for the two requests of this divergence")
    found, now = replay_divergence(file, here())
    before, one = found.divergence, now.divergence
    if as_json:
        show_json({"before": before, "now": now})
    else:
        show(f"prompt {before.prompt_index + 1}, {before.arm} arm, draft length {before.draft_len}")
        show(f"then  output token {before.position + 1}: {before.kind}, {before.detail}")
        same = (
            "both texts are those of the file"
            if now.as_before
            else "the texts are not those of the file"
        )
        show(
            "now   identical"
            if one is None
            else f"now   output token {one.position + 1}: {one.kind}, {one.detail}"
        )
        show(f"      {same}")
    if one is not None and one.kind not in ("identical", "equivalent"):
        raise typer.Exit(4 if one.kind == "unexplained" else 1)
