"""`toolkit plan`: predict what a deployment will do, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

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
    say,
    shell_path,
    show_json,
    write_new,
)
from toolkit.errors import UsageError

if TYPE_CHECKING:
    from toolkit.plan.pytorch_flow import Translation

As = Annotated[
    Literal["trtllm_pytorch"] | None,
    typer.Option(
        "--as",
        help=(
            "Plan a deployment of the engine flow (trt_engine) as it would be in TensorRT-LLM's"
            " PyTorch flow, and list which keys change."
        ),
        show_default=False,
    ),
]
Write = Annotated[
    Path | None,
    typer.Option(help="With --as: write the new YAML into this file.", show_default=False),
]


@app.command()
def plan(
    config: Config,
    overrides: Overrides = None,
    as_kind: As = None,
    write: Write = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Say whether a deployment can work, and what will run.

    It also says what memory it needs, how fast it can be, and which settings will be changed
    silently.
    """
    from toolkit.workflows.plan import plan_as_pytorch, plan_of

    if write is not None and as_kind is None:
        raise UsageError("--write needs --as", hint="Add --as trtllm_pytorch.")
    translation: Translation | None = None
    if as_kind is None:
        planned = plan_of(load(config, overrides, texts=False))
    else:
        planned, translation = plan_as_pytorch(config, overrides or ())
    if as_json:
        show_json(planned)
    else:
        from toolkit.report.plan import print_plan

        print_plan(planned, console())
    if not planned.possible:
        if write is not None:
            say(f"{shell_path(write)} is not written: set other keys with --set KEY=VALUE first")
        raise typer.Exit(EXIT_USAGE)
    if translation is not None and write is not None:
        _write(translation, config, write)


def _write(translation: Translation, config: Path, file: Path) -> None:
    from dataclasses import replace

    from toolkit.config.load import moved
    from toolkit.plan.pytorch_flow import yaml_text

    folders = config.absolute().parent, file.absolute().parent
    at_its_place = replace(translation, data=moved(translation.data, *folders))
    write_new(file, yaml_text(at_its_place, config.name), "--write")
    say(f"wrote {shell_path(file)}")
