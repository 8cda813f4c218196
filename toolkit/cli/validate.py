"""`toolkit validate`: run the last stage, or repeat one divergence from its replay file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.build import build_stages
from toolkit.cli.common import (
    EXIT_CODES,
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
            help="Repeat one divergence from its file in build/reports/NAME/replay/.",
            metavar="FILE",
        ),
    ] = None,
    fresh: Fresh = None,
    overrides: Overrides = None,
    rehash: Rehash = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Serve the repository, measure it and judge it.

    The report is in build/reports/NAME/.
    """
    if replay is not None:
        if config is not None:
            raise UsageError(
                "the file of --replay contains its deployment, so it takes no CONFIG",
                hint=f"toolkit validate --replay {replay}",
            )
        if overrides or fresh or rehash:
            what = (
                "--replay serves the deployment as it was built, so --set, --fresh and --rehash"
                " have no effect"
            )
            raise UsageError(what, hint=f"toolkit validate --replay {replay}")
        _replay(replay, as_json=as_json)
    elif config is None:
        raise UsageError("give a CONFIG or --replay FILE", hint="toolkit validate CONFIG")
    else:
        build_stages(config, "validate", fresh, overrides, rehash, as_json)


def _replay(file: Path, *, as_json: bool) -> None:
    """Send the two requests of a divergence again, and print whether their texts still differ.

    Exit code 0: the texts are identical or differ by rounding. 1: they differ by more than
    rounding. 4: the difference cannot be explained.
    """
    from toolkit.workflows.replay import replay_divergence

    recorded, replayed = replay_divergence(
        file,
        here(),
        announce=lambda: say(
            "serving the deployment again for the two requests of this divergence"
        ),
    )
    before, now = recorded.divergence, replayed.divergence
    if as_json:
        show_json({"before": before, "now": replayed})
    else:
        show(f"prompt {before.prompt_index + 1}, {before.arm} arm, draft length {before.draft_len}")
        show(f"then  output token {before.position + 1}: {before.kind}, {before.detail}")
        if now is None:
            show("now   identical")
        else:
            show(f"now   output token {now.position + 1}: {now.kind}, {now.detail}")
        if replayed.as_before:
            show("      both texts are those of the file")
        else:
            show("      the texts are not those of the file")
    if now is not None and now.kind not in ("identical", "equivalent"):
        verdict = "INCONCLUSIVE" if now.kind == "unexplained" else "FAIL"
        raise typer.Exit(EXIT_CODES[verdict])
